"""Settings of `pdmesh run-batch`: its own, and those of an engine that mean something without a service."""

from typing import Any, Literal

from pydantic import Field, create_model

from pdmesh.config import EngineConfig, Settings
from pdmesh.offline.options import LOG_LEVEL, OPTIONS


class BatchSettings(Settings):
    """Answer every line of an OpenAI batch file with one engine, without a server."""

    input_file: str = ""
    """-i FILE: one JSON object per line, {"custom_id", "method", "url", "body"}; - is standard input."""
    output_file: str = ""
    """-o FILE: where the answers go, in the input's order, when all are there; until then they are in FILE.partial."""
    max_concurrency: int = Field(default=0, ge=0, le=1 << 20)
    """Most lines under way at a time; 0: enough for full batches (512, or twice max-num-seqs)."""
    log_level: Literal["debug", "info", "warning", "error"] = LOG_LEVEL
    """Least severe level that is logged; info has a line for each request."""
    resume: bool = False
    """Go on from FILE.partial: lines that were answered are not run again, those that failed are."""


_ENGINE_FIELDS: dict[str, Any] = {
    name: (EngineConfig.model_fields[name].annotation, EngineConfig.model_fields[name])
    for name in OPTIONS
    if name not in BatchSettings.model_fields
}
BatchConfig: type[BatchSettings] = create_model(
    "BatchConfig", __base__=BatchSettings, __doc__=BatchSettings.__doc__, **_ENGINE_FIELDS
)
"""BatchSettings with an engine's options beside them."""


def engine_options(config: BatchSettings) -> dict[str, Any]:
    """Return what was set of an engine's options, model apart."""
    return {name: getattr(config, name) for name in OPTIONS if name in config.model_fields_set and name != "model"}
