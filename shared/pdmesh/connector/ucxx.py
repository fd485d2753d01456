"""Connector `ucxx`: pulls over UCXX, RAPIDS' bindings of UCX (shared memory, TCP, RDMA), where those are installed."""

from pdmesh.connector.native import NativeConnector
from pdmesh.connector.native_agent import Transport
from pdmesh.connector.nixl import UCX_ENVIRONMENT, UCX_LOOPBACK_ENVIRONMENT


class UcxxConnector(NativeConnector):
    """Both ends of UCXX."""

    name = "ucxx"
    transport = Transport(
        name="ucxx",
        title="UCXX",
        packages=("ucxx",),
        remedy="pip install 'pdmesh[ucxx]'",
        environment=UCX_ENVIRONMENT,
        loopback_environment=UCX_LOOPBACK_ENVIRONMENT,
    )
