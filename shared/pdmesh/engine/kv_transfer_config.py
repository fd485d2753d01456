"""What `--kv-transfer-config` says: vLLM's JSON for its KV transfers, turned into settings of ours before anything starts."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from pdmesh.config import EngineConfig, Settings
from pdmesh.engine.json_setting import parse_object
from pdmesh.errors import ConfigError

EngineConfigT = TypeVar("EngineConfigT", bound=EngineConfig)
SettingsT = TypeVar("SettingsT", bound=Settings)

SETTING = "kv-transfer-config"
MULTI = "MultiConnector"
EXTRA = "kv_connector_extra_config"
OPTIONS = "connector_options"
CONNECTORS = {
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "NixlPushConnector": "nixl",
    "MooncakeConnector": "mooncake",
}
"""vLLM's connectors that have a counterpart here."""
MODES = {"NixlPullConnector": "pull", "NixlPushConnector": "push"}
"""Those that also say how KV moves."""
_TIER = "KV that outlives a request is kept by the kvcache service: see kvcache"
SETTINGS = {
    "kv_role": "kv_role",
    "kv_load_failure_policy": "kv_load_failure_policy",
    "engine_id": "engine_id",
    "kv_lease_duration": "kv_lease_duration_s",
}
"""Keys, and the settings that they are here."""
FOREIGN_CONNECTORS = {
    "P2pNcclConnector": "give NixlConnector across hosts, or connector shm on one host",
    "SharedStorageConnector": _TIER,
    "ExampleConnector": _TIER,
    "MooncakeStoreConnector": _TIER,
    "OffloadingConnector": _TIER,
    "LMCacheConnectorV1": _TIER,
    "LMCacheMPConnector": _TIER,
}
"""vLLM's connectors that are not here, and what is there instead."""
_ONE_ADDRESS = "peers reach this engine at its host and grpc-port"
_NO_RANKS = "peers are named by each request, so engines have no ranks"
_NO_BIDIRECTIONAL = "it belongs to bidirectional_kv_xfer, which is not here"
WITHOUT_EFFECT = {
    "kv_ip": _ONE_ADDRESS,
    "kv_port": _ONE_ADDRESS,
    "kv_rank": _NO_RANKS,
    "kv_parallel_size": _NO_RANKS,
    "kv_buffer_size": "KV is read where it lies, without a buffer between; see kv-cache-memory-bytes",
    "num_workers": "of MooncakeConnector; here connector-options has mooncake.num_connections",
    "decoder_kv_blocks_ttl": _NO_BIDIRECTIONAL,
    "kv_recompute_threshold": _NO_BIDIRECTIONAL,
    "enforce_handshake_compat": "engines always compare what they are before KV moves",
    "push_registration_timeout": "a push that does not begin is a pull: nobody waits for it",
}
"""Keys that are taken for vLLM's sake and change nothing; each that is given is named in the log."""
REFUSED = {
    "kv_connector_module_path": "no connector is loaded from elsewhere",
    "enable_permute_local_kv": "engines exchange KV in one layout, which is not permuted",
    "bidirectional_kv_xfer": "decode's KV goes back to no prefill",
}
"""Keys whose use would change what is served, so that it must not be passed over; false and null ask for nothing."""


class ExtraConfig(Settings):
    """Keys of kv_connector_extra_config. None everywhere: not given."""

    connectors: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    kv_lease_duration: float | None = Field(default=None, gt=0, le=3600)
    backends: list[Literal["UCX"]] | None = Field(default=None, min_length=1, max_length=1)
    num_threads: int | None = None
    mooncake_protocol: Literal["tcp"] | None = None
    num_workers: int | None = None
    bidirectional_kv_xfer: bool | None = None
    decoder_kv_blocks_ttl: float | None = None
    kv_recompute_threshold: int | None = None
    push_registration_timeout: float | None = None
    enforce_handshake_compat: bool | None = None


class KVTransferConfig(Settings):
    """vLLM's keys. None everywhere: not given."""

    kv_connector: str | None = None
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    kv_load_failure_policy: Literal["fail", "recompute"] | None = None
    kv_buffer_device: Literal["cpu"] | None = None
    """Every backend there is computes on CPUs, so KV is nowhere else."""
    engine_id: str | None = Field(default=None, min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")
    kv_connector_extra_config: dict[str, Any] | None = None
    kv_ip: str | None = None
    kv_port: int | None = None
    kv_rank: int | None = None
    kv_parallel_size: int | None = None
    kv_buffer_size: float | None = None
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool | None = None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One setting of ours that the JSON decides."""

    setting: str
    value: Any
    key: str
    """Where in the JSON it is written."""

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.value)}"


def resolve_kv_transfer(config: EngineConfigT) -> EngineConfigT:
    """Return a configuration in which the JSON's keys have become settings; the same one where there is no JSON.

    Raises ConfigError that names key, value and range, or both places that say different things. What has been resolved
    may be resolved again.
    """
    wanted, _ = _read(config.kv_transfer_config)
    for each in wanted.values():
        own = getattr(config, each.setting)
        if each.setting != OPTIONS and each.setting in config.model_fields_set and own != each.value:
            raise ConfigError(
                f"{SETTING}: {each} contradicts {each.setting.replace('_', '-')} {_shown(own)}: give one of them, or the "
                "same to both"
            )
    if not wanted:
        return config
    values = {each.setting: each.value for each in wanted.values()}
    if OPTIONS in wanted:
        values[OPTIONS] = _merged(config.connector_options, wanted[OPTIONS])
    return type(config).model_validate(config.model_dump(exclude_unset=True) | values)


def _merged(own: str, wanted: "_Wanted") -> str:
    """Put what the JSON says of connectors' options beside what is configured of them."""
    options = parse_object("connector-options", own) if own.strip() else {}
    for name, values in wanted.value.items():
        known = options.setdefault(name, {})
        for key, value in values.items():
            # What is no object, or no number, is refused where options are read.
            if isinstance(known, dict) and known.setdefault(key, value) != value:
                raise ConfigError(
                    f"{SETTING}: {wanted} contradicts connector-options {name}.{key} {known[key]}: give one of them, or the "
                    "same to both"
                )
    return json.dumps(options)


def kv_transfer_lines(config: EngineConfig) -> list[str]:
    """Say what the JSON became, for the log: a line for its settings, and one for each key that changes nothing."""
    wanted, without_effect = _read(config.kv_transfer_config)
    became = ", ".join(f"{each.setting.replace('_', '-')} {_shown(each.value)}" for each in wanted.values())
    lines = [f"{SETTING}: {became}"] if became else []
    return lines + [f"{SETTING}: {path}{key} has no effect: {WITHOUT_EFFECT[key]}" for path, key in without_effect]


# A start asks for it when it checks, when it logs and when it serves.
@functools.lru_cache(maxsize=8)
def _read(text: str) -> tuple[dict[str, _Wanted], list[tuple[str, str]]]:
    """The settings that the JSON decides, by name, and the keys without effect with where they are."""
    wanted: dict[str, _Wanted] = {}
    without_effect: list[tuple[str, str]] = []
    connectors: dict[str, str] = {}
    for path, values in _sections(text):
        for each in _wanted(values, path):
            before = wanted.setdefault(each.setting, each)
            if before.value != each.value:
                raise ConfigError(f"{SETTING}: {each} contradicts {before}: an engine has one for all its connectors")
        without_effect += [(path, key) for key in _given(values) if key in WITHOUT_EFFECT]
        if isinstance(values, KVTransferConfig) and values.kv_connector in CONNECTORS:
            # Two of vLLM's names may mean one of ours, which is tried once.
            connectors.setdefault(CONNECTORS[values.kv_connector], f"{path}kv_connector")
    if connectors:
        first_key = next(iter(connectors.values()))
        wanted["connector"] = _Wanted("connector", list(connectors), first_key)
    return wanted, without_effect


def _sections(text: str) -> Iterator[tuple[str, Settings]]:
    """Every object of the JSON that has keys of its own, checked, with its path: the outermost first."""
    if not text.strip():
        return
    values = parse_object(SETTING, text)
    outer = _checked(KVTransferConfig, values, "")
    extra = _checked(ExtraConfig, outer.kv_connector_extra_config or {}, f"{EXTRA}.")
    yield "", outer
    yield f"{EXTRA}.", extra
    if extra.connectors is None:
        if outer.kv_connector == MULTI:
            raise ConfigError(f"{SETTING}: {EXTRA}.connectors is missing: {MULTI} needs a list of connectors there")
        return
    if outer.kv_connector != MULTI:
        raise ConfigError(f"{SETTING}: {EXTRA}.connectors is for kv_connector {MULTI}; it is {outer.kv_connector}")
    for place, inner in enumerate(extra.connectors):
        yield from _connector_sections(inner, f"{EXTRA}.connectors[{place}].")


def _connector_sections(values: dict[str, Any], path: str) -> Iterator[tuple[str, Settings]]:
    """One connector of a MultiConnector."""
    inner = _checked(KVTransferConfig, values, path)
    if inner.kv_connector in (None, MULTI):
        raise ConfigError(f"{SETTING}: {path}kv_connector {inner.kv_connector} must be one of {', '.join(CONNECTORS)}")
    extra = _checked(ExtraConfig, inner.kv_connector_extra_config or {}, f"{path}{EXTRA}.")
    if extra.connectors is not None:
        raise ConfigError(
            f"{SETTING}: {path}{EXTRA}.connectors is for kv_connector {MULTI}; it is {inner.kv_connector}"
        )
    yield path, inner
    yield f"{path}{EXTRA}.", extra


def _checked(cls: type[SettingsT], values: dict[str, Any], path: str) -> SettingsT:
    if unknown := sorted(set(values) - set(cls.model_fields)):
        known = ", ".join(cls.model_fields)
        raise ConfigError(f"{SETTING}: unknown key {path}{unknown[0]}; the keys there are {known}")
    try:
        # Strict: JSON has numbers and booleans, so "yes" is neither.
        checked = cls.model_validate(values, strict=True)
    except ValidationError as exc:
        first = exc.errors()[0]
        key = path + ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{SETTING}: {key}: {first['msg']} (got {first['input']!r})") from None
    for key in _given(checked):
        value = getattr(checked, key)
        if key in REFUSED and value:
            raise ConfigError(f"{SETTING}: {path}{key} {_shown(value)} is not supported: {REFUSED[key]}")
    if isinstance(checked, KVTransferConfig):
        _check_connector(checked.kv_connector, path)
    return checked


def _check_connector(name: str | None, path: str) -> None:
    if name in FOREIGN_CONNECTORS:
        raise ConfigError(
            f"{SETTING}: {path}kv_connector {name} is a connector of vLLM's that is not here: {FOREIGN_CONNECTORS[name]}"
        )
    if name not in (None, MULTI, *CONNECTORS):
        raise ConfigError(
            f"{SETTING}: {path}kv_connector {name} is not here; those of vLLM's that are: {', '.join((*CONNECTORS, MULTI))}"
        )


def _wanted(values: Settings, path: str) -> Iterator[_Wanted]:
    """What one object of the JSON decides, but for its connector."""
    if isinstance(values, KVTransferConfig) and values.kv_connector in MODES:
        yield _Wanted("kv_transfer_mode", MODES[values.kv_connector], f"{path}kv_connector")
    for key, setting in SETTINGS.items():
        if (value := getattr(values, key, None)) is not None:
            yield _Wanted(setting, value, f"{path}{key}")
    if isinstance(values, ExtraConfig) and values.num_threads is not None:
        yield _Wanted(OPTIONS, {"nixl": {"num_threads": values.num_threads}}, f"{path}num_threads")


def _given(values: Settings) -> list[str]:
    return [key for key in type(values).model_fields if getattr(values, key) is not None]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
