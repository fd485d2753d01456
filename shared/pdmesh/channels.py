"""How services reach each other over gRPC: the one place that makes channels and ports, plain or with mutual TLS.

With certificates both ends show one: a server takes no client without, a client no server without the mesh's name. Each new
channel and each new connection at a port reads the files as they are then, so that a renewed certificate needs no restart.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from pdmesh.certificates import CertificateFiles
from pdmesh.grpc_options import GRPC_OPTIONS
from pdmesh.security import MeshSecret

OWN_CONNECTION: tuple[str, Any] = ("grpc.use_local_subchannel_pool", 1)
"""Option of a channel that shares its connection with no other: no broken one, no back-off, no certificate of before."""


def open_channel(address: str, secret: MeshSecret, *options: tuple[str, Any]) -> grpc.aio.Channel:
    """Make a channel to a service of the mesh at `host:port`; nothing connects yet. `options` go beside the mesh's own."""
    every = [*GRPC_OPTIONS, *options]
    files = secret.certificates
    if files is None:
        return grpc.aio.insecure_channel(address, options=every)
    return grpc.aio.secure_channel(address, _client_credentials(files), options=[*every, *_tls_options(files)])


def open_blocking_channel(address: str, secret: MeshSecret, *options: tuple[str, Any]) -> grpc.Channel:
    """As `open_channel`, for threads without an event loop."""
    every = [*GRPC_OPTIONS, *options]
    files = secret.certificates
    if files is None:
        return grpc.insecure_channel(address, options=every)
    return grpc.secure_channel(address, _client_credentials(files), options=[*every, *_tls_options(files)])


async def disconnected(channel: grpc.aio.Channel) -> None:
    """Return when a channel that has connected has no connection any more, or is closed here."""
    try:
        while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
    except grpc.aio.UsageError:
        # Closed meanwhile.
        return


def add_port(server: grpc.aio.Server, address: str, secret: MeshSecret) -> int:
    """Bind `host:port`; returns the port. Raises RuntimeError when it is taken."""
    files = secret.certificates
    if files is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _server_credentials(files))


def _client_credentials(files: CertificateFiles) -> grpc.ChannelCredentials:
    now = files.current()
    return grpc.ssl_channel_credentials(root_certificates=now.ca, private_key=now.key, certificate_chain=now.cert)


def _tls_options(files: CertificateFiles) -> list[tuple[str, Any]]:
    # Pods have an address for each life; what every one of them has is the mesh's name.
    named: list[tuple[str, Any]] = [("grpc.ssl_target_name_override", files.server_name)] if files.server_name else []
    return [*named, OWN_CONNECTION]


def _server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    def configuration() -> grpc.ServerCertificateConfiguration:
        now = files.current()
        return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], root_certificates=now.ca)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=True)
