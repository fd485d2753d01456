"""What `--kv-events-config` says: vLLM's JSON for its KV events, checked before anything starts."""

import errno
import os
import re
import socket as sockets
import stat
from collections.abc import Sequence
from typing import Literal

import zmq
from pydantic import Field, ValidationError

from pdmesh.config import EngineConfig, Settings
from pdmesh.engine.json_setting import parse_object
from pdmesh.engine.kv_events import KVEventLog
from pdmesh.engine.kv_groups import KVGroup
from pdmesh.errors import ConfigError

SETTING = "kv-events-config"
TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]*]+):(?P<port>[0-9]{1,5})")
IPC = re.compile(r"ipc://\S+")
FORMS = "tcp://*:PORT, tcp://HOST:PORT or ipc://PATH"
ALL_INTERFACES = ("*", "0.0.0.0", "[::]")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class KVEventsConfig(Settings):
    """vLLM's keys and defaults, and two of ours at the end."""

    enable_kv_cache_events: bool = False
    """Collect events of the prefix cache."""
    publisher: Literal["zmq", "null"] | None = None
    """null collects nothing; left out: zmq where events are enabled."""
    endpoint: str = "tcp://*:5557"
    """Where to publish. With `*`, with `::` and for ipc the engine binds; to anything else it connects, as vLLM does."""
    replay_endpoint: str | None = None
    """Where to bind for consumers that ask for batches they have missed; left out: nowhere."""
    buffer_steps: int = Field(default=10_000, ge=0, le=1_000_000)
    """Batches kept for them."""
    hwm: int = Field(default=100_000, ge=1, le=10_000_000)
    """Batches that may wait for one slow consumer; more are dropped for it, which it sees as a gap."""
    max_queue_size: int = Field(default=100_000, ge=1)
    """Taken for vLLM's sake: no batch waits before it is at the socket, where `hwm` is the bound."""
    topic: str = Field(default="", max_length=256)
    """First frame of each message."""
    use_int_block_hashes: bool = True
    """Tell a name's last 64 bits instead of all its bytes; in vLLM the variable VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES."""

    event_encoding: Literal["map", "array"] = "map"
    """How an event is encoded: as by vLLM 0.32, or as an array, as by those before it and as llm-d's indexers read it."""

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def kv_events_config(config: EngineConfig) -> KVEventsConfig | None:
    """Return what is configured, None when events are off. Raises ConfigError that names key, value and range."""
    text = config.kv_events_config
    if not text.strip():
        return None
    values = parse_object(SETTING, text)
    if unknown := sorted(set(values) - set(KVEventsConfig.model_fields)):
        known = ", ".join(KVEventsConfig.model_fields)
        raise ConfigError(f"{SETTING}: unknown key {unknown[0]!r}; the keys are {known}")
    try:
        # Strict: JSON has numbers and booleans, so "yes" is neither.
        settings = KVEventsConfig.model_validate(values, strict=True)
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ConfigError(f"{SETTING}: {first['loc'][0]}: {first['msg']} (got {first['input']!r})") from None
    _check_together(config, settings)
    return settings if settings.is_on else None


def make_event_log(config: EngineConfig, groups: Sequence[KVGroup]) -> KVEventLog | None:
    """Return the core's log for its KV groups; None when events are off."""
    settings = kv_events_config(config)
    if settings is None:
        return None
    return KVEventLog(
        groups,
        use_int_block_hashes=settings.use_int_block_hashes,
        as_arrays=settings.event_encoding == "array",
    )


def binds(endpoint: str) -> bool:
    """Whether a publisher waits for consumers at this endpoint, instead of dialling one."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc:")


def bound_address(endpoint: str, host: str) -> str:
    """Return what to bind: `*` is wherever the engine itself listens, so events go no farther than its other ports."""
    match = TCP.fullmatch(endpoint)
    if match is None or match["host"] != "*" or host == "0.0.0.0":
        return endpoint.replace("//localhost:", "//127.0.0.1:")
    interface = "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host
    return f"tcp://{interface}:{match['port']}"


def check_addresses(settings: KVEventsConfig, host: str) -> None:
    """Raise ConfigError when an address cannot be bound, before minutes go into loading a model."""
    with zmq.Context() as context:
        for key in ("endpoint", "replay_endpoint"):
            value: str | None = getattr(settings, key)
            if value is None or not (key == "replay_endpoint" or binds(value)):
                continue
            if value.startswith("ipc:"):
                _check_path(key, value)
                continue
            with context.socket(zmq.ROUTER) as probe:
                bind(probe, key, value, host)


def bind(socket: "zmq.Socket[bytes]", key: str, endpoint: str, host: str) -> str:
    """Bind a socket and return the endpoint it has. Raises ConfigError that names key and address."""
    if endpoint.startswith("ipc:"):
        _check_path(key, endpoint)
    address = bound_address(endpoint, host)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    try:
        socket.bind(address)
    except zmq.ZMQError as exc:
        raise ConfigError(f"{SETTING}: {key} {endpoint} cannot be bound ({address}): {exc.strerror}") from None
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    # Consumers elsewhere must put this host's name there themselves.
    return bound.replace("//0.0.0.0:", "//*:")


def _check_path(key: str, endpoint: str) -> None:
    """Raise ConfigError for a path that cannot be bound, and for one that is somebody's: ZMQ would delete what is there."""
    path = endpoint.removeprefix("ipc://")
    if path == "*":
        return
    is_abstract = path.startswith("@")
    problem = "" if is_abstract else _problem_of_file(path)
    if not problem:
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
            try:
                code = probe.connect_ex(f"\0{path[1:]}" if is_abstract else path)
            except OSError as exc:  # a path too long for the kernel
                problem = str(exc)
            else:
                # A socket that nobody listens at was left behind by someone who has gone.
                in_use = code not in (errno.ENOENT, errno.ECONNREFUSED)
                problem = "another process listens there" if code == 0 else os.strerror(code) if in_use else ""
    if problem:
        raise ConfigError(f"{SETTING}: {key} {endpoint} cannot be bound: {problem}")


def _problem_of_file(path: str) -> str:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f"there is no folder {folder}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} cannot be written to"
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        return "there is something else than a socket"
    return ""


def _check_together(config: EngineConfig, settings: KVEventsConfig) -> None:
    for key in ("endpoint", "replay_endpoint"):
        value: str | None = getattr(settings, key)
        if value is None:
            continue
        match = TCP.fullmatch(value)
        if not (match or IPC.fullmatch(value)):
            raise ConfigError(f"{SETTING}: {key} {value!r} has none of the forms {FORMS}")
        if match is None:
            continue
        if int(match["port"]) > 65535:
            raise ConfigError(f"{SETTING}: {key} {value!r} has a port outside 0…65535")
        is_bound = key == "replay_endpoint" or binds(value)
        if config.on_loopback and is_bound and match["host"] in ALL_INTERFACES[1:]:
            raise ConfigError(
                f"{SETTING}: {key} {value!r} is open to other machines while host {config.host} is not: write "
                f"tcp://*:{match['port']}, which binds where the engine listens, or change host"
            )
        if not is_bound and match["port"] == "0":
            raise ConfigError(f"{SETTING}: {key} {value!r} is connected to, so its port must be in 1…65535")
    if settings.endpoint == settings.replay_endpoint and not settings.endpoint.endswith(":0"):
        raise ConfigError(f"{SETTING}: endpoint and replay_endpoint are both {settings.endpoint!r}; each needs its own")
    given = sorted(settings.model_fields_set - {"publisher"})
    if given and "enable_kv_cache_events" not in given:
        raise ConfigError(
            f"{SETTING}: {given[0]} has no use without enable_kv_cache_events, which is false unless given"
        )
    if settings.publisher == "zmq" and not settings.enable_kv_cache_events:
        raise ConfigError(f"{SETTING}: publisher 'zmq' has nothing to publish while enable_kv_cache_events is false")
    if settings.is_on and not config.enable_prefix_caching:
        raise ConfigError(
            f"{SETTING}: enable_kv_cache_events has no use with no-enable-prefix-caching: no block has a name"
        )
