"""One engine core and the text side of its model, open together, for offline use."""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdmesh.config import EngineConfig
from pdmesh.engine.core_client import CoreClient
from pdmesh.models.source import resolve
from pdmesh.offline.generator import CoreGenerator
from pdmesh.openai.generator import ModelCard
from pdmesh.openai.text import TextModel, load_text_model


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineEngine:
    """What is needed to go from text to text."""

    config: EngineConfig
    generator: CoreGenerator
    text: TextModel
    card: ModelCard


@asynccontextmanager
async def offline_engine(
    config: EngineConfig, on_progress: Callable[[str, float], None] | None = None
) -> AsyncIterator[OfflineEngine]:
    """Start a core, in a process that ends with the block or with this thread. Raises ConfigError, InternalError."""
    source = await asyncio.to_thread(resolve, config.model)
    loading = asyncio.create_task(asyncio.to_thread(load_text_model, config.model))
    core_client = CoreClient(
        config,
        engine_id=f"offline-{os.getpid()}-{secrets.token_hex(3)}",
        epoch=int(time.time()),
        on_progress=on_progress or (lambda stage, fraction: None),
        offline=True,
    )
    try:
        async with core_client as core:
            text = await loading
            name = config.served_model_name or source.name
            generator = CoreGenerator(core, name=name, root=config.model)
            running = asyncio.create_task(generator.run())
            try:
                yield OfflineEngine(config=config, generator=generator, text=text, card=await generator.card())
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
    finally:
        loading.cancel()
        # When the core failed first, that error is the one to tell.
        await asyncio.wait({loading})
