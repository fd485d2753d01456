"""Plain PyTorch on CPU: the backend that every other one must agree with."""

import logging

import torch

from pdmesh.connector.pool import KVPool
from pdmesh.engine.backend import Backend, ModelInfo, ProgressCallback, StepBatch
from pdmesh.engine.compute_threads import Place
from pdmesh.engine.host_memory import available_bytes, usable_cores
from pdmesh.errors import ConfigError
from pdmesh.models.decoder import DecoderModel
from pdmesh.models.kv_layout import KVLayout, plan_layouts
from pdmesh.models.loading import load_model
from pdmesh.models.step import make_step
from pdmesh.models.step_memory import step_bytes

log = logging.getLogger(__name__)

# Below float32 the results of torch's CPU kernels depend on the batch, so "auto" does not go there.
DTYPES = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class TorchBackend(Backend):
    name = "torch"
    row_invariant = False
    default_block_size = 32

    def __init__(self, cpu_threads: int, *, cores: tuple[int, ...] = (), niceness: int = 0) -> None:
        torch.set_num_threads(cpu_threads or usable_cores())
        # All of the cores: the team that it starts for its steps inherits its place.
        self.step_thread = Place(cores=cores, niceness=niceness)
        self._model: DecoderModel | None = None
        self._layouts: tuple[KVLayout, ...] = ()
        self._kv_BLJKSD: torch.Tensor | None = None
        """All groups' blocks: they have one shape."""

    def load(self, model: str, dtype: str, block_size: int | None, progress: ProgressCallback) -> ModelInfo:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        loaded = load_model(model, DTYPES[dtype], progress.of_weights())
        config = loaded.model.config
        dtype_name = str(DTYPES[dtype]).removeprefix("torch.")
        self._model = loaded.model
        self._layouts = plan_layouts(config, dtype_name, block_size or self.default_block_size)
        log.info(
            "loaded %s: %s, %s, %d KV groups, %d threads, %.2f s",
            model,
            config.architecture,
            dtype_name,
            len(self._layouts),
            torch.get_num_threads(),
            loaded.duration_s,
        )
        return ModelInfo(
            fingerprint=loaded.fingerprints.model,
            weights_fingerprint=loaded.fingerprints.weights,
            groups=tuple(layout.spec() for layout in self._layouts),
            max_model_len=config.max_positions,
            vocab_size=config.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            dtype=dtype_name,
        )

    def available_kv_bytes(self, fraction: float) -> int:
        return available_bytes(fraction=fraction)

    def profile(self, max_num_tokens: int, max_num_seqs: int) -> int:
        assert self._model is not None, "profile before load"
        return step_bytes(self._model, self._layouts, max_num_tokens, max_num_seqs)

    def bind(self, pool: KVPool) -> None:
        assert self._layouts, "bind before load"
        layout = self._layouts[0]
        assert pool.shape.block_bytes == layout.block_bytes, "pool of another layout"
        flat = torch.from_numpy(pool.blocks.reshape(-1))
        self._kv_BLJKSD = flat.view(DTYPES[layout.dtype]).view(pool.shape.num_blocks, *layout.block_shape)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        assert self._kv_BLJKSD is not None, "copy before bind"
        if pairs:
            # All sources are read before the first target is written.
            sources, targets = torch.tensor(pairs).unbind(dim=1)
            self._kv_BLJKSD.index_copy_(0, targets, self._kv_BLJKSD.index_select(0, sources))

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        model, kv_BLJKSD = self._model, self._kv_BLJKSD
        assert model is not None
        assert kv_BLJKSD is not None, "forward before bind"
        step = make_step(batch, self._layouts, model.dtype)
        for group in step.groups:
            # Attention reads a sequence's last block whole, under a mask, and 0 x NaN is NaN: no request's numbers may
            # outlive it where the next one's tokens are not yet.
            kv_BLJKSD.index_fill_(0, group.stale_blocks, 0)
        return model.forward(step, self._layouts, kv_BLJKSD)

    def close(self) -> None:
        self._kv_BLJKSD = self._model = None
