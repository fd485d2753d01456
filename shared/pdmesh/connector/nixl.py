"""Connector `nixl`: pulls and pushes over NIXL and UCX (shared memory, TCP, RDMA), between hosts and pods as well."""

from pdmesh.connector.native_agent import Transport
from pdmesh.connector.native_push import NativePushConnector
from pdmesh.connector.nixl_agent import PACKAGES

UCX_ENVIRONMENT = {
    # KV is host memory here; opening GPU and System V transports would only cost start-up and leave segments.
    "UCX_TLS": "^cuda,rocm,sysv",
    # A crash must end the process at once, not print and wait.
    "UCX_HANDLE_ERRORS": "none",
    "UCX_LOG_LEVEL": "error",
}
UCX_LOOPBACK_ENVIRONMENT = {"UCX_NET_DEVICES": "lo"}


class NixlConnector(NativePushConnector):
    """Both ends of NIXL."""

    name = "nixl"
    transport = Transport(
        name="nixl",
        title="NIXL",
        packages=PACKAGES,
        remedy="pip install 'pdmesh[nixl]'",
        environment=UCX_ENVIRONMENT | {"NIXL_LOG_LEVEL": "ERROR"},
        loopback_environment=UCX_LOOPBACK_ENVIRONMENT,
    )
