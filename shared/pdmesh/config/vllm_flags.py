"""Flags of vLLM that pdmesh does not have: each says why, or what to use instead, so that nobody looks for a misspelling."""

from collections.abc import Iterable

_NOT_YET = "is not supported yet"
_NO_GRAPHS = "no model is compiled or captured here yet"
_ONE_DEVICE = "an engine has one device here; start more engines (pdmesh up --prefill, --decode, or pdmesh scale)"
_NO_ADAPTERS = f"LoRA {_NOT_YET}"
_NO_DRAFTS = f"speculative decoding {_NOT_YET}"
_NO_PARSERS = f"tool and reasoning parsers are {_NOT_YET.removeprefix('is ')}"
_PLAIN_WEIGHTS = f"quantised weights are read from GGUF files only; another scheme {_NOT_YET}"
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
    "kv-cache-dtype": "KV has the model's dtype; see dtype",
    "calculate-kv-scales": "KV has the model's dtype",
    "kv-offloading-size": "KV leaves an engine for the kvcache service: see kvcache, and its arena-bytes",
    "kv-offloading-backend": "KV leaves an engine for the kvcache service: see kvcache",
    "kv-transfer-config": "every engine can send and fetch KV: see connector, kv-peers and kv-load-failure-policy",
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
    "quantization": _PLAIN_WEIGHTS,
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
}
"""Flag to the rest of the sentence; where pdmesh has a setting of that name the setting wins."""


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
        if name in FOREIGN_FLAGS and name not in ours:
            return f"{flag} is a flag of vLLM's that is not here: {FOREIGN_FLAGS[name]}"
    return ""
