"""The `pdmesh` command."""

from pdmesh.cli.app import main

__all__ = ["main"]
