"""vLLM's prefill, decode and router for `faults_vllm.py`: started, asked, broken, and mended."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from sides import HOST, MODEL_NAME, Process, free_port, is_healthy

LEASE_S = 10
"""`kv_lease_duration` (its default is 30 s): as long as our own offers'."""
NUM_BLOCKS = 48
"""KV blocks of 128 tokens: few, so that others soon use those that were given back."""
MAX_TOKENS = 4096
START_S = 600.0
HANG_S = 60.0
ROLES = ("prefill", "decode")


class Moment(StrEnum):
    """Columns of the matrix that can be reached from outside."""

    BEFORE = "before admission"
    MID_PREFILL = "mid-prefill (chunk k of n)"
    OFFERED = "offered"
    DECODING = "decoding"


@dataclass(frozen=True, kw_only=True)
class Leg:
    """When to strike: after some seconds, or after some chunks of the stream."""

    after_s: float = 0.0
    after_chunks: int = 0


@dataclass(kw_only=True)
class Asked:
    """What a client has at the end."""

    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    done: bool = False
    """The stream's terminator came."""
    error: str = ""
    hung: bool = False

    @property
    def complete(self) -> bool:
        """Whether it ended as a whole answer."""
        return self.status == 200 and not self.error and self.done and self.finish_reason in ("length", "stop")


class Engines:
    """One prefill, one decode, a router. `mend` starts what is down."""

    def __init__(self, vllm: str, router: str, model: str, environment: dict[str, str], log_folder: Path) -> None:
        self._router_program, self._log_folder = router, log_folder
        self._rng = random.Random(5)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._num_starts = 0
        self._side_channel = {role: free_port() for role in ROLES}
        self._processes = {role: self._engine(role, vllm, model, environment) for role in ROLES}
        self._processes["proxy"] = self._router(router)

    def commands(self) -> list[str]:
        """What is started, without this machine's folders."""
        return [" ".join(re.sub(r"^/.*/", "", word) for word in each.command) for each in self._processes.values()]

    def versions(self) -> dict[str, str]:
        """Of vLLM as it says itself, of the router as its package is named."""
        self.mend()
        packages = Path(self._router_program).parents[1].glob("lib/python*/site-packages/vllm_router-*.dist-info")
        router = next((each.name.removesuffix(".dist-info").rpartition("-")[2] for each in packages), "unknown")
        return {"vLLM": self._get("prefill", "/version").get("version", "unknown"), "vllm-router": router}

    def prompt(self, length: int) -> list[int]:
        """Token ids that no request had before."""
        return [self._rng.randrange(1000, 40000) for _ in range(length)]

    # ---- asking --------------------------------------------------------------------------------

    def ask(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        leg: Leg | None = None,
        strike: Callable[[], None] = lambda: None,
        leave: bool = False,
        timeout_s: float = HANG_S,
    ) -> Asked:
        """Ask the router for a stream, and strike when `leg` says so."""
        body = _body(prompt, max_tokens) | {"stream": True}
        if leave and leg is not None and leg.after_s:
            # Nothing has come by then; the connection is closed.
            timeout_s = leg.after_s
        timer = threading.Timer(leg.after_s, strike) if leg is not None and leg.after_s else None
        if timer is not None:
            timer.start()
        asked = Asked()
        try:
            with _request(self._port("proxy"), body, timeout_s) as answer:
                asked.status = answer.status
                if answer.status != 200:
                    asked.error = answer.read().decode(errors="replace")
                    return asked
                for number, part in enumerate(_events(answer, time.monotonic() + timeout_s, asked), 1):
                    _take(asked, part)
                    if leg is not None and number == leg.after_chunks:
                        if leave:
                            return Asked(status=200, error="left")
                        strike()
        except TimeoutError:
            asked.hung = not leave
            asked.error = "left" if leave else ""
        except (OSError, http.client.HTTPException) as exc:
            asked.error = f"{type(exc).__name__}: {exc}"
        finally:
            if timer is not None:
                timer.join()
        return asked

    def alone(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What decode answers without prefill."""
        return self._whole("decode", _body(prompt, max_tokens)).token_ids

    def prefill_leg(self, prompt: list[int]) -> dict[str, Any]:
        """The first of the router's two requests; returns what the second is to carry."""
        unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        params = {"do_remote_decode": True, "do_remote_prefill": False, **unknown}
        with _request(self._port("prefill"), _body(prompt, 1) | {"kv_transfer_params": params}, HANG_S) as answer:
            told: dict[str, Any] = json.loads(answer.read())["kv_transfer_params"]
        self._blocks = [block for group in told["remote_block_ids"] for block in group]
        return told

    def decode_leg(self, prompt: list[int], params: dict[str, Any], max_tokens: int) -> Asked:
        """The second."""
        return self._whole("decode", _body(prompt, max_tokens) | {"kv_transfer_params": params})

    def _whole(self, role: str, body: dict[str, Any]) -> Asked:
        asked = Asked()
        try:
            with _request(self._port(role), body, HANG_S) as answer:
                asked.status, text = answer.status, answer.read()
            if asked.status != 200:
                asked.error = text.decode(errors="replace")
            else:
                _take(asked, json.loads(text))
                asked.done = True
        except TimeoutError:
            asked.hung = True
        except (OSError, http.client.HTTPException) as exc:
            asked.error = f"{type(exc).__name__}: {exc}"
        return asked

    # ---- breaking ------------------------------------------------------------------------------

    def kill(self, role: str) -> None:
        """SIGKILL all processes of a service, as the end of its container would."""
        for process in self._family(role):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def terminate(self, role: str) -> None:
        """SIGTERM; `mend` starts it again."""
        self._running[role].terminate()

    def freeze(self, role: str, duration_s: float) -> None:
        """Stop a service; it goes on by itself after a while."""
        family = self._family(role)
        _signal(family, signal.SIGSTOP)
        threading.Timer(duration_s, _signal, (family, signal.SIGCONT)).start()

    def let_expire(self, duration_s: float) -> None:
        """Wait until prefill has given the last leg's blocks back, and have others use them."""
        time.sleep(duration_s)
        for _ in range(4):
            self._whole("prefill", _body(self.prompt(1500), 1))

    def corrupt(self) -> None:
        """Change the last prefill leg's blocks in prefill's memory, all layers', after they were computed."""
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.RCVTIMEO, 5000)
            socket.connect(f"tcp://{HOST}:{self._side_channel['prefill']}")
            socket.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
            payload = msgspec.msgpack.decode(socket.recv_multipart()[0])
        told = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
        worker = next(each for each in self._family("prefill") if "Worker" in " ".join(each.cmdline()))
        with open(f"/proc/{worker.pid}/mem", "r+b", buffering=0) as memory:
            for base, length, stride in zip(
                told["kv_caches_base_addr"], told["block_lens"], told["block_strides"], strict=True
            ):
                for block in self._blocks[:2]:
                    memory.seek(base + block * stride)
                    # bf16: a sign in every second byte.
                    content = bytearray(memory.read(length))
                    content[1::2] = bytes(byte ^ 0x80 for byte in content[1::2])
                    memory.seek(base + block * stride)
                    memory.write(content)

    # ---- looking and mending -------------------------------------------------------------------

    def wait_nothing_held(self, timeout_s: float) -> float | None:
        """Seconds until no living engine holds a block or a request; None when that does not come."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + timeout_s:
            if not any(self._held(role) for role in ROLES if self._is_up(role)):
                return time.monotonic() - began_s
            time.sleep(0.2)
        return None

    def mend(self) -> None:
        """Start what is down, and wait until all is healthy."""
        for role in ROLES:
            if role in self._running and not self._is_up(role):
                self._end(role)
        down = [role for role in self._processes if role not in self._running or not self._is_up(role)]
        for role in down:
            if role != "proxy":
                self._start(role)
        self._wait_healthy(list(ROLES))
        # It remembers what failed: each cell has a fresh one.
        self._end("proxy")
        self._start("proxy")
        self._wait_healthy(["proxy"])

    def start_anew(self) -> None:
        """End everything and start it again."""
        self.stop()
        self.mend()

    def stop(self) -> None:
        """End everything."""
        for role in list(self._running):
            self._end(role)

    def _held(self, role: str) -> float:
        names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
        with contextlib.suppress(OSError, http.client.HTTPException, TimeoutError):
            text = self._text(role, "/metrics")
            return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(names))
        return 1.0

    def _is_up(self, role: str) -> bool:
        """Whether it runs and all of its parts do: a server whose core died is down."""
        return self._running[role].poll() is None and is_healthy(self._port(role))

    def _start(self, role: str) -> None:
        process = self._processes[role]
        self._num_starts += 1
        with (self._log_folder / f"{role}-{self._num_starts}.log").open("wb") as log:
            self._running[role] = subprocess.Popen(
                process.command,
                env=os.environ | process.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait_healthy(self, roles: list[str]) -> None:
        until_s = time.monotonic() + START_S
        while not all(self._is_up(role) for role in roles):
            for role in roles:
                if (code := self._running[role].poll()) is not None:
                    raise SystemExit(f"{role} ended with {code}: {self._log_folder}")
            if time.monotonic() > until_s:
                raise SystemExit(f"not healthy after {START_S:g} s: {self._log_folder}")
            time.sleep(0.2)

    def _end(self, role: str) -> None:
        child = self._running.pop(role, None)
        if child is None:
            return
        family = _family(child.pid)
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        child.wait(10)

    def _family(self, role: str) -> list[psutil.Process]:
        return _family(self._running[role].pid)

    def _port(self, role: str) -> int:
        return self._processes[role].port

    def _text(self, role: str, path: str) -> str:
        with contextlib.closing(http.client.HTTPConnection(HOST, self._port(role), timeout=5)) as connection:
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def _get(self, role: str, path: str) -> dict[str, str]:
        answer: dict[str, str] = json.loads(self._text(role, path))
        return answer

    def _engine(self, role: str, vllm: str, model: str, environment: dict[str, str]) -> Process:
        port, core = free_port(), str(ROLES.index(role) % (os.cpu_count() or 1))
        extra = {"kv_lease_duration": LEASE_S}
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        transfer |= {"kv_connector_extra_config": extra}  # type: ignore[dict-item]
        settings = {"VLLM_CPU_OMP_THREADS_BIND": core, "VLLM_CPU_KVCACHE_SPACE": "1"}
        settings |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_channel[role]), "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST}
        # Other interfaces may come and go, and UCX keeps those that it has found when it started.
        settings |= {"UCX_NET_DEVICES": "lo"}
        command = [vllm, "serve", model, "--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port)]
        command += ["--dtype", "bfloat16", "--kv-transfer-config", json.dumps(transfer), "--no-enable-prefix-caching"]
        command += ["--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", str(MAX_TOKENS)]
        command += ["--max-num-batched-tokens", "256", "--max-num-seqs", "16", "--enforce-eager"]
        return Process(name=role, command=tuple(command), port=port, environment=settings | environment)

    def _router(self, router: str) -> Process:
        port = free_port()
        prefill, decode = (f"http://{HOST}:{self._port(role)}" for role in ROLES)
        command = [router, "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--host", HOST]
        command += ["--port", str(port), "--kv-connector", "nixl", "--policy", "round_robin", "--log-level", "warning"]
        command += ["--prometheus-port", str(free_port())]
        return Process(name="proxy", command=tuple(command), port=port)


def _body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    options = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, **options}


@contextlib.contextmanager
def _request(port: int, body: dict[str, Any], timeout_s: float) -> Iterator[http.client.HTTPResponse]:
    """A request whose socket waits `timeout_s` at most."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=timeout_s)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        yield connection.getresponse()


def _events(answer: http.client.HTTPResponse, until_s: float, asked: Asked) -> Iterator[dict[str, Any]]:
    """A stream's events; raises TimeoutError when it goes on beyond `until_s`."""
    for line in answer:
        if time.monotonic() > until_s:
            raise TimeoutError
        if line.startswith(b"data: [DONE]"):
            asked.done = True
        elif line.startswith(b"data: "):
            yield json.loads(line[6:])


def _take(asked: Asked, part: dict[str, Any]) -> None:
    if "error" in part:
        asked.error = json.dumps(part["error"])
        return
    for choice in part.get("choices", ()):
        asked.token_ids += choice.get("token_ids") or []
        asked.finish_reason = choice.get("finish_reason") or asked.finish_reason


def _family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal(family: list[psutil.Process], number: signal.Signals) -> None:
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
