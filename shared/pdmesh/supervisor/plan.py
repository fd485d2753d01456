"""What to run: from the configuration of `pdmesh up` to the command line of each child, without starting anything."""

import argparse
import contextlib
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pdmesh.config import ALIASES, EngineConfig, TlsConfig, read_toml, variable
from pdmesh.embedded_valkey import ValkeyCommand, prepare
from pdmesh.engine.host_memory import usable_cores
from pdmesh.errors import ConfigError
from pdmesh.supervisor.config import UpConfig
from pdmesh.supervisor.ports import Ports
from pdmesh.supervisor.roles import Role
from pdmesh.supervisor.runtime import RuntimeFolder

LOOPBACK = "127.0.0.1"
# A third of decode's share where both want a core. Measured, see docs/cpu.md: at 0 decode's steps take a third longer; at 10
# and above other work on the machine takes the cores that prefill needs.
PREFILL_NICENESS = 5
# Prompts of 64 tokens among such of 3,000 had their first token after 3.4 s, not 6.9, at the same throughput; 512 made it 4.5.
PREFILL_SHARE_TOKENS = 256
THRESHOLD = "--long-prefill-token-threshold"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One child process."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    """Its whole environment."""
    drain_timeout_s: float = 30.0
    """How long it may take to end by itself."""
    is_door: bool = False
    """Clients come to it, at the mesh's own address."""
    listener: socket.socket | None = field(default=None, repr=False)
    """What it takes its clients from, open as long as the mesh is up; None: it binds a port itself."""
    ready_socket: str = ""
    """Unix socket that accepts once the child is ready; empty: it reports on `--notify-fd`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultPorts:
    http: int
    grpc: int


DEFAULT_PORTS = {
    Role.PREFILL: DefaultPorts(http=8100, grpc=8101),
    Role.DECODE: DefaultPorts(http=8200, grpc=8201),
    Role.KVCACHE: DefaultPorts(http=8300, grpc=8301),
}


class Plan:
    """Makes the specs of one mesh, whose model can hold `context` tokens. Its ports are taken into `ports`; raises ConfigError
    when the proxy's is in use."""

    def __init__(
        self, config: UpConfig, runtime: RuntimeFolder, environ: Mapping[str, str], ports: Ports, context: int
    ) -> None:
        ports.require(config.host, config.port, "--port")
        self._config = config
        self._context = min(config.max_model_len or context, context)
        self._runtime = runtime
        self._env = _child_environment(config, environ)
        self._extra = {
            Role.PREFILL: _split(config.prefill_args, "prefill-args"),
            Role.DECODE: _split(config.decode_args, "decode-args"),
            Role.KVCACHE: _split(config.kvcache_args, "kvcache-args"),
            Role.PROXY: _split(config.proxy_args, "proxy-args"),
        }
        # The first of each role gets its usual ports, so that curl commands in the docs work; see `moved`.
        self._ports = {
            role: DefaultPorts(http=ports.prefer(LOOPBACK, usual.http), grpc=ports.prefer(LOOPBACK, usual.grpc))
            for role, usual in DEFAULT_PORTS.items()
            if role in self.roles
        }
        self._free_ports = ports
        self._further_ports: dict[str, DefaultPorts] = {}
        """Of the engines that have not their role's usual ones."""
        self._num_engines = {Role.PREFILL: config.num_prefill, Role.DECODE: config.decode}

    @property
    def moved(self) -> list[str]:
        """One line for each default port that was in use and replaced by a free one."""
        return [
            f"{role}: port {usual} is in use, {chosen} is taken instead"
            for role, taken in self._ports.items()
            for usual, chosen in ((DEFAULT_PORTS[role].http, taken.http), (DEFAULT_PORTS[role].grpc, taken.grpc))
            if usual != chosen
        ]

    @property
    def roles(self) -> set[Role]:
        """Roles that this mesh starts with."""
        config = self._config
        roles = {Role.PROXY, Role.DECODE}
        if config.num_prefill:
            roles.add(Role.PREFILL)
        if config.kvcache:
            roles.add(Role.KVCACHE)
        if config.kvcache and not config.valkey:
            roles.add(Role.VALKEY)
        return roles

    def children(self) -> list[ChildSpec]:
        """All that the mesh starts with; the engines take longest, so they come first."""
        config = self._config
        specs = [self.engine(Role.PREFILL, number + 1) for number in range(config.num_prefill)]
        specs += [self.engine(Role.DECODE, number + 1) for number in range(config.decode)]
        specs.append(self.proxy())
        specs += [self.kvcache()] if Role.KVCACHE in self.roles else []
        specs += [self.valkey()] if Role.VALKEY in self.roles else []
        return specs

    def doubtful(self) -> list[ChildSpec]:
        """One child of each role whose configuration is not all of our own making."""
        first = {spec.role: spec for spec in reversed(self.children())}
        found = {role: spec for role, spec in first.items() if self._extra.get(role)}
        if Role.KVCACHE in first and self._config.valkey and self._config.valkey_required:
            spec = first[Role.KVCACHE]
            found[Role.KVCACHE] = replace(spec, argv=(*spec.argv, "--valkey-required"))
        return list(found.values())

    def proxy(self) -> ChildSpec:
        """The door. It finds engines through the endpoint files, which may still be empty."""
        config = self._config
        flags = ["--host", config.host, "--port", str(config.port), "--model", config.model]
        # The endpoint files are local, so looking often while engines come and go costs little.
        flags += ["--resolve-interval-s", "0.25"]
        flags += ["--prefill", f"file:{self._runtime.endpoints(Role.PREFILL)}"]
        flags += ["--decode", f"file:{self._runtime.endpoints(Role.DECODE)}"]
        # Its further flags may have it listen elsewhere.
        is_moved = bool(self._extra_value(Role.PROXY, "--host", "--port", "--listen-fd", "--config"))
        spec = self._service(Role.PROXY, "proxy", [*flags, *self._served_name()])
        # Before it drains; at the door, where its successor is let in at once, it does not.
        grace_s = self._seconds(Role.PROXY, "drain_grace_s", 0.0) if is_moved else 0.0
        return replace(spec, is_door=not is_moved, drain_timeout_s=spec.drain_timeout_s + grace_s)

    def engine(self, role: Role, number: int) -> ChildSpec:
        """The `number`th prefill or decode engine, from 1."""
        config = self._config
        ports = self._ports_of(role, number)
        flags = ["--model", config.model, "--engine-id", f"{role}-{number}"]
        flags += ["--port", str(ports.http), "--grpc-port", str(ports.grpc)]
        flags += ["--dtype", config.dtype, "--backend", config.backend, "--quantization", config.quantization]
        flags += ["--kv-cache-dtype", config.kv_cache_dtype, *self._compute_threads(role), *self._turns(role)]
        if not self._extra_value(role, "--kv-transfer-config"):
            # vLLM's JSON says both, and a flag beside it would be a contradiction that nobody wrote.
            flags += ["--connector", ",".join(config.connector), "--kv-load-failure-policy", "recompute"]
        flags += ["--role", "both"] if config.aggregated else []
        flags += ["--max-model-len", str(config.max_model_len)] if config.max_model_len else []
        if config.kv_cache_memory_bytes:
            flags += ["--kv-cache-memory-bytes", str(config.kv_cache_memory_bytes)]
        if config.kvcache:
            flags += ["--kvcache", f"{LOOPBACK}:{self._kvcache_port}"]
        return self._service(role, f"{role}-{number}", [*flags, *self._served_name()])

    def _ports_of(self, role: Role, number: int) -> DefaultPorts:
        """An engine's ports in all its lives, so that who looks at its metrics finds it again after a restart."""
        # A role that the mesh did not start with may come by `pdmesh scale`.
        if number == 1 and role in self._ports:
            return self._ports[role]
        name = f"{role}-{number}"
        if name not in self._further_ports:
            free = self._free_ports
            self._further_ports[name] = DefaultPorts(http=free.any(LOOPBACK), grpc=free.any(LOOPBACK))
        return self._further_ports[name]

    def kvcache(self) -> ChildSpec:
        """The tier. It connects to Valkey when that answers: one of ours starts beside it, another may be away when the
        tier is restarted; whether it was there at first is seen by `doubtful`."""
        ports = self._ports[Role.KVCACHE]
        flags = ["--port", str(ports.http), "--grpc-port", str(ports.grpc)]
        flags += ["--engine-id", "kvcache", "--connector", ",".join(self._config.connector)]
        flags += ["--no-valkey-required"]
        spec = self._service(Role.KVCACHE, "kvcache", flags)
        # By environment: the URL of an outside server may hold a password.
        url = self._config.valkey or self._valkey_command().url
        return replace(spec, env={**spec.env, "PDMESH_VALKEY": url})

    def valkey(self) -> ChildSpec:
        """The embedded server, on a Unix socket that only this user may open. Raises ConfigError when it is not installed."""
        command = self._valkey_command()
        assert isinstance(command.address, str)
        return ChildSpec(
            name="valkey",
            role=Role.VALKEY,
            argv=tuple(command.argv),
            env=self._env,
            drain_timeout_s=self._config.drain_timeout_s,
            ready_socket=command.address,
        )

    def _valkey_command(self) -> ValkeyCommand:
        return prepare(self._runtime.valkey_dir, maxmemory_bytes=self._config.valkey_memory_bytes)

    @property
    def _kvcache_port(self) -> int:
        """Where the engines find the tier; `--kvcache-args` may have moved it."""
        given = self._extra_value(Role.KVCACHE, "--grpc-port")
        try:
            return int(given) if given else self._ports[Role.KVCACHE].grpc
        except ValueError as exc:
            raise ConfigError(f"kvcache-args: {exc}") from None

    def _extra_value(self, role: Role, *spellings: str) -> str:
        """What a role's further flags say of one flag, in any of its spellings; empty: nothing."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument(*spellings, dest="value", default="")
        try:
            return str(parser.parse_known_args(self._extra[role])[0].value)
        except argparse.ArgumentError as exc:
            raise ConfigError(f"{role}-args: {exc}") from None

    def _served_name(self) -> list[str]:
        name = self._config.served_model_name
        return ["--served-model-name", name] if name else []

    def _compute_threads(self, role: Role) -> list[str]:
        """Each role's engines divide all cores: decode uses little of them, and what one role leaves is the other's at once.

        No engine has cores of its own; where both want one, prefill gives way.
        """
        niceness = ["--cpu-nice", str(PREFILL_NICENESS if role is Role.PREFILL else 0)]
        if not self._config.cpu_threads and self._extra_value(role, "--cpu-cores"):
            # The engine has a thread for each of these; our number might be more than they are.
            return niceness
        # A role that comes by `pdmesh scale` alone has one engine at first.
        engines = max(1, self._num_engines[role])
        count = self._config.cpu_threads or max(1, usable_cores() // engines)
        return ["--cpu-threads", str(count), *niceness]

    def _turns(self, role: Role) -> list[str]:
        """Where prompts are computed, short ones do not wait until long ones are done."""
        # What a file of its own says is not ours to override.
        has_own = self._extra_value(role, "--max-model-len") or self._extra_value(role, "--config")
        if role is not Role.PREFILL or self._context < PREFILL_SHARE_TOKENS or has_own:
            return []
        # How small a pool of a given size makes the context only the engine knows.
        fits = [] if self._extra_value(role, THRESHOLD) else ["--long-prefill-token-threshold-fits"]
        return [THRESHOLD, str(PREFILL_SHARE_TOKENS), *fits]

    def _service(self, role: Role, name: str, flags: list[str]) -> ChildSpec:
        config = self._config
        # A role's further flags, or a file that they name, may give it a time of its own.
        drain_timeout_s = self._seconds(role, "drain_timeout_s", config.drain_timeout_s)
        common = ["--log-level", config.log_level, "--drain-timeout-s", str(drain_timeout_s)]
        # Flags, as in the environment an empty name would be none.
        for setting in TlsConfig.model_fields if config.tls_cert else ():
            common += ["--" + setting.replace("_", "-"), getattr(config, setting)]
        argv = (sys.executable, "-m", f"pdmesh_{role}", *flags, *common, *self._extra[role])
        return ChildSpec(name=name, role=role, argv=argv, env=self._env, drain_timeout_s=drain_timeout_s)

    def _seconds(self, role: Role, setting: str, default: float) -> float:
        """A time that a role's further flags may give it, or the config file that they name."""
        name = setting.replace("_", "-")
        given: object = self._extra_value(role, f"--{name}", *ALIASES.get(setting, ()))
        path, where = self._extra_value(role, "--config"), f"{role}-args"
        if given == "" and path:
            # One that cannot be read is the child's to refuse, which knows what else is wrong with it.
            with contextlib.suppress(ConfigError):
                given, where = read_toml(path).get(setting, ""), f"config file {path}"
        if given == "":
            return default
        try:
            return float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ConfigError(f"{where}: {name} must be a number of seconds, got {given!r}") from None


def unheard_settings(environ: Mapping[str, str]) -> list[str]:
    """Names of the engines' settings that `environ` has and `pdmesh up` has not: the engines do not get to see them."""
    names = EngineConfig.model_fields.keys() - UpConfig.model_fields.keys()
    return sorted(name for name in names if environ.get(variable(name), ""))


def _child_environment(config: UpConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without PDMESH_ settings (they were for `up`), plus the secrets, which argv would show."""
    env = {name: value for name, value in environ.items() if not name.startswith("PDMESH_")}
    if config.secret_file:
        env["PDMESH_SECRET_FILE"] = config.secret_file
    elif config.secret:
        env["PDMESH_SECRET"] = config.secret
    elif not config.valkey:
        env["PDMESH_SECRET"] = secrets.token_hex(32)
    # Left: an outside Valkey and no secret given. The per-user secret then keeps stored blocks valid across runs.
    if config.api_key:
        env["PDMESH_API_KEY"] = ",".join(config.api_key)
    return env


def _split(text: str, flag: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise ConfigError(f"pdmesh up: {flag}: {exc} (got {text!r})") from None
