"""Mutual TLS between services: who is let in, who is not, and certificates that change under a running server."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pdmesh.certificates import CertificateFiles
from pdmesh.channels import open_blocking_channel, open_channel
from pdmesh.config import ServiceConfig
from pdmesh.errors import ConfigError
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from pdmesh.supervisor.config import UpConfig
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.server import check
from support.authority import Authority, Files

pytestmark = pytest.mark.anyio

SECRET = "a-secret-for-the-tests"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def member(files: Files, secret: str = SECRET, **settings: str) -> MeshSecret:
    """What a service has that is configured so."""
    return MeshSecret.load(ServiceConfig(host="0.0.0.0", secret=secret, **files.settings, **settings))


class Describer(mesh_pb2_grpc.EngineServicer):
    """Stands for a service: answers one unary call and one stream."""

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.EngineInfo:
        return pb.EngineInfo(engine_id="prefill-1")

    async def Control(self, messages: AsyncIterator[pb.ControlUp], context: object) -> AsyncIterator[pb.ControlDown]:
        async for _ in messages:
            yield pb.ControlDown()


@asynccontextmanager
async def serving(secret: MeshSecret, host: str = "127.0.0.1") -> AsyncIterator[str]:
    def register(server: grpc.aio.Server) -> list[str]:
        mesh_pb2_grpc.add_EngineServicer_to_server(Describer(), server)
        return [pb.DESCRIPTOR.services_by_name["Engine"].full_name]

    async with grpc_server(host, 0, secret, register) as port:
        yield f"127.0.0.1:{port}"


async def ask(address: str, secret: MeshSecret) -> str:
    """Describe over a channel of its own; returns the engine's id."""
    async with open_channel(address, secret) as channel:
        stub = mesh_pb2_grpc.EngineStub(channel)
        info = await stub.Describe(pb.DescribeRequest(), metadata=secret.call_metadata(), timeout=10)
        call = stub.Control(metadata=secret.call_metadata(), timeout=10)
        await call.write(pb.ControlUp())
        assert await call.read() is not grpc.aio.EOF
        call.cancel()
        return str(info.engine_id)


async def refused(address: str, secret: MeshSecret) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(address, secret)
    return caught.value.code()


@pytest.mark.parametrize("secret", [SECRET, ""], ids=["with secret", "alone"])
async def test_members_reach_each_other(authority: Authority, tmp_path: Path, secret: str) -> None:
    one, other = (member(authority.issue(tmp_path / name), secret) for name in ("one", "other"))
    async with serving(one) as address:
        assert await ask(address, other) == "prefill-1"


@pytest.mark.parametrize(
    ("host", "with_tls", "num_warnings"), [("0.0.0.0", False, 1), ("0.0.0.0", True, 0), ("127.0.0.1", False, 0)]
)
async def test_a_port_that_can_be_listened_in_to_is_logged_once(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, with_tls: bool, num_warnings: int
) -> None:
    secret = member(authority.issue(tmp_path / "one")) if with_tls else MeshSecret(SECRET)
    with caplog.at_level(logging.WARNING):
        async with serving(secret, host) as address:
            assert await ask(address, secret) == "prefill-1"
            assert await ask(address, secret) == "prefill-1"
    warned = [record for record in caplog.records if f"gRPC on {host} is not encrypted" in record.message]
    assert len(warned) == num_warnings


async def test_the_blocking_channel_speaks_tls_too(authority: Authority, tmp_path: Path) -> None:
    one, other = (member(authority.issue(tmp_path / name)) for name in ("one", "other"))
    async with serving(one) as address:
        with open_blocking_channel(address, other) as channel:
            call = mesh_pb2_grpc.EngineStub(channel).Describe.future(
                pb.DescribeRequest(), metadata=other.call_metadata(), timeout=10
            )
            assert (await asyncio.to_thread(call.result)).engine_id == "prefill-1"


@pytest.mark.parametrize("who", ["plain", "another authority's", "expired", "another name", "another secret"])
async def test_strangers_are_refused(authority: Authority, tmp_path: Path, who: str) -> None:
    server = member(authority.issue(tmp_path / "server"))
    own = tmp_path / "client"
    client = {
        "plain": lambda: MeshSecret(SECRET),
        # It would trust the server: what refuses is the server.
        "another authority's": lambda: member(_with_ca(Authority().issue(own), tmp_path / "server" / "ca.crt")),
        "expired": lambda: member(authority.issue(own, expired=True)),
        "another name": lambda: member(authority.issue(own, "billing")),
        "another secret": lambda: member(authority.issue(own), "another-secret-for-tests"),
    }[who]()
    by_tls = who in ("plain", "another authority's", "expired")
    async with serving(server) as address:
        assert await refused(address, client) is (
            grpc.StatusCode.UNAVAILABLE if by_tls else grpc.StatusCode.UNAUTHENTICATED
        )
        # It goes on serving those that belong here.
        assert await ask(address, server) == "prefill-1"


def _with_ca(files: Files, ca: Path) -> Files:
    return Files(files.cert, files.key, ca)


@pytest.mark.parametrize("who", ["another authority's", "expired", "another name", "plain"])
async def test_a_client_takes_no_stranger_for_a_server(authority: Authority, tmp_path: Path, who: str) -> None:
    client = member(authority.issue(tmp_path / "client"))
    own = tmp_path / "server"
    server = {
        "plain": lambda: MeshSecret(SECRET),
        "another authority's": lambda: member(_with_ca(Authority().issue(own), tmp_path / "client" / "ca.crt")),
        "expired": lambda: member(authority.issue(own, expired=True)),
        "another name": lambda: member(authority.issue(own, "billing")),
    }[who]()
    async with serving(server) as address:
        assert await refused(address, client) is grpc.StatusCode.UNAVAILABLE


async def test_without_a_mesh_name_a_certificate_names_the_address(authority: Authority, tmp_path: Path) -> None:
    server = member(authority.issue(tmp_path / "server", "127.0.0.1"), tls_server_name="")
    client = member(authority.issue(tmp_path / "client", "decode-1.mesh"), tls_server_name="")
    async with serving(server) as address:
        assert await ask(address, client) == "prefill-1"
    async with serving(client) as address:
        assert await refused(address, server) is grpc.StatusCode.UNAVAILABLE


async def test_a_port_asks_for_a_certificate(authority: Authority, tmp_path: Path) -> None:
    """Seen from outside, with OpenSSL: who shows no certificate is hung up on."""
    files = authority.issue(tmp_path / "server")
    async with serving(member(files)) as address:
        host, port = address.split(":")
        context = ssl.create_default_context(cafile=str(files.ca))
        context.set_alpn_protocols(["h2"])

        def speak() -> bytes:
            with (
                socket.create_connection((host, int(port)), timeout=10) as bare,
                context.wrap_socket(bare, server_hostname="pdmesh") as wrapped,
            ):
                try:
                    wrapped.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
                    return wrapped.recv(1)
                except (ssl.SSLError, ConnectionError):
                    return b""

        assert await asyncio.to_thread(speak) == b""
        # With one the same words have an answer.
        context.load_cert_chain(files.cert, files.key)
        assert await asyncio.to_thread(speak) != b""


async def test_renewed_certificates_are_used_without_a_restart(tmp_path: Path) -> None:
    """Once an authority of its own signs a new set for both sides, new connections use it, and only it."""
    former, new = Authority(), Authority()
    files = {name: former.issue(tmp_path / name) for name in ("server", "client", "former")}
    server, client, of_before = (member(files[name]) for name in ("server", "client", "former"))
    async with serving(server) as address:
        assert await ask(address, client) == "prefill-1"
        new.issue(tmp_path / "server")
        assert await refused(address, of_before) is grpc.StatusCode.UNAVAILABLE
        new.issue(tmp_path / "client")
        assert await ask(address, client) == "prefill-1"


def test_half_a_renewal_changes_nothing(authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The key of the next certificate is there, the certificate not yet."""
    files = authority.issue(tmp_path / "one")
    read = CertificateFiles(cert=str(files.cert), key=str(files.key), ca=str(files.ca), server_name="pdmesh")
    before = read.current()
    next_ = authority.issue(tmp_path / "next")
    next_.key.replace(files.key)
    assert read.current() is before
    assert read.current() is before
    assert caplog.text.count("is not the key of tls-cert") == 1
    next_.cert.replace(files.cert)
    assert read.current().cert == files.cert.read_bytes() != before.cert


def _broken(files: Files, which: str) -> Files:
    """Break the files in the named way."""
    if which == "missing":
        files.key.unlink()
    elif which == "no PEM":
        files.cert.write_text("not a certificate")
    elif which == "no CA":
        files.ca.write_text("")
    elif which == "another's key":
        files.key.write_bytes(Authority().issue(files.key.parent / "other").key.read_bytes())
    return files


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("missing", "tls-key {key} cannot be read: No such file or directory"),
        ("no PEM", "tls-cert {cert} and tls-key {key} are not a certificate and its key"),
        ("no CA", "tls-ca {ca} holds no certificate in PEM form"),
        ("another's key", "tls-key {key} is not the key of tls-cert {cert}"),
    ],
)
def test_bad_files_are_named(authority: Authority, tmp_path: Path, which: str, words: str) -> None:
    files = _broken(authority.issue(tmp_path / "one"), which)
    with pytest.raises(ConfigError) as caught:
        member(files)
    assert words.format(cert=files.cert, key=files.key, ca=files.ca) in caught.value.message


def test_a_partial_set_is_refused() -> None:
    with pytest.raises(ValueError, match="tls-cert needs tls-key and tls-ca too"):
        ServiceConfig(tls_cert="/x/tls.crt")
    with pytest.raises(ValueError, match="tls-ca needs tls-cert and tls-key too"):
        ServiceConfig(tls_ca="/x/ca.crt")


def test_up_refuses_a_partial_set_and_takes_a_whole_one_for_a_secret() -> None:
    with pytest.raises(ValueError, match="tls-key needs tls-cert and tls-ca too"):
        UpConfig(tls_key="/x/tls.key")
    with pytest.raises(ValueError, match=r"secret is required: .*--tls-cert"):
        UpConfig(host="0.0.0.0")
    assert UpConfig(host="0.0.0.0", tls_cert="/x/tls.crt", tls_key="/x/tls.key", tls_ca="/x/ca.crt").tls_server_name


async def test_what_lies_in_valkey_needs_the_secret_beside_certificates(authority: Authority, tmp_path: Path) -> None:
    """A certificate says who connects, not who wrote a value."""
    files = authority.issue(tmp_path / "one")
    config = KVCacheConfig(
        host="127.0.0.1", port=0, grpc_port=0, valkey="redis://127.0.0.1:1", valkey_required=False, **files.settings
    )
    with pytest.raises(ConfigError, match="valkey needs the mesh secret beside tls-cert"):
        await check(config)
    await check(config.model_copy(update={"secret": SECRET}))


def test_off_loopback_there_is_a_secret_or_mutual_tls(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"secret is required: .*--tls-cert"):
        MeshSecret.load(ServiceConfig(host="0.0.0.0"))
    files = authority.issue(tmp_path / "one")
    assert not member(files, "").is_secret
    assert member(files).is_secret
    assert MeshSecret.load(ServiceConfig(host="0.0.0.0", secret=SECRET)).certificates is None
