"""A mesh of real processes whose gRPC is mutual TLS: it serves, over each connector, and takes no stranger in."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import grpc
import pytest

from pdmesh.channels import open_blocking_channel
from pdmesh.config import ServiceConfig
from pdmesh.models.source import DEMO_MODEL
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.security import MeshSecret
from support.authority import Authority, Files
from support.mesh import Mesh, mesh, start

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

PROMPT = list(range(100, 260))
SECRET = "a-secret-for-the-tests"


def describe(address: str, secret: MeshSecret) -> str:
    """Ask an engine who it is. Raises RpcError."""
    with open_blocking_channel(address, secret) as channel:
        stub = mesh_pb2_grpc.EngineStub(channel)
        return str(stub.Describe(pb.DescribeRequest(), metadata=secret.call_metadata(), timeout=10).engine_id)


def member(files: Files, secret: str = SECRET) -> MeshSecret:
    return MeshSecret.load(ServiceConfig(secret=secret, **files.settings))


def _until_stored(running: Mesh) -> None:
    """Have prompts computed until the tier has one of them."""
    assert running.kvcache is not None
    deadline = time.monotonic() + 40
    for number in itertools.count():
        running.complete([1000 + number, *PROMPT])
        if running.kvcache.metric("pdmesh_kvcache_slots_used"):
            return
        assert time.monotonic() < deadline, running.prefill[0].log[-2000:]
        time.sleep(0.5)


def _meet_a_new_tier(running: Mesh, *flags: str) -> None:
    """Engines that knew a tier with the former certificates meet one with the new ones at its address."""
    assert running.kvcache is not None
    port = str(running.kvcache.facts["grpc_port"])
    running.kvcache.stop()
    tier = ("--port", "0", "--grpc-port", port, "--connector", "grpc", *flags)
    running.kvcache = start("kvcache", *tier, folder=running.folder).wait_ready()
    _until_stored(running)


@pytest.mark.parametrize(("connector", "secret"), [("shm", SECRET), ("grpc", "")], ids=["shm", "grpc, no secret"])
def test_a_mesh_over_mutual_tls(tmp_path: Path, connector: str, secret: str) -> None:
    """One request through proxy, prefill, decode and tier, then strangers, then new certificates for everyone."""
    authority = Authority()
    own = authority.issue(tmp_path / "mesh")
    flags = (*own.flags, "--secret", secret)
    with mesh(
        DEMO_MODEL,
        connector=connector,
        engine_flags=flags,
        proxy_flags=("--pd-min-prompt-tokens", "0", *flags),
        kvcache_flags=(*flags, "--connector", connector),
    ) as running:
        first = running.complete(PROMPT)
        assert f"kv={connector}" in first["headers"]["x-pdmesh-route"], first["headers"]
        assert running.decode[0].metric("pdmesh_transfer_bytes_total") > 0
        # The tier has come and taken them as well: over a certificate of its own.
        _until_stored(running)
        decode = running.decode[0].grpc
        assert describe(decode, member(own, secret)).startswith("decode")
        for stranger in (
            MeshSecret(secret),
            member(Authority().issue(tmp_path / "other"), secret),
            member(authority.issue(tmp_path / "late", expired=True), secret),
            member(authority.issue(tmp_path / "billing", "billing"), secret),
        ):
            with pytest.raises(grpc.RpcError):
                describe(decode, stranger)
        Authority().issue(tmp_path / "mesh")
        engine = running.start_engine(
            "decode", "--connector", connector, "--kv-load-failure-policy", "recompute", *flags
        )
        assert describe(engine.grpc, member(own, secret)).startswith("decode")
        running.announce()
        running.wait_healthy()
        running.decode[0].stop()
        again = running.complete(PROMPT)
        assert f"kv={connector}" in again["headers"]["x-pdmesh-route"], again["headers"]
        if connector == "grpc":
            _meet_a_new_tier(running, *flags)
        assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        running.decode.pop(0)
        running.wait_nothing_held()
