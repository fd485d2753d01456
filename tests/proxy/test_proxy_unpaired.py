"""Engines that cannot disaggregate serve all the same, and the log says why they do not."""

from __future__ import annotations

import asyncio
import json

import grpc.aio
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdmesh.cli.status import PREFIX, _lines, as_json
from pdmesh.openai.http.route_header import describe_route
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.mesh_pb2_grpc import add_EngineServicer_to_server
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from support.awaiting import until
from support.fake_engine import FakeEngine
from support.fake_mesh import FakeMesh, fake_mesh, proxy_over, token_request, tokens_of


def test_engines_that_cannot_pair_are_named_once_with_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        del decode.info.layout_fingerprints[:]
        decode.info.layout_fingerprints.append("layout-2")
        async with fake_mesh(prefill, decode) as mesh:
            # Whatever else changes is no news about these two.
            mesh.cluster._on_change()
            assert tokens_of(await mesh.collect(token_request()))

    asyncio.run(body())
    (warning,) = [record.getMessage() for record in caplog.records if "cannot hand over" in record.getMessage()]
    assert "KV layouts (block size, dtype, backend) differ" in warning
    assert "layout-1" in warning
    assert "layout-2" in warning


def test_a_refused_pair_is_told_in_the_debug_header_and_in_the_metrics() -> None:
    """Both sides' values and the settings stood in one line of the proxy's log only, long before anyone asked."""

    async def body() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        decode.info.layout_fingerprints[:] = ["layout-2"]
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request()
            assert tokens_of(await mesh.collect(request))
            header = describe_route([request.trace])
            assert "reason=no_compatible_pair" in header
            why = header.partition("why=")[2]
            for words in (prefill.engine_id, decode.engine_id, "layout-1", "layout-2", "block size"):
                assert words in why
            shown = generate_latest(mesh.registry).decode()
            (sample,) = [line for line in shown.splitlines() if line.startswith("pdmesh_proxy_unpaired_engines{")]
            assert all(words in sample for words in (prefill.engine_id, decode.engine_id, "layout-1", "layout-2"))
            # It goes with its cause.
            await prefill.kill()
            await until(lambda: len(mesh.cluster.view().engines) == 1)
            assert "pdmesh_proxy_unpaired_engines{" not in generate_latest(mesh.registry).decode()

    asyncio.run(body())


def test_the_status_says_of_each_engine_where_it_is_and_what_it_does() -> None:
    """It said how many there were."""

    async def body() -> None:
        prefill, decode = FakeEngine("prefill", max_model_len=2048), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            assert tokens_of(await mesh.collect(token_request()))
            decode.drain(within_ms=60_000)
            await until(lambda: any(engine.draining for engine in mesh.cluster.view().engines))
            text = generate_latest(mesh.registry).decode()
            samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
            told = {each.name.removeprefix(PREFIX): each for each in samples}
            lines = list(_lines(samples, told))
            assert any(
                f"{prefill.engine_id} (prefill) at {prefill.address}: serving, 0 sequences" in line for line in lines
            )
            assert any(f"{decode.engine_id} (decode) at {decode.address}: draining" in line for line in lines)
            found = json.loads(as_json(samples, told))
            assert {(each["engine"], each["address"], each["role"], each["state"]) for each in found["engines"]} == {
                (prefill.engine_id, prefill.address, "prefill", "serving"),
                (decode.engine_id, decode.address, "decode", "draining"),
            }
            assert {each["engine"]: each["context_tokens"] for each in found["engines"]} == {
                prefill.engine_id: 2048,
                decode.engine_id: 4096,
            }
            assert any(prefill.engine_id in line and "a context of 2048 tokens" in line for line in lines)
            assert found["requests_in_flight"] == 0
            assert found["unreached"] == []

    asyncio.run(body())


def test_an_engine_that_is_listed_but_cannot_be_used_is_named_with_the_reason() -> None:
    """One with another secret, or without TLS, was in no metric: `pdmesh status` told of the others as if they were all."""

    def told(mesh: FakeMesh) -> str:
        text = generate_latest(mesh.registry).decode()
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        names = {each.name.removeprefix(PREFIX): each for each in samples}
        return "\n".join(_lines(samples, names))

    async def body() -> None:
        decode = FakeEngine("decode")

        def register(server: grpc.aio.Server) -> list[str]:
            add_EngineServicer_to_server(decode, server)
            return []

        async with (
            decode,
            grpc_server("127.0.0.1", 0, MeshSecret("the secret of another mesh"), register) as port,
            proxy_over(prefill=[f"127.0.0.1:{port}"], decode=[decode.address]) as mesh,
        ):
            await until(lambda: "mesh secret" in told(mesh) and "engines: 1 decode" in told(mesh))
            assert f"listed, but not used: 127.0.0.1:{port}: " in told(mesh)
            assert f"listed, but not used: {decode.address}" not in told(mesh)

    asyncio.run(body())


@pytest.mark.parametrize(("old_prefill", "old_decode"), [(True, False), (False, True), (True, True)])
def test_engines_of_the_protocol_version_before_disaggregate(old_prefill: bool, old_decode: bool) -> None:
    """As in the middle of an upgrade, one replica after the other."""

    async def body() -> None:
        prefill, decode = FakeEngine("prefill", is_old=old_prefill), FakeEngine("decode", is_old=old_decode)
        async with fake_mesh(prefill, decode) as mesh:
            newest = {view.can_prefill: view.protocol_max for view in mesh.cluster.view().engines}
            assert newest == {True: 2 - old_prefill, False: 2 - old_decode}
            request = token_request(max_tokens=20)
            assert len(tokens_of(await mesh.collect(request))) == 20
            assert (request.trace.reason, request.trace.fallbacks) == ("disaggregated", [])
            assert len(decode.requests) == 1
            assert decode.requests[0].ticket
            await until(lambda: not prefill.offers.open)

    asyncio.run(body())


def test_engines_whose_capabilities_do_not_meet_are_not_paired(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        del decode.info.capabilities[:]
        decode.info.capabilities.append(pb.Capability(name="ticket_read", oldest=2, newest=3))
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request()
            assert tokens_of(await mesh.collect(request))
            assert request.trace.reason == "no_compatible_pair"

    asyncio.run(body())
    assert "tickets are written in version 1 and read in 2 to 3" in caplog.text
