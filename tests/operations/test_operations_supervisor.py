"""The supervisor's parts with small real child processes: restart, giving up, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import psutil
import pytest

from pdmesh.config import load_config
from pdmesh.errors import ConfigError, InternalError
from pdmesh.lifecycle import listen
from pdmesh.protocol.exchange import KVDescription
from pdmesh.protocol.layout import Layout
from pdmesh.supervisor import keeper as keeper_module
from pdmesh.supervisor.child import Child
from pdmesh.supervisor.config import UpConfig
from pdmesh.supervisor.control import bind_control, control_server, scale
from pdmesh.supervisor.keeper import Keeper, KeeperState
from pdmesh.supervisor.main import engines_flag, ignored_variables, run_up
from pdmesh.supervisor.mesh import Mesh
from pdmesh.supervisor.pairing import unpaired
from pdmesh.supervisor.plan import ChildSpec, Plan
from pdmesh.supervisor.ports import Ports
from pdmesh.supervisor.roles import Role
from pdmesh.supervisor.runtime import RuntimeFolder
from pdmesh_proxy.config import ProxyConfig

READY = (
    "import os, sys, json; os.write(int(sys.argv[-1]), json.dumps({'ready': True, 'grpc_port': 7}).encode() + b'\\n')\n"
)
SLEEP = "import time; time.sleep(600)\n"
PORTS: list[Ports] = []
# Starts a child of its own in the same group, and tells its pid in the log.
GRANDCHILD = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"


def spec(code: str) -> ChildSpec:
    return ChildSpec(name="decode-1", role=Role.DECODE, argv=(sys.executable, "-c", code), env=dict(os.environ))


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[RuntimeFolder]:
    yield RuntimeFolder.open(str(tmp_path), 8000, "")
    while PORTS:
        PORTS.pop().close()


@pytest.fixture
def news() -> list[str]:
    return []


@pytest.fixture
def keep(runtime: RuntimeFolder, news: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Keeper]:
    monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 0.05)

    def make(code: str) -> Keeper:
        made = Keeper(spec(code), runtime, changed=lambda: None, report=news.append)
        made.start()
        return made

    return make


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def test_child_says_that_it_is_ready_and_ends_with_its_whole_group(runtime: RuntimeFolder) -> None:
    async def go() -> tuple[int, int]:
        child = Child(spec(GRANDCHILD + READY + SLEEP), runtime.log_path("decode-1"), lambda: None)
        life = asyncio.create_task(child.live())
        await asyncio.wait_for(child.ready.wait(), 20)
        assert child.facts == {"grpc_port": 7}
        grandchild = int(child.last_lines(1)[0])
        assert not is_gone(grandchild)
        child.terminate()
        return await asyncio.wait_for(life, 10), grandchild

    code, grandchild = asyncio.run(go())
    assert code == -signal.SIGTERM
    wait_gone(grandchild)


def test_a_successor_starts_while_the_old_one_ends_what_it_has(
    runtime: RuntimeFolder, news: list[str], tmp_path: Path
) -> None:
    """The first life says that it leaves, as a proxy does at SIGTERM, and stays; both hold the door that they were given."""
    code = (
        "import json, os, pathlib, socket, sys, time\n"
        "def given(flag): return int(sys.argv[sys.argv.index(flag) + 1])\n"
        "def tell(word): os.write(given('--notify-fd'), json.dumps({word: True}).encode() + b'\\n')\n"
        "tell('ready')\n"
        "print(os.getpid(), socket.socket(fileno=given('--listen-fd')).getsockname()[1], flush=True)\n"
        f"first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "if not first.exists():\n"
        "    first.touch()\n"
        "    tell('leaving')\n" + SLEEP
    )

    async def go(listener: socket.socket) -> None:
        keeper = Keeper(replace(spec(code), listener=listener), runtime, changed=lambda: None, report=news.append)
        keeper.start()
        async with asyncio.timeout(20):
            while len(lines := _lines(keeper)) < 2:
                await asyncio.sleep(0.02)
        (old, *old_port), (new, *new_port) = (map(int, line.split()) for line in lines)
        assert old_port == new_port == [listener.getsockname()[1]]
        assert keeper.child is not None
        assert keeper.child.pid == new
        assert not is_gone(old)
        assert "its successor is started" in news[0]
        # Both are its own to end.
        keeper.kill()
        await keeper.stop(5.0)
        assert is_gone(old)
        assert is_gone(new)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(go(listener))


def _lines(keeper: Keeper) -> list[str]:
    return Path(keeper.log_path).read_text().splitlines()


def test_child_dies_with_a_killed_supervisor(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, sys
from pathlib import Path
from pdmesh.supervisor.child import Child
from pdmesh.supervisor.pairing import unpaired
from pdmesh.supervisor.plan import ChildSpec
from pdmesh.supervisor.roles import Role
spec = ChildSpec(name="x", role=Role.DECODE, argv=(sys.executable, "-c", {READY + SLEEP!r}), env=dict(os.environ))
async def go():
    child = Child(spec, Path({str(tmp_path / "log")!r}), lambda: None)
    life = asyncio.create_task(child.live())
    await child.ready.wait()
    print(child.pid, flush=True)
    await life
asyncio.run(go())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert not is_gone(pid)
        supervisor.kill()
    wait_gone(pid)


def test_crash_is_restarted_and_reported_with_its_last_words(
    keep: Callable[[str], Keeper], news: list[str], tmp_path: Path
) -> None:
    flag = tmp_path / "came-back"
    code = READY + f"import pathlib; p = pathlib.Path({str(flag)!r}); first = not p.exists(); p.touch()\n"
    code += "if first: print('out of luck', flush=True); os._exit(7)\n" + SLEEP

    async def go() -> None:
        keeper = keep(code)
        async with asyncio.timeout(30):
            await keeper.until_ready()
            while not (keeper.restarts == 1 and keeper.state is KeeperState.READY):
                await asyncio.sleep(0.02)
        await keeper.stop(5)
        assert keeper.state is KeeperState.STOPPED

    asyncio.run(go())
    assert len(news) == 1
    assert "decode-1 ended (exit code 7), restarted in 0.05 s" in news[0]
    assert "out of luck" in news[0]


def test_config_error_at_start_is_final(keep: Callable[[str], Keeper]) -> None:
    async def go() -> None:
        keeper = keep("import sys; sys.stderr.write('pdmesh decode: model: nowhere does not exist\\n'); sys.exit(2)")
        with pytest.raises(ConfigError, match=r"^decode-1: model: nowhere does not exist$"):
            await asyncio.wait_for(keeper.until_ready(), 20)
        await keeper.stop(5)
        assert keeper.restarts == 1

    asyncio.run(go())


def test_child_that_never_gets_ready_is_given_up(keep: Callable[[str], Keeper]) -> None:
    async def go() -> None:
        keeper = keep("raise SystemExit('boom')")
        with pytest.raises(
            InternalError, match=r"decode-1 failed 3 times at start \(exit code 1\): boom; see .*decode-1.log"
        ):
            await asyncio.wait_for(keeper.until_ready(), 30)
        await keeper.stop(5)

    asyncio.run(go())


def test_child_that_ignores_sigterm_is_killed(keep: Callable[[str], Keeper], news: list[str]) -> None:
    async def go() -> None:
        keeper = keep("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + SLEEP)
        await asyncio.wait_for(keeper.until_ready(), 20)
        assert keeper.child is not None
        pid = keeper.child.pid
        await keeper.stop(0.2)
        assert is_gone(pid)

    asyncio.run(go())
    assert news == ["decode-1 did not end in 0 s and is killed"]


@pytest.mark.parametrize("num_turns", range(4))
def test_no_process_is_left_untold_by_a_stop_just_before_its_start(
    keep: Callable[[str], Keeper], news: list[str], num_turns: int
) -> None:
    """The stop saw no process yet; it then started, was never sent SIGTERM, and was killed when its time was over."""

    async def go() -> None:
        keeper = keep(READY + SLEEP)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await keeper.stop(5.0)
        assert (keeper.state, news) == (KeeperState.STOPPED, [])

    asyncio.run(go())


def test_stop_ends_the_wait_between_restarts(keep: Callable[[str], Keeper], monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        keeper = keep(READY + "sys.exit(1)")
        monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 60.0)
        await asyncio.wait_for(keeper.until_ready(), 20)
        while keeper.state is not KeeperState.WAITING:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await keeper.stop(5)
        assert time.monotonic() - began < 2

    asyncio.run(go())


def make_plan(runtime: RuntimeFolder, *flags: str, environ: dict[str, str] | None = None, context: int = 8192) -> Plan:
    environ = environ or {}
    config = load_config(UpConfig, ["--port", str(free_port()), *flags], prog="pdmesh up", environ=environ)
    PORTS.append(ports := Ports())
    # The next plan gets the usual ones, too; those that engines take later are held until the test's end.
    with contextlib.closing(ports):
        return Plan(config, runtime, environ, ports, context)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def flag(child: ChildSpec, name: str) -> str:
    return child.argv[len(child.argv) - 1 - child.argv[::-1].index(name) + 1]


def test_plan_keeps_secrets_off_the_command_line(runtime: RuntimeFolder) -> None:
    environ = {"PDMESH_SECRET": "a secret of ours, long", "PDMESH_LOG_LEVEL": "debug", "PATH": "/bin"}
    plan = make_plan(runtime, "--api-key", "key-of-a-client", environ=environ)
    for child in (plan.proxy(), plan.engine(Role.DECODE, 1), plan.kvcache()):
        assert "secret of ours" not in " ".join(child.argv)
        assert "key-of-a-client" not in " ".join(child.argv)
        assert child.env["PDMESH_SECRET"] == "a secret of ours, long"
        assert child.env["PDMESH_API_KEY"] == "key-of-a-client"
        assert child.env["PATH"] == "/bin"
        assert "PDMESH_LOG_LEVEL" not in child.env
        assert flag(child, "--log-level") == "debug"


def test_each_run_has_a_secret_of_its_own(runtime: RuntimeFolder) -> None:
    first, second = (make_plan(runtime).proxy().env["PDMESH_SECRET"] for _ in range(2))
    assert first != second
    assert len(first) >= 32
    # Blocks in an outside Valkey stay valid across runs only under the user's own secret.
    assert "PDMESH_SECRET" not in make_plan(runtime, "--valkey", "redis://127.0.0.1:1/0").proxy().env


def test_what_computes_and_in_which_numbers_reaches_every_engine(runtime: RuntimeFolder) -> None:
    asked = {"--dtype": "bfloat16", "--backend": "cpu", "--quantization": "int8"}
    asked |= {"--kv-cache-dtype": "int8_per_token_head"}
    plan = make_plan(runtime, *[word for pair in asked.items() for word in pair])
    for role in (Role.PREFILL, Role.DECODE):
        engine = plan.engine(role, 1)
        assert {name: flag(engine, name) for name in asked} == asked


def test_a_limit_for_one_role_reaches_only_that_role(runtime: RuntimeFolder) -> None:
    plan = make_plan(runtime, "--decode-args", "--max-num-batched-tokens 512")
    assert flag(plan.engine(Role.DECODE, 1), "--max-num-batched-tokens") == "512"
    assert "--max-num-batched-tokens" not in plan.engine(Role.PREFILL, 1).argv


def test_the_engines_of_a_role_divide_the_cores_and_prefill_gives_way(
    runtime: RuntimeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh.supervisor.plan.usable_cores", lambda: 8)

    def given(role: Role, *flags: str) -> tuple[str, int]:
        engine = make_plan(runtime, *flags).engine(role, 1)
        return flag(engine, "--cpu-threads"), int(flag(engine, "--cpu-nice"))

    assert given(Role.DECODE) == ("8", 0)
    threads, niceness = given(Role.PREFILL)
    assert threads == "8"
    assert niceness > 0
    assert given(Role.PREFILL, "--prefill", "3", "--decode", "2")[0] == "2"
    assert given(Role.DECODE, "--prefill", "3", "--decode", "2")[0] == "4"
    # More engines than cores; and one that comes later, to a mesh that had none of its role.
    assert given(Role.DECODE, "--decode", "9")[0] == "1"
    assert given(Role.PREFILL, "--aggregated")[0] == "8"
    # What is asked for is done.
    assert given(Role.DECODE, "--cpu-threads", "3") == ("3", 0)
    assert given(Role.PREFILL, "--cpu-threads", "3", "--prefill-args", "--cpu-nice 0 --cpu-threads 5") == ("5", 0)


def test_short_prompts_do_not_wait_for_long_ones_where_prompts_are_computed(runtime: RuntimeFolder) -> None:
    name = "--long-prefill-token-threshold"
    assert int(flag(make_plan(runtime).engine(Role.PREFILL, 1), name)) > 0
    assert name not in make_plan(runtime).engine(Role.DECODE, 1).argv
    # An engine refuses a threshold that no prompt can reach.
    for flags in (
        ("--max-model-len", "64"),
        ("--prefill-args", "--max-model-len 64"),
        ("--prefill-args", "--config a.toml"),
    ):
        assert name not in make_plan(runtime, *flags).engine(Role.PREFILL, 1).argv
    assert name not in make_plan(runtime, context=64).engine(Role.PREFILL, 1).argv
    given = make_plan(runtime, "--prefill-args", f"{name} 0").engine(Role.PREFILL, 1).argv
    assert given[len(given) - 1 - given[::-1].index(name) + 1] == "0"


def test_the_threshold_of_the_mesh_fits_any_pool_and_that_of_a_user_is_his_own(runtime: RuntimeFolder) -> None:
    """A pool of less than 256 tokens made the context as small, and the engine refused the threshold that nobody wrote."""
    name = "--long-prefill-token-threshold"
    assert f"{name}-fits" in make_plan(runtime, "--kv-cache-memory-bytes", "100000").engine(Role.PREFILL, 1).argv
    assert f"{name}-fits" not in make_plan(runtime, "--prefill-args", f"{name} 9").engine(Role.PREFILL, 1).argv


def test_certificates_are_handed_to_every_service(runtime: RuntimeFolder) -> None:
    """An empty name, too, which the environment could not tell from none."""
    given = ["--tls-cert", "/c/tls.crt", "--tls-key", "/c/tls.key", "--tls-ca", "/c/ca.crt", "--tls-server-name", ""]
    plan = make_plan(runtime, *given)
    children = [plan.proxy(), plan.kvcache(), *(plan.engine(role, 1) for role in (Role.PREFILL, Role.DECODE))]
    assert all([flag(child, name) for name in given[::2]] == given[1::2] for child in children)
    assert [child.name for child in children] == ["proxy", "kvcache", "prefill-1", "decode-1"]
    assert "--tls-server-name" not in make_plan(runtime).proxy().argv


@pytest.mark.parametrize("flag_", ["--drain-timeout-s 70", "--drain-timeout 70", "--shutdown-timeout=70"])
def test_a_role_that_may_drain_longer_is_waited_for(
    runtime: RuntimeFolder, flag_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed 5 s after the mesh's own time, with its requests."""
    plan = make_plan(runtime, "--drain-timeout-s", "1", f"--prefill-args={flag_}")
    assert [plan.engine(role, 1).drain_timeout_s for role in (Role.PREFILL, Role.DECODE)] == [70.0, 1.0]
    with pytest.raises(ConfigError, match="prefill-args: drain-timeout-s must be a number of seconds, got 'soon'"):
        make_plan(runtime, "--prefill-args", "--drain-timeout soon").engine(Role.PREFILL, 1)

    async def go() -> dict[str, float]:
        mesh = Mesh(UpConfig(drain_timeout_s=1), plan, runtime, changed=lambda: None, report=lambda line: None)
        given: dict[str, float] = {}
        for role in (Role.PREFILL, Role.DECODE):
            keeper = Keeper(plan.engine(role, 1), runtime, changed=lambda: None, report=lambda line: None)
            monkeypatch.setattr(
                keeper, "stop", AsyncMock(side_effect=lambda grace_s, role=role: given.update({role: grace_s}))
            )
            mesh.keepers.append(keeper)
        mesh._started = True
        await mesh.drain()
        return given

    given = asyncio.run(go())
    assert given[Role.PREFILL] >= 70
    assert given[Role.DECODE] < 10


def test_an_engine_has_the_same_ports_in_all_its_lives(runtime: RuntimeFolder) -> None:
    """All but the first of a role came back on others, where nobody scraped them."""
    config = load_config(UpConfig, ["--port", str(free_port()), "--decode", "3"], prog="pdmesh up", environ={})
    with contextlib.closing(Ports()) as ports:
        plan = Plan(config, runtime, {}, ports, 8192)
        made = [plan.engine(Role.DECODE, number) for number in (2, 3)]
        told = [flag(child, name) for child in made for name in ("--port", "--grpc-port")]
        assert "0" not in told
        assert len(set(told)) == 4
        assert made == [plan.engine(Role.DECODE, number) for number in (2, 3)]


def test_engines_keep_offers_until_no_engine_could_fetch_them(
    runtime: RuntimeFolder, news: list[str], tmp_path: Path
) -> None:
    """One offer that nobody fetched made the end of an idle mesh take its whole drain timeout."""
    order = tmp_path / "order"
    say = f"say = lambda word: open({str(order)!r}, 'a').write(word + ' ')\n"
    begin = "import os, sys, signal, time\n" + say
    # Ends only when it is told that nobody comes; the decode is the last that could.
    keeps = (
        "tell = lambda *_: os.write(int(sys.argv[-1]), b'{\"keeping\": true}\\n')\n"
        "signal.signal(signal.SIGTERM, tell)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (say('prefill'), sys.exit(0)))\n"
    )
    fetches = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), say('decode'), sys.exit(0)))\n"

    def child(name: str, role: Role, code: str) -> ChildSpec:
        return replace(spec(begin + code + READY + SLEEP), name=name, role=role, drain_timeout_s=5.0)

    async def go() -> None:
        mesh = Mesh(UpConfig(), make_plan(runtime), runtime, changed=lambda: None, report=news.append)
        for made in (
            child("prefill-1", Role.PREFILL, keeps),
            child("prefill-2", Role.PREFILL, keeps),
            child("decode-1", Role.DECODE, fetches),
        ):
            mesh._add(made)
        await asyncio.gather(*(keeper.until_ready() for keeper in mesh.keepers))
        mesh._started = True
        await mesh.drain()

    asyncio.run(go())
    # Who has to be killed says so.
    assert not news
    assert order.read_text().split() == ["decode", "prefill", "prefill"]


def test_a_proxy_that_serves_on_before_it_drains_is_waited_for(runtime: RuntimeFolder) -> None:
    """It was killed with streams that it still had time for. At the door it drains at once."""
    given = ("--drain-timeout-s", "30", "--proxy-args")
    assert make_plan(runtime, *given, "--port 9000 --drain-grace-s 10").proxy().drain_timeout_s == 40.0
    assert (
        make_plan(runtime, *given, "--port 9000 --drain-timeout 7 --drain-grace-s=10").proxy().drain_timeout_s == 17.0
    )
    assert make_plan(runtime, *given, "--drain-grace-s 10").proxy().drain_timeout_s == 30.0
    with pytest.raises(ConfigError, match="proxy-args: drain-grace-s must be a number of seconds, got 'soon'"):
        make_plan(runtime, *given, "--port 9000 --drain-grace-s soon").proxy()


@pytest.mark.parametrize(
    ("text", "flags", "expected_s"),
    [
        ("drain_grace_s = 10", "", 40.0),
        ("drain_grace_s = 10.5\ndrain_timeout_s = 70", "", 80.5),
        ("drain_grace_s = 10\ndrain_timeout_s = 70", " --drain-grace-s 1 --drain-timeout 2", 3.0),
        ("max_body_bytes = 4096", "", 30.0),
    ],
)
def test_times_that_a_config_file_of_the_proxy_says_are_heard(
    runtime: RuntimeFolder, tmp_path: Path, text: str, flags: str, expected_s: float
) -> None:
    """It was killed before its time to serve on was over, and its own time to drain was not in force at all."""
    path = tmp_path / "proxy.toml"
    path.write_text(text)
    proxy = make_plan(runtime, f"--proxy-args=--config {path}{flags}").proxy()
    assert proxy.drain_timeout_s == expected_s
    # What the proxy itself makes of that command line.
    config = load_config(ProxyConfig, list(proxy.argv[3:]), prog="pdmesh proxy", environ={})
    assert config.drain_grace_s + config.drain_timeout_s == expected_s


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("drain_grace_s = 'soon'", "drain-grace-s must be a number of seconds, got 'soon'"),
        ("drain_timeout_s = [1]", r"drain-timeout-s must be a number of seconds, got \[1\]"),
    ],
)
def test_a_config_file_whose_times_cannot_be_told_is_refused(
    runtime: RuntimeFolder, tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "proxy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"config file {path}: {words}"):
        make_plan(runtime, f"--proxy-args=--config {path}").proxy()


def test_nobody_gets_in_once_the_mesh_takes_its_leave(runtime: RuntimeFolder) -> None:
    """The proxy has the door's socket too: who got in after it had looked for the last time was reset."""

    async def go() -> None:
        mesh = Mesh(UpConfig(), make_plan(runtime), runtime, changed=lambda: None, report=print)
        door = mesh._listener = listen("127.0.0.1", 0)
        with door, door.dup() as of_the_proxy, socket.socket() as early, socket.socket() as late:
            address = of_the_proxy.getsockname()
            for client in (early, late):
                client.setblocking(False)
            assert early.connect_ex(address) == errno.EINPROGRESS
            await mesh.drain()
            assert late.connect_ex(address) == errno.EINPROGRESS
            # What came before is there to be accepted, and nothing else.
            of_the_proxy.setblocking(False)
            of_the_proxy.accept()[0].close()
            with pytest.raises(BlockingIOError):
                of_the_proxy.accept()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--kv-transfer-config", "{}"], "--decode-args '--kv-transfer-config VALUE'"),
        (["--port", "1", "--kv-transfer-config={}"], "--decode-args '--kv-transfer-config VALUE'"),
        (["--no-async-scheduling"], "--decode-args '--no-async-scheduling'"),
    ],
)
def test_settings_of_engines_say_where_they_go(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They were unrecognized."""
    assert run_up(argv) == 2
    error = capsys.readouterr().err
    assert "is a setting of engines" in error
    assert says in error
    assert engines_flag(["--prefill-args", "--max-num-seqs 4", "--drain-timeout-s", "3", "--no-kvcache"]) == ""


def test_vllms_json_for_one_role_is_not_contradicted(runtime: RuntimeFolder) -> None:
    plan = make_plan(runtime, "--prefill-args", '--kv-transfer-config \'{"kv_connector":"NixlConnector"}\'')
    assert {"--connector", "--kv-load-failure-policy"}.isdisjoint(plan.engine(Role.PREFILL, 1).argv)
    assert flag(plan.engine(Role.DECODE, 1), "--connector") == "shm,grpc"


def test_cores_for_one_role_bring_their_number_of_threads(
    runtime: RuntimeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own number was more than the cores named, and refused."""
    monkeypatch.setattr("pdmesh.supervisor.plan.usable_cores", lambda: 2)
    plan = make_plan(runtime, "--prefill-args", "--cpu-cores 1", "--decode-args", "--cpu-cores=0 --cpu-threads 1")
    prefill, decode = (plan.engine(role, 1).argv for role in (Role.PREFILL, Role.DECODE))
    assert "--cpu-threads" not in prefill
    assert "--cpu-nice" in prefill
    assert decode.count("--cpu-threads") == 1
    # Each role on its own; and a number that was asked for is not dropped in silence.
    assert flag(make_plan(runtime, "--prefill-args", "--cpu-cores 1").engine(Role.DECODE, 1), "--cpu-threads") == "2"
    asked = make_plan(runtime, "--cpu-threads", "2", "--prefill-args", "--cpu-cores 1").engine(Role.PREFILL, 1)
    assert flag(asked, "--cpu-threads") == "2"
    with pytest.raises(ConfigError, match=r"prefill-args: .*--cpu-cores.*expected one argument"):
        make_plan(runtime, "--prefill-args=--cpu-cores").engine(Role.PREFILL, 1)


def test_engine_settings_from_the_environment_that_up_cannot_hand_on_are_told() -> None:
    environ = {"PDMESH_CPU_ISA": "avx2", "PDMESH_DTYPE": "bfloat16", "PDMESH_CPU_NICE": "", "PDMESH_CPU_THREAD": "1"}
    misspelt, unheard = ignored_variables(environ)
    assert misspelt == "environment variable PDMESH_CPU_THREAD means nothing here; is it PDMESH_CPU_THREADS?"
    assert unheard.startswith("environment variable PDMESH_CPU_ISA does not reach the engines")
    assert "--cpu-isa in --prefill-args and --decode-args" in unheard


def test_aggregated_means_one_engine(runtime: RuntimeFolder) -> None:
    plan = make_plan(runtime, "--aggregated", "--no-kvcache")
    assert plan.roles == {Role.PROXY, Role.DECODE}
    assert "--kvcache" not in plan.engine(Role.DECODE, 1).argv


def test_default_port_in_use_is_replaced_and_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with contextlib.closing(Ports()) as ports:
            assert ports.prefer("127.0.0.1", port) != port
            with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use.*--port"):
                ports.require("127.0.0.1", port, "--port")


def test_meshes_that_start_together_never_choose_the_same_port() -> None:
    """Neither has a child that listens yet, so only what each holds keeps the other away."""
    port = free_port()
    with contextlib.closing(Ports()) as first, contextlib.closing(Ports()) as second:
        assert first.prefer("127.0.0.1", port) == port
        assert second.prefer("127.0.0.1", port) != port
        # A program that knows nothing of us cannot have it, a child of ours can.
        with socket.socket() as stranger:
            assert stranger.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
            with pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            pass
    with contextlib.closing(Ports()) as third:
        assert third.prefer("127.0.0.1", port) == port


def test_kvcache_moved_by_its_own_flags_is_found_by_the_engines(runtime: RuntimeFolder) -> None:
    plan = make_plan(runtime, "--kvcache-args", "--grpc-port 12345")
    assert flag(plan.engine(Role.DECODE, 1), "--kvcache") == "127.0.0.1:12345"


def test_only_configurations_from_outside_are_checked_first(runtime: RuntimeFolder) -> None:
    assert make_plan(runtime).doubtful() == []
    names = [spec.name for spec in make_plan(runtime, "--decode", "2", "--decode-args", "--watermark 0.1").doubtful()]
    assert names == ["decode-1"]
    outside = make_plan(runtime, "--valkey", "redis://127.0.0.1:1/0")
    (checked,) = outside.doubtful()
    assert (checked.name, checked.argv[-1]) == ("kvcache", "--valkey-required")
    # Once it has been there, a kvcache that is restarted does not depend on it.
    assert outside.kvcache().argv[-1] != "--valkey-required"
    assert make_plan(runtime, "--valkey", "redis://127.0.0.1:1/0", "--no-valkey-required").doubtful() == []


def test_engines_that_cannot_pair_are_named_with_what_differs() -> None:
    facts: dict[str, object] = {"block_size": 32, "layout": "a", "connectors": ["shm", "grpc"]}
    assert unpaired({"prefill-1": facts}, {"decode-1": facts}) == []
    (line,) = unpaired({"prefill-1": facts}, {"decode-1": facts | {"block_size": 7, "layout": "b"}})
    assert "prefill-1 cannot hand over to decode-1: block size 32 and 7 differ;" in line
    (line,) = unpaired({"prefill-1": facts}, {"decode-1": facts | {"connectors": ["nixl"]}})
    assert "connectors shm,grpc and nixl have none in common" in line


def test_a_differing_fingerprint_is_told_by_the_settings_that_are_in_it() -> None:
    facts: dict[str, object] = {"backend": "cpu", "dtype": "bfloat16", "quantization": "none", "kv_dtype": "bfloat16"}
    facts |= {"model_fingerprint": "a", "layout": "a"}
    for changed, words in (
        ({"quantization": "int8", "model_fingerprint": "b"}, "decode-1: quantization none and int8 differ;"),
        (
            {"kv_dtype": "int8", "model_fingerprint": "b", "layout": "b"},
            "decode-1: KV cache's dtype bfloat16 and int8 differ;",
        ),
        ({"backend": "torch", "layout": "b"}, "decode-1: backend cpu and torch differ;"),
        ({"model_fingerprint": "b"}, "decode-1: model a and b differ;"),
        (
            {"backend": "torch", "model_fingerprint": "b", "layout": "b"},
            "decode-1: model a and b differ; backend cpu and torch differ;",
        ),
    ):
        (line,) = unpaired({"prefill-1": facts}, {"decode-1": facts | changed})
        assert words in line


def test_engines_that_convert_are_named_with_what_differs() -> None:
    def facts(**changes: Any) -> dict[str, object]:
        layout = Layout(
            layers=(0,), window=None, num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=32
        )
        layout = replace(layout, **changes)
        description = KVDescription(
            weights_fingerprint="w", layouts=(layout,), block_bytes=layout.block_bytes, staging_bytes=1 << 20
        )
        told: dict[str, object] = {
            "block_size": layout.block_size,
            "kv_dtype": layout.dtype,
            "layout": layout.fingerprint,
        }
        told |= {"model_fingerprint": layout.dtype, "kv": msgspec.to_builtins(description), "connectors": ["shm"]}
        return told

    (line,) = unpaired({"prefill-1": facts(block_size=16)}, {"decode-1": facts()})
    assert line == (
        "note: prefill-1 hands over to decode-1 by conversion: block size 16 and 32 differ; tokens are the same"
    )
    (line,) = unpaired({"prefill-1": facts()}, {"decode-1": facts(dtype="bfloat16")})
    assert "by conversion: KV cache's dtype float32 and bfloat16 differ; numbers are rounded" in line
    (line,) = unpaired({"prefill-1": facts(head_dim=4)}, {"decode-1": facts()})
    assert "warning: prefill-1 cannot hand over to decode-1: KV layout" in line
    (line,) = unpaired({"prefill-1": facts(block_size=16)}, {"decode-1": facts() | {"connectors": ["nixl"]}})
    assert (
        "cannot hand over to decode-1: block size 16 and 32 differ; connectors shm and nixl have none in common" in line
    )


def test_engines_that_fell_back_to_pytorch_are_named_once(runtime: RuntimeFolder, news: list[str]) -> None:
    ready = READY.replace("'grpc_port': 7", "'grpc_port': 7, 'backend_fallback': 'no_library'")
    config = load_config(UpConfig, ["--port", str(free_port())], prog="pdmesh up", environ={})
    slow = [replace(spec(ready + SLEEP), name=name) for name in ("decode-1", "decode-2")]
    specs = [replace(spec(READY + SLEEP), name="prefill-1", role=Role.PREFILL), slow[0]]

    class TwoSlowDecodes:
        def children(self) -> list[ChildSpec]:
            return specs

        def engine(self, role: Role, number: int) -> ChildSpec:
            return slow[1]

    async def go() -> None:
        mesh = Mesh(config, TwoSlowDecodes(), runtime, changed=lambda: None, report=news.append)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(mesh.start(), 30)
            await asyncio.wait_for(mesh.scale({Role.DECODE: 2}), 30)
        finally:
            await mesh.drain()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdmesh.supervisor.mesh.until_healthy", AsyncMock())
        asyncio.run(go())
    first, second = news
    assert first.startswith("warning: decode-1 computes with PyTorch, several times slower")
    assert "(no_library)" in first
    assert second.startswith("warning: decode-2 ")


def test_off_loopback_needs_a_secret() -> None:
    with pytest.raises(ConfigError, match="mesh secret is required") as raised:
        load_config(UpConfig, ["--host", "0.0.0.0", "--api-key", "hidden"], prog="pdmesh up", environ={})
    assert "hidden" not in str(raised.value)


def test_scale_travels_over_the_control_socket() -> None:
    port = free_port()
    asked: list[dict[Role, int]] = []

    async def change(wanted: dict[Role, int]) -> list[str]:
        asked.append(wanted)
        if wanted.get(Role.DECODE) == 0:
            raise ConfigError("scale: decode=0: no")
        return ["decode-2 added"]

    async def go() -> None:
        async with control_server(bind_control(port), change):
            with pytest.raises(ConfigError, match="another `pdmesh up`"):
                bind_control(port)
            done = await asyncio.to_thread(scale, port, {Role.DECODE: 2, Role.PREFILL: 0}, 10.0)
            assert done == ["decode-2 added"]
            with pytest.raises(ConfigError, match="decode=0: no"):
                await asyncio.to_thread(scale, port, {Role.DECODE: 0}, 10.0)

    asyncio.run(go())
    assert asked == [{Role.DECODE: 2, Role.PREFILL: 0}, {Role.DECODE: 0}]
    with pytest.raises(ConfigError, match="no `pdmesh up` of yours runs"):
        scale(port, {Role.DECODE: 1}, 1.0)


@pytest.mark.parametrize(
    "request_line",
    [
        b"5",
        b"null",
        b"[1]",
        b'[["decode", 1]]',
        b'{"decode": "2"}',
        b'{"decode": 1e400}',
        b'{"decode": true}',
        b'{"door": 1}',
        b"{",
        b"\xff",
        b"",
        b"[" * 4000,
        b" " * 9000,
    ],
)
def test_malformed_control_request_is_answered(request_line: bytes) -> None:
    """A body like `5` left whoever asked without an answer."""

    async def change(wanted: dict[Role, int]) -> list[str]:
        raise AssertionError("nothing was asked for")

    async def go() -> None:
        port = os.getpid()
        async with control_server(bind_control(port), change), asyncio.timeout(5):
            reader, writer = await asyncio.open_unix_connection(f"\0pdmesh-up-{os.getuid()}-{port}")
            writer.write(request_line + b"\n")
            reply = json.loads(await reader.readline())
            writer.close()
        assert reply["code"] == "ConfigError"
        assert "the request" in reply["error"]

    asyncio.run(go())


def test_control_tells_of_faults_and_of_lateness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.supervisor.control.REQUEST_TIMEOUT_S", 0.1)

    async def change(wanted: dict[Role, int]) -> list[str]:
        raise OSError("the disk is full")

    async def go() -> None:
        port = os.getpid()
        async with control_server(bind_control(port), change), asyncio.timeout(5):
            with pytest.raises(InternalError, match="OSError: the disk is full"):
                await asyncio.to_thread(scale, port, {Role.DECODE: 1}, 10.0)
            reader, writer = await asyncio.open_unix_connection(f"\0pdmesh-up-{os.getuid()}-{port}")
            assert b"did not come within" in await reader.readline()
            writer.close()

    asyncio.run(go())


def test_endpoint_file_is_replaced_whole_and_old_ones_are_cleared(tmp_path: Path) -> None:
    first = RuntimeFolder.open(str(tmp_path), 8000, "")
    first.write_endpoints(Role.DECODE, ["127.0.0.1:1", "127.0.0.1:2"])
    assert first.endpoints(Role.DECODE).read_text() == "127.0.0.1:1\n127.0.0.1:2\n"
    second = RuntimeFolder.open(str(tmp_path), 8000, "")
    assert not second.endpoints(Role.DECODE).exists()


def test_overlong_log_is_moved_aside(runtime: RuntimeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.supervisor.runtime.MAX_LOG_BYTES", 10)
    path = runtime.log_path("proxy")
    path.write_text("a line that is too long")
    runtime.rotate_logs(["proxy", "decode-1"])
    assert path.read_text() == ""
    assert path.with_suffix(".log.1").read_text() == "a line that is too long"
