"""Flags of vLLM that pdmesh does not have: each says why, or what to use instead, so that nobody looks for a misspelling."""

from collections.abc import Iterable

_NOT_YET = "is not supported yet"
_NO_GRAPHS = "no model is compiled or captured here yet"
_ONE_DEVICE = "an engine has one device here; start more engines (pdmesh up --prefill, --decode, or pdmesh scale)"
_NO_ADAPTERS = f"LoRA {_NOT_YET}"
_NO_DRAFTS = f"speculative decoding {_NOT_YET}"
_NO_PARSERS = f"tool and reasoning parsers are {_NOT_YET.removeprefix('is ')}"
_BACKENDS_OWN = "kernels are the backend's own choice; see backend"
_OLD_ENGINE = "belongs to vLLM before V1"

FOREIGN_FLAGS: dict[str, str] = {
    "swap-space": f"{_OLD_ENGINE}: a preempted request gives its blocks back and is computed again, nothing is swapped",
    "preemption-mode": f"{_OLD_ENGINE}: preemption always recomputes",
    "num-scheduler-steps": f"{_OLD_ENGINE}: see async-scheduling",
    "use-v2-block-manager": f"{_OLD_ENGINE}: there is one block manager",
    "num-lookahead-slots": f"{_OLD_ENGINE}: {_NO_DRAFTS}",
    "max-seq-len-to-capture": _NO_GRAPHS,
    "cuda-graph-sizes": _NO_GRAPHS,
    "enforce-eager": f"always so: {_NO_GRAPHS}",
    "compilation-config": _NO_GRAPHS,
    "optimization-level": _NO_GRAPHS,
    "num-gpu-blocks-override": "give the pool's size as kv-cache-memory-bytes",
    "calculate-kv-scales": "scales are computed with each token; see kv-cache-dtype",
    "kv-offloading-size": "KV leaves an engine for the kvcache service: see kvcache, and its arena-bytes",
    "kv-offloading-backend": "KV leaves an engine for the kvcache service: see kvcache",
    "cpu-offload-gb": f"weights on another device than the model's: that {_NOT_YET}",
    "disable-hybrid-kv-cache-manager": "sliding-window layers have a KV group of their own; that cannot be turned off",
    "disable-chunked-mm-input": "the served models read text only",
    "limit-mm-per-prompt": "the served models read text only",
    "mm-processor-kwargs": "the served models read text only",
    "max-num-scheduled-tokens": f"the same as max-num-batched-tokens while {_NO_DRAFTS}",
    "scheduler-cls": "the scheduler cannot be replaced",
    "scheduler-reserve-full-isl": "what decides whether a prompt is admitted is watermark",
    "prefill-schedule-interval": _ONE_DEVICE,
    "tensor-parallel-size": _ONE_DEVICE,
    "pipeline-parallel-size": _ONE_DEVICE,
    "data-parallel-size": _ONE_DEVICE,
    "decode-context-parallel-size": _ONE_DEVICE,
    "enable-expert-parallel": _ONE_DEVICE,
    "distributed-executor-backend": _ONE_DEVICE,
    "api-server-count": "an engine has one server process; the proxy is a process of its own",
    "enable-lora": _NO_ADAPTERS,
    "lora-modules": _NO_ADAPTERS,
    "max-loras": _NO_ADAPTERS,
    "max-lora-rank": _NO_ADAPTERS,
    "speculative-config": _NO_DRAFTS,
    "load-format": "follows from the model's files: safetensors or GGUF",
    "tokenizer": "the tokenizer is the model's own",
    "tokenizer-mode": "the tokenizer is the model's own",
    "chat-template": "the chat template is the model's own",
    "trust-remote-code": "no code of a checkpoint is ever run",
    "generation-config": f"defaults from a model's generation_config.json: that {_NOT_YET}; requests have the API's defaults",
    "override-generation-config": "requests have the API's defaults",
    "hf-overrides": "a model's configuration is read as it is",
    "runner": "models generate; pooling models are not served",
    "task": "models generate; pooling models are not served",
    "device": "see backend",
    "seed": "each request has its own: the API's field `seed`, or one that is drawn for it",
    "enable-auto-tool-choice": _NO_PARSERS,
    "tool-call-parser": _NO_PARSERS,
    "reasoning-parser": f"{_NO_PARSERS}; thinking_token_budget needs reasoning-start-str and reasoning-end-str only",
    "reasoning-config": "give reasoning-start-str and reasoning-end-str",
    "structured-outputs-config": f"structured output {_NOT_YET}",
    "guided-decoding-backend": f"structured output {_NOT_YET}",
    "disable-log-stats": "statistics are a line every ten seconds while steps run; see log-level",
    "disable-log-requests": "a request is one line at its end, never with its text; see log-level",
    "enable-log-requests": "a request is one line at its end, never with its text; see log-level",
    "uvicorn-log-level": "see log-level",
    "enable-server-load-tracking": "always on: GET /load",
    "enable-request-id-headers": "always on",
    "enable-prompt-tokens-details": "always on",
    "ssl-keyfile": "TLS ends at what stands before the proxy",
    "ssl-certfile": "TLS ends at what stands before the proxy",
    "max-parallel-loading-workers": "weights are mapped, not copied",
    "max-long-partial-prefills": f"{_OLD_ENGINE}: see max-num-partial-prefills and long-prefill-token-threshold",
    "logits-processor-pattern": f"{_OLD_ENGINE}: see logits-processors",
    "disable-cascade-attn": _BACKENDS_OWN,
    "disable-sliding-window": "sliding-window layers are computed as the model has them",
    "enable-sleep-mode": "an engine does not sleep; one that is not needed is stopped",
    "prefill-context-parallel-size": _ONE_DEVICE,
    "device-memory-utilization": "see gpu-memory-utilization",
    "logprobs-mode": "log-probabilities are the model's own, before any edit (raw_logprobs)",
    "shutdown-timeout": "see drain-timeout-s",
    "model-impl": "models are written here, not taken from transformers",
    "skip-tokenizer-init": "the tokenizer is the model's own",
    "return-sampling-mask": f"telling which tokens could be sampled {_NOT_YET}",
    "enable-prompt-embeds": f"prompts as embeddings: that {_NOT_YET}",
}
"""Flag to the rest of the sentence; where pdmesh has a setting of that name the setting wins."""

_FAMILIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "data-parallel",
            "all2all",
            "cp-",
            "dcp-",
            "dbo-",
            "enable-dbo",
            "ubatch",
            "dp-",
            "nnodes",
            "node-rank",
            "master-",
        ),
        _ONE_DEVICE,
    ),
    (
        ("eplb", "enable-eplb", "expert-", "enable-ep-", "elastic-ep", "enable-elastic", "numa-", "ray-", "device-ids"),
        _ONE_DEVICE,
    ),
    (
        ("mm-", "enable-mm", "interleave-mm", "media-", "allowed-media", "allowed-local-media", "video-"),
        "the served models read text only",
    ),
    (("mamba-", "enable-mamba", "gdn-", "kda-"), f"models with recurrent layers: serving them {_NOT_YET}"),
    (("lora-", "default-mm-loras", "fully-sharded-loras", "max-cpu-loras", "specialize-active-lora"), _NO_ADAPTERS),
    (("spec-", "per-request-spec"), _NO_DRAFTS),
    (("attention-", "moe-backend", "linear-backend", "kernel-", "sparse-indexer"), _BACKENDS_OWN),
    (("cudagraph-", "max-cudagraph", "jit-monitor"), _NO_GRAPHS),
    (("offload-", "cpu-offload"), f"weights on another device than the model's: that {_NOT_YET}"),
    (
        ("kv-cache-metrics", "otlp-", "collect-detailed", "profiler-", "show-hidden-metrics"),
        "what is measured is at GET /metrics",
    ),
    (
        ("revision", "code-revision", "tokenizer-revision", "hf-", "download-dir", "ignore-patterns"),
        "see model: a directory, or an id of the hub",
    ),
    (("pooler-",), "models generate; pooling models are not served"),
    (("sleep-",), "an engine does not sleep; one that is not needed is stopped"),
)
"""Beginnings of further flags, with the same kind of rest; the table above comes first."""


def explain_foreign(argv: Iterable[str], known: Iterable[str]) -> str:
    """One line for the first flag of `argv` that is vLLM's and not ours (`known`: names of fields); else "".

    `--no-x` and `--x=value` are told by `x`; underscores count as dashes.
    """
    ours = {name.replace("_", "-") for name in known}
    for given in argv:
        if not given.startswith("--"):
            continue
        flag = given.removeprefix("--").partition("=")[0].replace("_", "-")
        name = flag.removeprefix("no-")
        reason = "" if name in ours else _reason(name)
        if reason:
            return f"{flag} is a flag of vLLM's that is not here: {reason}"
    return ""


def _reason(name: str) -> str:
    if name in FOREIGN_FLAGS:
        return FOREIGN_FLAGS[name]
    return next((reason for beginnings, reason in _FAMILIES if name.startswith(beginnings)), "")
