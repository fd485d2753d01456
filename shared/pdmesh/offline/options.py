"""From what `LLM(...)` and `pdmesh run-batch` are given to an EngineConfig: same names, without what only a service has."""

import difflib
import secrets
from typing import Any, Literal

from pydantic import ValidationError

from pdmesh.config import EngineConfig, HttpConfig, ServiceConfig
from pdmesh.config.vllm_flags import explain_foreign
from pdmesh.errors import ConfigError

# Of the settings that services have, those that also mean something without one.
_KEPT = {"log_level", "log_format", "max_logprobs", "reasoning_start_str", "reasoning_end_str"}
_FOR_PEERS = {
    "grpc_port",
    "port",
    "engine_id",
    "connector",
    "kv_peers",
    "kv_lease_duration_s",
    "kv_load_failure_policy",
    "kv_role",
    "kv_transfer_config",
    "connector_options",
    "kv_checksums",
    "kvcache",
    "kvcache_lookup_timeout_s",
    "kv_events_config",
    "stream_interval",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
}
SERVICE_ONLY = ((set(ServiceConfig.model_fields) | set(HttpConfig.model_fields)) - _KEPT) | _FOR_PEERS
"""Settings of services, for clients and peers that are not there offline."""
OPTIONS = tuple(name for name in EngineConfig.model_fields if name not in SERVICE_ONLY)
# Nobody else sends requests: what is given is worked through, however much it is.
NO_QUEUE_LIMIT = 1 << 31
LOG_LEVEL: Literal["warning"] = "warning"
"""A program's terminal is its own: unless told otherwise only what needs attention is said there."""
# The least alike two names may be for one to be a misspelling of the other.
_CUTOFF = 0.5


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """Build the configuration; None stands for the default. Raises ConfigError that names option, value and limit."""
    for name in options:
        if name not in OPTIONS:
            raise ConfigError(_unknown(name))
    given = {"log_level": LOG_LEVEL} | {name: value for name, value in options.items() if value is not None}
    try:
        return EngineConfig(
            **given,
            model=model,
            connector=[],
            max_num_queued_reqs=NO_QUEUE_LIMIT,
            # Nothing is shared with other processes, so no secret of this user's is read, or written, for it.
            secret=secrets.token_hex(16),
        )
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{name}: {message} (got {first['input']!r})" if name else message) from exc


def _unknown(name: str) -> str:
    if name in SERVICE_ONLY:
        return f"option {name} is for services; offline there is nothing that it could change"
    if foreign := explain_foreign([f"--{name}"], OPTIONS):
        return foreign
    near = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=_CUTOFF)
    hint = f"; the nearest is {near[0]}" if near else f"; known are {', '.join(OPTIONS)}"
    return f"unknown option {name}{hint}"
