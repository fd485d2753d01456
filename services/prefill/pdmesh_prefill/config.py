"""Configuration of the prefill service: an engine's, on ports of its own."""

from pydantic import Field

from pdmesh.config import EngineConfig


class PrefillConfig(EngineConfig):
    """Prefill: ends a request after its first token and offers its KV to decode services."""

    port: int = Field(default=8100, ge=0, le=65535)
    """HTTP port; 0: any free one."""
    grpc_port: int = Field(default=8101, ge=0, le=65535)
    """gRPC port for the proxy and for peers; 0: any free one."""
