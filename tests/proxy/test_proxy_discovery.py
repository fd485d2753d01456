"""Targets become addresses; files and names are looked at again; a failing look-up takes nobody away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdmesh.config import load_config
from pdmesh.errors import ConfigError
from pdmesh_proxy.config import ProxyConfig
from pdmesh_proxy.discovery import Addresses, Discovery, Listed
from support.awaiting import until


def discovery(
    prefill: list[str],
    decode: list[str],
    *,
    rest_interval_s: float = 0.02,
    is_settled: Callable[[], bool] = lambda: True,
) -> tuple[Discovery, list[Addresses]]:
    seen: list[Addresses] = []
    found = Discovery(
        {Listed.PREFILL: prefill, Listed.DECODE: decode},
        interval_s=0.02,
        rest_interval_s=rest_interval_s,
        on_addresses=seen.append,
        is_settled=is_settled,
    )
    return found, seen


def test_literals_and_names_and_an_engine_in_both_lists() -> None:
    found, seen = discovery(["127.0.0.1:1", "[::1]:2"], ["localhost:1"])
    asyncio.run(found.look())
    both = frozenset({Listed.PREFILL, Listed.DECODE})
    assert seen == [{"127.0.0.1:1": both, "[::1]:2": frozenset({Listed.PREFILL})}]


def test_only_literals_are_looked_at_once() -> None:
    found, seen = discovery(["127.0.0.1:1"], [])
    asyncio.run(asyncio.wait_for(found.run(), 1))
    assert len(seen) == 1


def test_a_file_is_read_again_and_a_broken_one_keeps_what_was_known(tmp_path: Path) -> None:
    listing = tmp_path / "engines"
    listing.write_text("# nobody yet\n")

    async def scenario() -> None:
        found, seen = discovery([], [f"file:{listing}"])
        task = asyncio.create_task(found.run())
        await until(lambda: seen)
        assert seen == [{}]
        assert found.wanted == frozenset(), "an empty list is not a wish for engines"
        listing.write_text("127.0.0.1:5  # first\n\n127.0.0.1:6\n")
        await until(lambda: len(seen) == 2)
        assert set(seen[1]) == {"127.0.0.1:5", "127.0.0.1:6"}
        assert found.wanted == {Listed.DECODE}
        listing.write_text("nonsense\n")
        await asyncio.sleep(0.1)
        listing.unlink()
        await asyncio.sleep(0.1)
        assert len(seen) == 2
        listing.write_text("127.0.0.1:6\n")
        await until(lambda: len(seen) == 3)
        assert set(seen[2]) == {"127.0.0.1:6"}
        task.cancel()

    asyncio.run(scenario())


def test_at_rest_it_looks_at_once_when_asked_and_goes_on_while_something_is_amiss(tmp_path: Path) -> None:
    listing = tmp_path / "engines"
    listing.write_text("127.0.0.1:1\n")

    async def scenario() -> None:
        settled = True
        found, seen = discovery([], [f"file:{listing}"], rest_interval_s=3600, is_settled=lambda: settled)
        task = asyncio.create_task(found.run())
        await until(lambda: seen)
        listing.write_text("127.0.0.1:2\n")
        await asyncio.sleep(0.2)
        assert len(seen) == 1, "nobody asks"
        found.hurry()
        await until(lambda: len(seen) == 2)
        # Asked between two looks: the next comes at the usual pace.
        listing.write_text("127.0.0.1:3\n")
        found.hurry()
        await until(lambda: len(seen) == 3)
        settled = False
        found.hurry()
        for port in (4, 5):
            listing.write_text(f"127.0.0.1:{port}\n")
            await until(lambda port=port: set(seen[-1]) == {f"127.0.0.1:{port}"})
        task.cancel()

    asyncio.run(scenario())


def test_the_rest_ends_by_itself(tmp_path: Path) -> None:
    listing = tmp_path / "engines"
    listing.write_text("127.0.0.1:1\n")

    async def scenario() -> None:
        found, seen = discovery([], [f"file:{listing}"], rest_interval_s=0.1)
        task = asyncio.create_task(found.run())
        await until(lambda: seen)
        listing.write_text("127.0.0.1:2\n")
        await until(lambda: len(seen) == 2)
        task.cancel()

    asyncio.run(scenario())


def test_every_address_of_a_name_is_an_engine_and_changes_are_seen() -> None:
    answers: list[list[str]] = [["10.0.0.1", "10.0.0.2"], ["10.0.0.2"], []]

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        async def getaddrinfo(host: str, port: object, *, family: int = 0, **_: Any) -> list[Any]:
            assert host == "prefill.pdmesh.svc"
            if not answers[0] or family != socket.AF_INET:
                raise socket.gaierror(socket.EAI_NONAME, "not known")
            return [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for address in answers[0]]

        loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign, assignment]
        found, seen = discovery(["prefill.pdmesh.svc:8101"], [])
        for _ in range(3):
            await found.look()
            answers.pop(0)
        assert [set(addresses) for addresses in seen] == [{"10.0.0.1:8101", "10.0.0.2:8101"}, {"10.0.0.2:8101"}]

    asyncio.run(scenario())


@pytest.mark.parametrize("target", ["nohost", "host:", ":80", "host:0", "host:99999", "host:eight"])
def test_a_malformed_target_is_a_config_error_that_names_it(target: str) -> None:
    with pytest.raises(ConfigError, match=f"prefill.*{target}"):
        load_config(ProxyConfig, ["--prefill", target], prog="pdmesh proxy", environ={})
