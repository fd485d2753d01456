"""`pdmesh run-batch`: OpenAI batch files, answered by one engine without a server."""

from pdmesh.offline.batch.command import main

__all__ = ["main"]
