"""Connector `mooncake`: pulls over Mooncake's Transfer Engine and TCP, between hosts and pods as well."""

from pdmesh.connector.native import NativeConnector
from pdmesh.connector.native_agent import Transport

PACKAGES = ("mooncake",)
"""Import names under which the engine is published."""


class MooncakeConnector(NativeConnector):
    """Both ends of Mooncake."""

    name = "mooncake"
    transport = Transport(
        name="mooncake",
        title="Mooncake",
        packages=PACKAGES,
        remedy="pip install 'pdmesh[mooncake]' and the system's libibverbs1",
        environment={
            "MC_LOG_LEVEL": "ERROR",
            # Each piece of memory would take a TCP connection of its own.
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",
            # Seconds that a handshake with a host that is gone may block a peer's thread.
            "MC_HANDSHAKE_CONNECT_TIMEOUT": "3",
        },
    )
