"""Configuration of the decode service: an engine's, and what it is to proxies."""

from typing import Literal

from pydantic import Field

from pdmesh.config import EngineConfig


class DecodeConfig(EngineConfig):
    """Decode: fetches the KV that a prefill offers and generates; computes prompts itself when that is cheaper."""

    port: int = Field(default=8200, ge=0, le=65535)
    """HTTP port; 0: any free one."""
    grpc_port: int = Field(default=8201, ge=0, le=65535)
    """gRPC port for the proxy and for peers; 0: any free one."""
    role: Literal["decode", "both"] = "decode"
    """both: proxies may send it whole requests and prompts alike (`pdmesh serve`)."""
