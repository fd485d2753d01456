"""Settings that cannot be meant together, or at all, end in one line that names the setting, the value and the range."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdmesh.config import EngineConfig, HttpConfig, load_config, unknown_variables
from pdmesh.config.vllm_flags import FOREIGN_FLAGS, explain_foreign
from pdmesh.connector.registry import check_installed
from pdmesh.engine.json_setting import parse_object
from pdmesh.errors import ConfigError
from pdmesh.supervisor.config import UpConfig
from pdmesh.supervisor.preflight import check_shared


def refused(*argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(EngineConfig, list(argv), prog="pdmesh decode", environ=environ or {})
    assert "\n" not in caught.value.message
    return caught.value.message.removeprefix("pdmesh decode: ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--max-num-batched-tokens 8 --max-num-seqs 9", ["max-num-batched-tokens 8", "max-num-seqs 9", "9…1048576"]),
        ("--max-num-active-seqs 9 --max-num-seqs 8", ["max-num-active-seqs 9", "max-num-seqs 8", "1…8"]),
        ("--max-num-partial-prefills 9 --max-num-seqs 8", ["max-num-partial-prefills 9", "1…8"]),
        ("--long-prefill-token-threshold 65 --max-model-len 64", ["long-prefill-token-threshold 65", "1…64"]),
        ("--long-prefill-token-threshold-adaptive", ["long-prefill-token-threshold-adaptive", "above 0"]),
        ("--priority-aging-s 3", ["priority-aging-s 3", "scheduling-policy priority", "fcfs"]),
        ("--no-enable-chunked-prefill", ["no-enable-chunked-prefill", "long-prefill-token-threshold"]),
        ("--block-size 24", ["block-size 24", "does not divide 1024", "1…1024"]),
        ("--block-size 2048", ["block-size", "1024", "2048"]),
        ("--logits-processors nonsense", ["logits-processors", "'nonsense'", "module:Class"]),
        ("--no-enable-prefix-caching --prefix-caching-hash-algo xxhash", ["xxhash", "no-enable-prefix-caching"]),
        ("--no-enable-prefix-caching --prefix-caching-hash-seed 7", ["'7'", "no-enable-prefix-caching"]),
        ("--reasoning-start-str <think>", ["reasoning-end-str is empty"]),
        ("--reasoning-end-str </think>", ["reasoning-start-str is empty"]),
        (
            "--reasoning-start-str <think> --reasoning-end-str <think>",
            ["reasoning-start-str", "both '<think>'", "differ"],
        ),
        ("--enable-prefix-caching=false", ["--no-enable-prefix-caching", "take no value; got 'false'"]),
        ("--max-num-queued-reqs 0", ["max-num-queued-reqs", "greater than or equal to 1", "'0'"]),
        ("--max-num-batched-tokens -1", ["max-num-batched-tokens", "greater than or equal to 0", "'-1'"]),
        ("--stream-interval 0", ["stream-interval", "greater than or equal to 1"]),
        ("--gpu-memory-utilization 0", ["gpu-memory-utilization", "greater than 0"]),
        ("--watermark 1", ["watermark", "less than 1"]),
        ("--scheduling-policy lottery", ["scheduling-policy", "'fcfs' or 'priority'", "'lottery'"]),
        ("--prefix-caching-hash-algo md5", ["prefix-caching-hash-algo", "'sha256'", "'md5'"]),
        ("--performance-mode fast", ["performance-mode", "'balanced'", "'fast'"]),
        ("--cpu-cores 0-3 --cpu-threads 5", ["cpu-threads 5", "cpu-cores 0-3", "1…4"]),
        ("--cpu-cores 0,3-1", ["cpu-cores 0,3-1", "'3-1'", "0…1023", "0-3,8"]),
        ("--cpu-cores 0,,1", ["cpu-cores 0,,1", "''"]),
        ("--cpu-cores all", ["cpu-cores all", "'all'"]),
        ("--cpu-cores 1024", ["cpu-cores 1024", "0…1023"]),
        ("--cpu-cores 0-4,2", ["cpu-cores 0-4,2", "core 2", "twice"]),
        ("--connector grpc,shm,grpc", ["connector", "grpc is named twice"]),
        ("--cpu-nice 20", ["cpu-nice", "less than or equal to 19", "'20'"]),
        ("--cpu-nice -1", ["cpu-nice", "greater than or equal to 0"]),
        ("--backend torch --cpu-isa avx2", ["cpu-isa avx2", "backend cpu", "torch"]),
        ("--backend torch --quantization int8", ["quantization int8", "backend cpu", "torch"]),
        ("--quantization int8_weight_only --dtype float32", ["quantization int8_weight_only", "bfloat16", "float32"]),
        ("--kv-cache-dtype int8_per_token_head --dtype float16", ["kv-cache-dtype", "bfloat16", "float16"]),
        ("--backend cpu --dtype float16", ["backend cpu", "float16", "bfloat16 or float32"]),
        ("--backend cpu --block-size 16", ["backend cpu", "block-size", "multiple of 32", "16"]),
        ("--quantization int8_activations --dtype float32", ["quantization int8_activations", "bfloat16", "float32"]),
        ("--quantization int8 --block-size 16", ["quantization int8", "multiple of 32", "16"]),
        ("--kv-cache-dtype int8_per_token_head --block-size 8", ["int8_per_token_head", "multiple of 32", "8"]),
        ("--cpu-isa avx2 --dtype float16", ["cpu-isa avx2", "float16"]),
        ("--max-num-partial-prefills 10000000000000000000000", ["max-num-partial-prefills", "65536"]),
        ("--max-model-len 8.5x", ["max-model-len", "'8.5x'"]),
    ],
)
def test_one_line_names_setting_value_and_range(argv: str, words: list[str]) -> None:
    message = refused(*argv.split())
    assert not [word for word in words if word not in message], message


def test_every_number_has_a_range() -> None:
    """Ten to the 22nd was a number of prompts that nobody minded before the start."""
    unbounded = [
        name
        for name, field in EngineConfig.model_fields.items()
        if field.annotation in (int, float) and not {"Le", "Lt"} & {type(bound).__name__ for bound in field.metadata}
    ]
    assert unbounded == ["notify_fd"]


def test_sound_settings_are_taken_together() -> None:
    argv = (
        "--max-num-seqs 8 --max-num-batched-tokens 8 --max-num-active-seqs 8 --max-num-partial-prefills 8 --block-size 1 "
        "--long-prefill-token-threshold 64 --max-model-len 64 --long-prefill-token-threshold-adaptive --enable-chunked-prefill "
        "--scheduling-policy priority --priority-aging-s 3 --logits-processors some.module:Class,_x:Y "
        "--reasoning-start-str <think> --reasoning-end-str </think>"
    )
    config = load_config(EngineConfig, argv.split(), prog="pdmesh", environ={})
    assert (config.max_num_active_seqs, config.logits_processors) == (8, ["some.module:Class", "_x:Y"])


def test_defaults_contradict_nothing() -> None:
    """A small budget was refused although nobody had said how many sequences."""
    assert EngineConfig(max_num_batched_tokens=16, max_num_partial_prefills=4).max_num_seqs == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("8k", 8000), ("8K", 8192), ("2G", 2 << 30), ("1.5k", 1500), ("auto", 0), ("0", 0)],
)
def test_sizes_may_have_units_as_in_vllm(text: str, value: int) -> None:
    assert (
        load_config(EngineConfig, ["--kv-cache-memory-bytes", text], prog="x", environ={}).kv_cache_memory_bytes
        == value
    )
    environ = {"PDMESH_MAX_MODEL_LEN": text}
    assert load_config(EngineConfig, [], prog="x", environ=environ).max_model_len == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--swap-space", "4"],
            "swap-space is a flag of vLLM's that is not here: belongs to vLLM before V1: a preempted",
        ),
        (["--swap_space=4"], "swap-space is a flag of vLLM's"),
        (["--no-enforce-eager"], "no-enforce-eager is a flag of vLLM's"),
        (["--data-parallel-rank", "1"], "data-parallel-rank is a flag of vLLM's that is not here: an engine has one"),
        (["--no-kv-cache-metrics"], "no-kv-cache-metrics is a flag of vLLM's that is not here: what is measured"),
        (["--max-long-partial-prefills", "1"], "see max-num-partial-prefills"),
        (["--logits-processor-pattern", "x"], "see logits-processors"),
        (["--attention-backend", "x"], "see backend"),
        (["--disable-log-stats"], "statistics are a line every ten seconds"),
        (["--tensor-parallel-size", "2"], "one device"),
        (["--max-num-seqs", "4", "--speculative-config", "{}"], "speculative decoding is not supported yet"),
    ],
)
def test_flags_of_vllm_that_are_not_here_are_explained(argv: list[str], words: str) -> None:
    assert words in refused(*argv)


def test_variables_and_keys_of_vllms_are_explained_like_its_flags(tmp_path: Path) -> None:
    [line] = unknown_variables(EngineConfig, ["PDMESH_SWAP_SPACE", "PDMESH_MAX_NUM_SEQS"])
    assert line.startswith("environment variable PDMESH_SWAP_SPACE means nothing here: swap-space is a flag of vLLM's")
    file = tmp_path / "engine.toml"
    file.write_text("swap_space = 4\n")
    assert "swap-space is a flag of vLLM's that is not here" in refused("--config", str(file))


@pytest.mark.parametrize("text", ["max_num_seqs = true", "watermark = false", "kv_cache_memory_bytes = true"])
def test_a_boolean_is_no_number(text: str, tmp_path: Path) -> None:
    """`max_num_seqs = true` was an engine with one row."""
    file = tmp_path / "engine.toml"
    file.write_text(f"{text}\n")
    message = refused("--config", str(file))
    assert message == f"{text.split()[0].replace('_', '-')}: must be a number, got {text.split()[-1]}"


@pytest.mark.parametrize("flag", ["--drain-timeout-s", "--drain-timeout", "--shutdown-timeout"])
def test_the_drain_timeout_has_vllms_name_too(flag: str) -> None:
    config = load_config(EngineConfig, [flag, "7.5"], prog="pdmesh decode", environ={"PDMESH_DRAIN_TIMEOUT_S": "9"})
    assert config.drain_timeout_s == 7.5
    assert refused(flag, "-1").startswith("drain-timeout-s: ")


def test_no_explained_flag_is_one_that_exists() -> None:
    assert not {name.replace("-", "_") for name in FOREIGN_FLAGS} & set(EngineConfig.model_fields)
    for name in EngineConfig.model_fields:
        assert explain_foreign([f"--{name}"], []) == "", "the beginning of a setting of ours is taken for vLLM's"
    assert explain_foreign(["--seed", "1"], ["seed"]) == ""


def test_a_thinking_section_needs_both_ends_on_the_proxy_too() -> None:
    with pytest.raises(ValueError, match="reasoning-end-str is empty"):
        HttpConfig(reasoning_start_str="<think>")


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_check_config_says_it_without_a_model(service: str) -> None:
    argv: list[Any] = [sys.executable, "-m", f"pdmesh_{service}", "--check-config"]
    argv += ["--max-num-seqs", "9", "--max-num-batched-tokens", "8"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"pdmesh {service}: max-num-batched-tokens 8 is less than max-num-seqs 9")
    assert len(ended.stderr.splitlines()) == 1


def test_up_says_how_engines_get_a_connector_that_is_not_for_kvcache() -> None:
    with pytest.raises(ConfigError, match=r"connector: .*file is for engines alone.*--prefill-args and --decode-args"):
        load_config(UpConfig, ["--connector", "nixl,file"], prog="pdmesh up", environ={})


def test_up_takes_sizes_as_engines_do() -> None:
    config = load_config(UpConfig, ["--kv-cache-memory-bytes", "300M"], prog="pdmesh up", environ={})
    assert config.kv_cache_memory_bytes == 300 << 20


def test_connector_whose_package_is_not_installed_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--check-config` was content with it, and `pdmesh up` found out when all services had been started."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="mooncake"):
        check_installed(["shm", "mooncake"])
    with pytest.raises(ConfigError, match="mooncake"):
        check_shared(UpConfig(connector=["mooncake", "grpc"]))
    check_installed(["shm", "grpc", "file"])


def test_json_that_has_lost_its_quotes_is_told_where_they_went() -> None:
    with pytest.raises(ConfigError, match=r"not JSON: .*takes its quotes away unless the whole is in single quotes"):
        parse_object("kv-transfer-config", "{kv_connector:NixlConnector}")
    with pytest.raises(ConfigError) as caught:
        parse_object("kv-transfer-config", '{"kv_connector": NixlConnector}')
    assert "quotes away" not in caught.value.message
