"""The `pdmesh` command."""

from pdmesh.cli.main import main

__all__ = ["main"]
