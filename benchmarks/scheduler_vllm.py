"""vLLM's side of `benchmarks/scheduler.py`: its scheduler alone, without a model, on the same requests.

Run by that script with the interpreter of a vLLM installation; imports nothing of pdmesh.
"""

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
logging.disable(logging.WARNING)

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float16",
}


class VllmSide:
    """A scheduler with `num_running` requests, stepped by hand."""

    def __init__(
        self,
        num_running: int,
        *,
        is_async: bool,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        budget_tokens: int,
    ) -> None:
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        folder = Path(tempfile.mkdtemp(prefix="scheduler-benchmark-"))
        (folder / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=str(folder), skip_tokenizer_init=True, max_model_len=max_model_len, dtype="float16", seed=0
        )
        scheduling = SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=budget_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            async_scheduling=is_async,
        )
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
        cache.num_gpu_blocks = num_blocks
        config = VllmConfig(
            model_config=model, scheduler_config=scheduling, cache_config=cache, device_config=DeviceConfig("cpu")
        )
        hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(block_size, hash_fn)
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=16, dtype=torch.float16)
        kv = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.scheduler: Any = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=False,
        )

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        sampling.update_from_generation_config({}, None)
        self.scheduler.add_request(Request(request_id, prompt, sampling, None, block_hasher=self._hasher))

    def schedule(self) -> Any:
        return self.scheduler.schedule()

    def update(self, schedule: Any, result: Any) -> Any:
        return self.scheduler.update_from_output(schedule, result)

    def result_of(self, schedule: Any) -> Any:
        """Make the model's answer to a schedule: one token for each row whose prompt ends."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(schedule.num_scheduled_tokens)
        requests = self.scheduler.requests
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[] if requests[request_id].is_prefill_chunk else [7] for request_id in ids],
        )

    def num_rows(self, schedule: Any) -> int:
        return len(schedule.num_scheduled_tokens)
