"""`pdmesh run-batch`: OpenAI batch files, answered by one engine without a server."""

from pdmesh.offline.batch.main import main

__all__ = ["main"]
