"""Plain PyTorch on CPU: the backend that every other one must agree with."""

import logging
from collections.abc import Callable

import torch

from pdmesh.connector.pool import KVPool
from pdmesh.engine.backend import Backend, ModelInfo, ProgressCallback, StepBatch
from pdmesh.engine.host_memory import available_bytes, usable_cores
from pdmesh.errors import ConfigError
from pdmesh.models.kv_layout import KVLayout
from pdmesh.models.llama import LlamaModel
from pdmesh.models.loading import load_model
from pdmesh.models.step import make_step

log = logging.getLogger(__name__)

# Below float32 the results of torch's CPU kernels depend on the batch, so "auto" does not go there.
DTYPES = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# What `kv_cache_memory_bytes` promises when it is 0: a mesh of several processes shares one machine.
MAX_DEFAULT_KV_BYTES = 2 << 30


class TorchBackend(Backend):
    name = "torch"
    row_invariant = False
    default_block_size = 32

    def __init__(self, cpu_threads: int) -> None:
        torch.set_num_threads(cpu_threads or usable_cores())
        self._model: LlamaModel | None = None
        self._layout: KVLayout | None = None
        self._kv_BLJKSD: torch.Tensor | None = None

    def load(self, model: str, dtype: str, block_size: int | None, progress: ProgressCallback) -> ModelInfo:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        loaded = load_model(model, DTYPES[dtype], _reporter(progress))
        config = loaded.model.config
        layout = KVLayout(
            # Layers with a window keep all their blocks too, and so share a group with those that have none.
            kind="full",
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=str(DTYPES[dtype]).removeprefix("torch."),
            block_size=block_size or self.default_block_size,
        )
        self._model, self._layout = loaded.model, layout
        log.info(
            "loaded %s: %s, %s, %d threads, %.2f s",
            model,
            config.architecture,
            layout.dtype,
            torch.get_num_threads(),
            loaded.duration_s,
        )
        return ModelInfo(
            fingerprint=loaded.fingerprint,
            groups=(layout.group(),),
            max_model_len=config.max_positions,
            vocab_size=config.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            dtype=layout.dtype,
        )

    def available_kv_bytes(self, fraction: float) -> int:
        return min(int(available_bytes() * fraction), MAX_DEFAULT_KV_BYTES)

    def bind(self, pool: KVPool) -> None:
        assert self._layout is not None, "bind before load"
        assert pool.shape.block_bytes == self._layout.block_bytes, "pool of another layout"
        flat = torch.from_numpy(pool.blocks.reshape(-1))
        shape = (pool.shape.num_blocks, *self._layout.block_shape)
        self._kv_BLJKSD = flat.view(DTYPES[self._layout.dtype]).view(shape)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        model, layout, kv_BLJKSD = self._model, self._layout, self._kv_BLJKSD
        assert model is not None
        assert layout is not None
        assert kv_BLJKSD is not None, "forward before bind"
        step = make_step(batch, 0, layout.block_size, set(model.config.windows), model.dtype)
        # Attention reads a sequence's last block whole, under a mask, and 0 x NaN is NaN: no request's numbers may
        # outlive it where the next one's tokens are not yet.
        kv_BLJKSD.index_fill_(0, step.new_blocks, 0)
        return model.forward(step, kv_BLJKSD)

    def close(self) -> None:
        self._kv_BLJKSD = self._model = None


def _reporter(progress: ProgressCallback) -> Callable[[float], None]:
    """Pass on every whole percent, once."""
    reported = -1

    def report(fraction: float) -> None:
        nonlocal reported
        percent = int(fraction * 100)
        if percent > reported:
            reported = percent
            progress("weights", percent / 100)

    return report
