"""Reads a streamed answer as it was sent."""

import json
from typing import Any

from support.api_server import ApiServer


def stream_frames(server: ApiServer, path: str, body: dict[str, Any]) -> list[str]:
    """All server-sent events of an answer, comments included."""
    with server.http() as client, client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [frame for frame in answer.read().decode().split("\n\n") if frame]


def chunks_of(frames: list[str]) -> list[dict[str, Any]]:
    """The JSON of all but the terminator and comments."""
    return [json.loads(frame[6:]) for frame in frames if frame.startswith("data: {")]
