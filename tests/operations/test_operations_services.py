"""Each service as a user meets it when something is wrong: one line that names the thing and the remedy, and a fast end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdmesh.config import EngineConfig, load_config, unknown_variables
from pdmesh.errors import ConfigError, InternalError, MeshError
from pdmesh.lifecycle import _only_mesh_errors
from pdmesh.models.architectures import SUPPORTED
from pdmesh.models.registry import ARCHITECTURES
from pdmesh.models.source import DEMO_MODEL
from support.tiny_models import make_tiny

pytestmark = pytest.mark.timeout(90)

MODEL_SERVICES = ("proxy", "prefill", "decode")
MODULES = (*MODEL_SERVICES, "kvcache", "decode.serve")


def run(module: str, *flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    model = [] if module == "kvcache" or "--model" in flags else ["--model", DEMO_MODEL]
    return subprocess.run(
        [sys.executable, "-m", f"pdmesh_{module}", *model, *flags],
        env=os.environ | {"PDMESH_SECRET": "a-secret-for-the-tests"} | (env or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def the_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("module", MODULES)
def test_port_in_use_is_one_line_that_names_the_option(module: str) -> None:
    ports = ["--port"] if module == "proxy" else ["--port", "--grpc-port"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        for option in ports:
            free = [part for port in ports if port != option for part in (port, "0")]
            line = the_line(run(module, option, taken, *free))
            assert line.startswith(f"pdmesh {module.removeprefix('decode.')}: port {taken} on 127.0.0.1 is in use")
            assert line.endswith(f"choose another {option}")


@pytest.mark.parametrize("module", MODULES)
def test_check_config_is_quick_and_quiet(module: str) -> None:
    free = ["--port", "0"] if module == "proxy" else ["--port", "0", "--grpc-port", "0"]
    done = run(module, *free, "--check-config")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("module", MODEL_SERVICES)
def test_architecture_is_named_before_what_its_files_lack(module: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    free = ["--port", "0"] if module == "proxy" else ["--port", "0", "--grpc-port", "0"]
    assert "architecture MambaForCausalLM is not supported" in the_line(run(module, "--model", str(tmp_path), *free))


def test_architectures_without_torch_are_those_with_code() -> None:
    assert set(ARCHITECTURES) == SUPPORTED


def test_unreachable_valkey_is_one_line_with_the_remedies() -> None:
    line = the_line(run("kvcache", "--port", "0", "--grpc-port", "0", "--valkey", "redis://:hidden@127.0.0.1:1/0"))
    assert line.startswith("pdmesh kvcache: valkey: redis://***@127.0.0.1:1/0 cannot be used")
    assert "--no-valkey-required" in line


@pytest.mark.parametrize("module", ["proxy", "decode"])
def test_sigterm_while_starting_ends_a_service_promptly(module: str, tmp_path: Path) -> None:
    """Its tokenizer takes seconds to build, in a thread that nothing can interrupt."""
    slow = tmp_path / "slow"
    make_tiny("llama", slow)
    program = (
        "import sys, time, pdmesh.openai.text.load as load\n"
        f"import pdmesh_{module}.{'service' if module == 'proxy' else 'main'} as service\n"
        "def slow(model):\n    print('loading', flush=True)\n    time.sleep(30)\n"
        "load.load_text_model = slow\n"
        "for module in list(sys.modules.values()):\n"
        "    if getattr(module, '__name__', '').startswith('pdmesh') and hasattr(module, 'load_text_model'):\n"
        "        module.load_text_model = slow\n"
        "sys.exit(service.main(sys.argv[1:]))\n"
    )
    free = ["--port", "0"] if module == "proxy" else ["--port", "0", "--grpc-port", "0"]
    with subprocess.Popen(
        [sys.executable, "-c", program, "--model", str(slow), *free],
        env=os.environ | {"PDMESH_SECRET": "a-secret-for-the-tests"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=25)
        assert process.returncode == 0, errors
        assert time.monotonic() - began < 3


def test_a_group_of_our_own_errors_is_told_as_one() -> None:
    def of(*errors: Exception) -> MeshError | None:
        return _only_mesh_errors(ExceptionGroup("", list(errors)))

    config, internal = ConfigError("a port"), InternalError("else")
    assert of(internal, ExceptionGroup("", [config])) is config
    assert of(internal) is internal
    assert of(config, ValueError("a defect of ours")) is None


def test_help_lists_allowed_values_and_the_other_ways_to_set_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(EngineConfig, ["--help"], prog="pdmesh decode")
    text = capsys.readouterr().out
    assert "--dtype auto|float32|bfloat16|float16" in text
    assert "--connector shm|nixl|grpc|mooncake|ucxx|file,..." in text
    assert text.count("environment variable") == 1


def test_misspelt_variables_are_named_and_others_left_alone() -> None:
    environ = {"PDMESH_MAX_MODEL_LENGTH": "1", "PDMESH_PREFILL_ARGS": "", "PDMESH_GRPC_PORT": "1", "PATH": ""}
    (line,) = unknown_variables(EngineConfig, environ)
    assert line == "environment variable PDMESH_MAX_MODEL_LENGTH means nothing here; is it PDMESH_MAX_MODEL_LEN?"


def test_clients_say_that_nobody_answers_even_without_input() -> None:
    for command in ("chat", "complete"):
        done = subprocess.run(
            [sys.executable, "-m", "pdmesh", command, "--url", "http://127.0.0.1:1/v1"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert done.returncode == 1
        assert "http://127.0.0.1:1/v1 cannot be reached" in done.stderr


def test_serve_calls_itself_serve_and_has_vllms_port() -> None:
    done = run("decode.serve", "--help")
    assert done.stdout.startswith("usage: pdmesh serve [options] [MODEL]")
    assert "HTTP port; 0: any free one. (default: 8000)" in done.stdout.replace("\n" + " " * 24, " ")
    assert the_line(run("decode.serve", "--no-such")).startswith("pdmesh serve: ")
