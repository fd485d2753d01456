"""Engines with different models behind one proxy: who is used, what is told, and that no answer is of two models."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdmesh.cli.status import PREFIX, _lines
from pdmesh.errors import PeerUnavailable
from pdmesh_proxy.config import ProxyConfig
from support.awaiting import until
from support.fake_engine import Behaviour, FakeEngine, expected_tokens
from support.fake_mesh import PROMPT, FakeMesh, proxy_over, token_request, tokens_of

RIGHT, WRONG = "aaaaaaaa" * 4, "bbbbbbbb" * 4
SLOW = Behaviour(step_s=0.02)


def told(mesh: FakeMesh) -> str:
    text = generate_latest(mesh.registry).decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return "\n".join(_lines(samples, {each.name.removeprefix(PREFIX): each for each in samples}))


def listed(path: Path, *engines: FakeEngine) -> str:
    path.write_text("".join(f"{engine.address}\n" for engine in engines))
    return f"file:{path}"


def test_a_wrong_engine_that_came_first_does_not_keep_the_others_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its model became the mesh's for as long as it lived: clients had its tokens, with 200."""

    async def scenario() -> None:
        wrong = FakeEngine("decode", engine_id="d-wrong", model_fingerprint=WRONG)
        prefill, one, other = (FakeEngine(r, model_fingerprint=RIGHT) for r in ("prefill", "decode", "decode"))
        async with wrong, prefill, one, other:
            prefills, decodes = listed(tmp_path / "prefill"), listed(tmp_path / "decode", wrong)
            async with proxy_over(prefill=[prefills], decode=[decodes]) as mesh:
                await mesh.collect(token_request())
                assert len(wrong.requests) == 1
                listed(tmp_path / "decode", wrong, one, other)
                listed(tmp_path / "prefill", prefill)
                await until(lambda: len(mesh.cluster.view().engines) == 3)
                for _ in range(4):
                    assert tokens_of(await mesh.collect(token_request(max_tokens=40))) == expected_tokens(PROMPT, 40)
                assert len(wrong.requests) == 1
                assert one.requests
                assert other.requests
                assert mesh.metric("pdmesh_proxy_model_switches_total") == 1
                assert f"not used: model fake, fingerprint {WRONG}: d-wrong (decode)" in told(mesh)
                assert f"  model fake, fingerprint {RIGHT}: " in told(mesh)

    asyncio.run(scenario())
    (switch,) = [each.getMessage() for each in caplog.records if "to another model" in each.getMessage()]
    assert f"fake ({RIGHT})" in switch
    assert f"fake ({WRONG})" in switch


def test_a_refused_engine_is_told_what_the_mesh_serves_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """Where the first engines to be used and to be refused were heard together, the name was empty."""

    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill", model_fingerprint=WRONG), FakeEngine("decode", model_fingerprint=RIGHT)
        async with prefill, decode, proxy_over(prefill=[prefill.address], decode=[decode.address]) as mesh:
            await until(lambda: mesh.metric("pdmesh_proxy_engines_refused"))
            assert mesh.metric("pdmesh_proxy_engines", role="decode") == 1

    asyncio.run(scenario())
    (warning,) = [each.getMessage() for each in caplog.records if "is not used" in each.getMessage()]
    assert f"it serves fake ({WRONG}), the mesh serves fake ({RIGHT})" in warning


def test_what_runs_ends_with_its_model_and_never_goes_on_with_another(tmp_path: Path) -> None:
    """A rolling update at its majority: old engines take what runs from each other, and when the last has gone it is an error."""

    async def scenario() -> None:
        old = [FakeEngine("decode", model_fingerprint=WRONG, behaviour=SLOW) for _ in range(2)]
        new = [FakeEngine("decode", model_fingerprint=RIGHT) for _ in range(3)]
        async with old[0], old[1], new[0], new[1], new[2]:
            decodes = listed(tmp_path / "decode", *old)
            async with proxy_over(prefill=[], decode=[decodes]) as mesh:
                await until(lambda: len(mesh.cluster.view().engines) == 2)
                stream = mesh.generator.generate(token_request(max_tokens=60))
                deltas = [await anext(stream)]
                first = next(each for each in old if each.requests)
                (second,) = [each for each in old if each is not first]
                listed(tmp_path / "decode", *old, *new)
                await until(lambda: len(mesh.cluster.view().engines) == 3)
                await first.kill()
                deltas += [await anext(stream) for _ in range(10)]
                assert len(second.requests) == 1
                await second.kill()
                with pytest.raises(
                    PeerUnavailable, match=f"no engine is left .* began with .{WRONG}.; the mesh serves"
                ):
                    deltas += [delta async for delta in stream]
                shown = tokens_of(deltas)
                assert shown == expected_tokens(PROMPT, 60)[: len(shown)]
                assert not any(each.requests for each in new)
                assert await mesh.collect(token_request())

    asyncio.run(scenario())


def test_a_request_of_which_nothing_came_yet_goes_to_the_new_model(tmp_path: Path) -> None:
    """It stayed with the model of the engine that failed it, and ended with an error where that was the last one."""

    async def scenario() -> None:
        dying = FakeEngine("decode", model_fingerprint=WRONG, behaviour=Behaviour(die_after=0))
        other = FakeEngine("decode", model_fingerprint=RIGHT)
        async with dying, other:
            extra = {"engine_wait_timeout_s": 5.0}
            async with proxy_over(prefill=[], decode=[listed(tmp_path / "decode", dying)], extra=extra) as mesh:
                await until(lambda: mesh.cluster.serving)
                answer = asyncio.create_task(mesh.collect(token_request()))
                await until(lambda: dying.requests)
                listed(tmp_path / "decode", dying, other)
                assert tokens_of(await answer) == expected_tokens(PROMPT, 8)
                assert other.requests

    asyncio.run(scenario())


def test_a_step_of_a_beam_search_goes_to_no_other_model_than_the_one_before() -> None:
    async def scenario() -> None:
        old, new = FakeEngine("decode", model_fingerprint=WRONG), FakeEngine("decode", model_fingerprint=RIGHT)
        async with old, new, proxy_over(prefill=[], decode=[old.address, new.address]) as mesh:
            await until(lambda: mesh.cluster.serving)
            assert mesh.cluster.card(0).name == "fake"
            request = token_request()
            await mesh.collect(request)
            assert request.trace.model_fingerprint == RIGHT
            step = token_request(model_fingerprint=WRONG)
            await mesh.collect(step)
            assert (len(old.requests), len(new.requests)) == (1, 1)
            await old.kill()
            with pytest.raises(PeerUnavailable, match=f"began with .{WRONG}.; the mesh serves fake .{RIGHT}. now"):
                await mesh.collect(token_request(model_fingerprint=WRONG))

    asyncio.run(scenario())


def test_the_operator_says_which_model_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        strangers = [FakeEngine("decode", engine_id=f"d{i}", model_fingerprint=RIGHT) for i in range(2)]
        wanted = FakeEngine("decode", model_fingerprint=WRONG)
        async with strangers[0], strangers[1], wanted:
            decodes = listed(tmp_path / "decode", *strangers)
            extra = {"model_fingerprint": WRONG[:8].upper()}
            async with proxy_over(prefill=[], decode=[decodes], extra=extra) as mesh:
                await until(lambda: mesh.metric("pdmesh_proxy_engines_refused") == 2)
                reason = f"model-fingerprint {WRONG[:8]} asks for: d0 serves fake .{RIGHT}., d1 serves"
                with pytest.raises(PeerUnavailable, match=reason):
                    await mesh.collect(token_request())
                with pytest.raises(PeerUnavailable, match=reason):
                    await mesh.generator.card()
                assert f"model-fingerprint {WRONG[:8]}" in await mesh.generator.problem()
                listed(tmp_path / "decode", *strangers, wanted)
                await until(lambda: mesh.cluster.serving)
                assert tokens_of(await mesh.collect(token_request())) == expected_tokens(PROMPT, 8)
                assert not any(each.requests for each in strangers)
                # It has gone: the others are no replacement.
                listed(tmp_path / "decode", *strangers)
                await until(lambda: not mesh.cluster.serving)
                with pytest.raises(PeerUnavailable, match=reason):
                    await mesh.collect(token_request())

    asyncio.run(scenario())
    told_once = [each.getMessage() for each in caplog.records if "is not used" in each.getMessage()]
    assert any(f"it serves fake ({RIGHT}), model-fingerprint asks for {WRONG[:8]}" in each for each in told_once)


@pytest.mark.parametrize("fingerprint", ["aaaaaaa", "a" * 33, "75b0be6d-398", "model-one"])
def test_a_fingerprint_that_can_be_none_is_refused(fingerprint: str) -> None:
    with pytest.raises(ValueError, match="must be 8 to 32 hex digits"):
        ProxyConfig(model="fake", model_fingerprint=fingerprint)
