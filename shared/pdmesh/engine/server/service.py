"""An engine service as its life: secret, core and text side of the model, and the front when all are there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pdmesh.config import EngineConfig
from pdmesh.engine.core_client import CoreClient
from pdmesh.engine.kv_transfer_config import resolve_kv_transfer
from pdmesh.engine.server.identity import Role, identify
from pdmesh.lifecycle import Life
from pdmesh.models.source import resolve
from pdmesh.security import MeshSecret

if TYPE_CHECKING:
    from pdmesh.openai.text import TextModel


async def serve_engine(config: EngineConfig, life: Life, role: Role) -> None:
    """Run an engine, whose configuration has passed `check_engine`, until told to stop."""
    config = resolve_kv_transfer(config)
    secret = MeshSecret.load(config)
    source = await asyncio.to_thread(resolve, config.model)
    identity = identify(config, role, source.name)
    async with (
        _text_model(config.model) as loading_text,
        CoreClient(config, engine_id=identity.engine_id, epoch=identity.epoch, on_progress=life.progress) as core,
    ):
        text = await loading_text
        from pdmesh.engine.server.front import serve_front

        await serve_front(config, life, identity=identity, secret=secret, core=core, text=text)


@asynccontextmanager
async def _text_model(model: str) -> AsyncIterator["asyncio.Task[TextModel]"]:
    """Load the tokenizer, and import the front, beside the core; the task's result is the text model."""
    loading = asyncio.create_task(asyncio.to_thread(_load_text_side, model))
    try:
        yield loading
    finally:
        loading.cancel()
        # When the core failed first, that error is the one to tell.
        await asyncio.wait({loading})


def _load_text_side(model: str) -> "TextModel":
    # In one thread, one after the other: two that import the same modules at once see them half made.
    import pdmesh.engine.server.front  # noqa: F401
    from pdmesh.openai.text import load_text_model

    return load_text_model(model)
