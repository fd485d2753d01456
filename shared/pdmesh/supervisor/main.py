"""The life of `pdmesh up`: configuration, folder, children, signals, and nothing left behind."""

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from pdmesh.config import EngineConfig, load_config, unknown_variables, variable
from pdmesh.errors import ConfigError, MeshError
from pdmesh.models.source import ModelSource, read_config
from pdmesh.supervisor.config import UpConfig
from pdmesh.supervisor.control import bind_control, control_server
from pdmesh.supervisor.display import Display
from pdmesh.supervisor.mesh import Mesh
from pdmesh.supervisor.plan import Plan, unheard_settings
from pdmesh.supervisor.ports import Ports
from pdmesh.supervisor.preflight import check_children, check_shared
from pdmesh.supervisor.runtime import RuntimeFolder

PROG = "pdmesh up"
DEFAULT_URL = "http://127.0.0.1:8000/v1"
LOG_CHECK_INTERVAL_S = 60.0


def run_up(argv: list[str]) -> int:
    """Run a mesh until SIGINT or SIGTERM; returns the exit code: 0 done, 1 failed, 2 cannot start as configured."""
    try:
        if hint := engines_flag(argv):
            raise ConfigError(hint)
        config = load_config(UpConfig, argv, prog=PROG)
        return asyncio.run(_up(config))
    except MeshError as exc:
        sys.stderr.write(f"{PROG}: {exc.message.removeprefix(f'{PROG}: ')}\n")
        return 2 if isinstance(exc, ConfigError) else 1


async def _up(config: UpConfig) -> int:
    # Whatever can be refused is refused here, before the first process.
    with contextlib.ExitStack() as held:
        bound = held.enter_context(bind_control(config.port))
        source = check_shared(config)
        ports = held.enter_context(contextlib.closing(Ports()))
        runtime = RuntimeFolder.open(os.environ.get("XDG_STATE_HOME", ""), config.port, config.log_dir)
        plan = Plan(config, runtime, os.environ, ports, read_config(source)["max_position_embeddings"])
        await check_children(plan.doubtful())
        return await _run(config, source, runtime, plan, bound)


async def _run(config: UpConfig, source: ModelSource, runtime: RuntimeFolder, plan: Plan, bound: socket.socket) -> int:
    display = Display(Console(stderr=False))
    mesh = Mesh(config, plan, runtime, changed=lambda: display.update(mesh.keepers), report=display.say)
    stop = _stop_on_signals(mesh, display)
    runtime.write_api_key(config.api_key)
    display.say(f"pdmesh: {source.name} from {source.path}")
    for line in [*ignored_variables(os.environ), *plan.moved]:
        display.say(line)
    try:
        async with control_server(bound, mesh.scale):
            if await _started(mesh, stop):
                display.stop_progress()
                _welcome(config, source.name, mesh, runtime, display)
                await _watch_logs(mesh, runtime, stop, display.say)
    finally:
        display.stop_progress()
        await mesh.drain()
        runtime.close()
    display.say("stopped; nothing is left running")
    return 0


def engines_flag(argv: list[str]) -> str:
    """One line for the first flag that engines have and `pdmesh up` has not; else ""."""
    known = EngineConfig.model_fields.keys() - UpConfig.model_fields.keys()
    for given in argv:
        flag = given.partition("=")[0]
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if flag.startswith("--") and name in known:
            value = "" if EngineConfig.model_fields[name].annotation is bool else " VALUE"
            return (
                f"{flag} is a setting of engines, which may differ by role: give it in --prefill-args and --decode-args, "
                f"such as --decode-args '{flag}{value}'"
            )
    return ""


def ignored_variables(environ: Mapping[str, str]) -> list[str]:
    """One line for each PDMESH_ variable that was set in vain."""
    unheard = {variable(name): name.replace("_", "-") for name in unheard_settings(environ)}
    return unknown_variables(UpConfig, environ.keys() - unheard.keys()) + [
        f"environment variable {name} does not reach the engines, since {PROG} has no such setting; "
        f"give --{setting} in --prefill-args and --decode-args"
        for name, setting in unheard.items()
    ]


def _stop_on_signals(mesh: Mesh, display: Display) -> asyncio.Event:
    """The first signal drains, the second kills."""
    stop = asyncio.Event()

    def stop_or_kill() -> None:
        if stop.is_set():
            mesh.kill()
            display.say("killing what still runs")
            return
        stop.set()
        display.say("draining; once more to kill at once")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop_or_kill)
    return stop


async def _started(mesh: Mesh, stop: asyncio.Event) -> bool:
    """Start the mesh; False when a signal came first. Raises what `mesh.start` raises."""
    starting = asyncio.create_task(mesh.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        starting.result()
        return not stop.is_set()
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    return False


async def _watch_logs(mesh: Mesh, runtime: RuntimeFolder, stop: asyncio.Event, report: Callable[[str], None]) -> None:
    """Wait for the end, and keep the logs bounded meanwhile."""
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOG_CHECK_INTERVAL_S)
        for problem in runtime.rotate_logs(keeper.spec.name for keeper in mesh.keepers):
            report(problem)


def _welcome(config: UpConfig, model_name: str, mesh: Mesh, runtime: RuntimeFolder, display: Display) -> None:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    url = f"http://{host}:{config.port}/v1"
    key_file = shlex.quote(str(runtime.api_key_path))
    key = f' -H "Authorization: Bearer $(cat {key_file})"' if config.api_key else ""
    options = "" if url == DEFAULT_URL else f" --url {url}"
    options += f' --api-key "$(cat {key_file})"' if config.api_key else ""
    body = '{"model": "%s", "prompt": "The capital of France is", "max_tokens": 16}'
    name = config.served_model_name or model_name
    display.say("")
    display.table(mesh.keepers)
    display.say("")
    display.say(f"ready at {url}; try:")
    display.say(f"  curl {url}/completions -H 'Content-Type: application/json'{key} -d '{body % name}'")
    display.say(f"  {_program()} chat{options}")
    display.say("Ctrl-C stops everything.")


def _program() -> str:
    """How to call this pdmesh from the same folder."""
    script = Path(sys.executable).with_name("pdmesh")
    if not script.exists():
        return f"{sys.executable} -m pdmesh"
    if shutil.which("pdmesh") == str(script):
        return "pdmesh"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)
