"""`python -m pdmesh_decode.serve MODEL`, which is `pdmesh serve`: one engine alone behind the OpenAI API, on vLLM's port."""

import sys
from typing import Literal

from pydantic import Field

from pdmesh.lifecycle import run_service
from pdmesh_decode.config import DecodeConfig
from pdmesh_decode.main import check, serve


class ServeConfig(DecodeConfig):
    """One engine that does prefill and decode, behind the OpenAI API, without a mesh."""

    port: int = Field(default=8000, ge=0, le=65535)
    """HTTP port; 0: any free one."""
    role: Literal["decode", "both"] = "both"
    """What it is to proxies that find it."""


def main(argv: list[str] | None = None) -> int:
    """Load configuration, serve until told to stop, return the exit code."""
    return run_service("serve", ServeConfig, serve, argv, positional="model", check=check)


if __name__ == "__main__":
    sys.exit(main())
