"""The CPU library as a backend: packed weights and KV, one call per step, results that depend on nothing but the row."""

import logging
import time

import numpy as np
from numpy.typing import NDArray

from pdmesh.connector.pool import KVPool
from pdmesh.engine.backend import Backend, BackendLostError, ModelInfo, ProgressCallback, StepBatch
from pdmesh.engine.compute_threads import Place
from pdmesh.engine.host_memory import available_bytes, usable_cores
from pdmesh.engine.step_logits import StepLogits
from pdmesh.errors import ConfigError
from pdmesh.models.checkpoint import open_checkpoint
from pdmesh.models.checkpoint_quantization import already_quantised, no_four_bits
from pdmesh.models.content_digest import FileStates
from pdmesh.models.cpu_program import CpuProgram
from pdmesh.models.cpu_weights import CpuWeights, load_cpu_weights
from pdmesh.models.fingerprint import Fingerprints, fingerprints, with_int8_activations, with_kv_cache
from pdmesh.models.kv_cache_dtype import KVCacheDtype
from pdmesh.models.kv_layout import CPU_PACKING, KVLayout, plan_layouts
from pdmesh.models.model_config import ModelConfig
from pdmesh.models.weight_formats import ComputeDType, Quantization
from pdmesh_kernels.cpu.library import Library, LibraryError, Pool, choose_isa, load
from pdmesh_kernels.cpu.limits import MAX_HEAD_DIM, TOKEN_TILE
from pdmesh_kernels.cpu.packing import aligned_bytes
from pdmesh_kernels.cpu.weight_file import WeightsChangedError

log = logging.getLogger(__name__)

DTYPES: dict[str, ComputeDType] = {"auto": "bfloat16", "bfloat16": "bfloat16", "float32": "float32"}
WAITING_STAGE = "waiting for the engine that packs the weights"
# Beside a step's own: raw log-probabilities, ids and logits of what may be drawn.
BYTES_PER_LOGIT = 4 + 4 + 8 + 4


class CpuBackend(Backend):
    name = "cpu"
    row_invariant = True
    default_block_size = TOKEN_TILE

    def __init__(
        self,
        cpu_threads: int,
        isa: str = "auto",
        quantization: str = "none",
        kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO,
        *,
        cores: tuple[int, ...] = (),
        niceness: int = 0,
    ) -> None:
        """`cores`: one for each thread, or none. Raises ConfigError where there is no library, or not this instruction set."""
        try:
            self._library: Library = load()
            self._isa = choose_isa(self._library, isa)
            self.instruction_set = self._isa.name.lower()
            self._pool = Pool(self._library, cpu_threads or usable_cores(), cores or None, niceness)
        except LibraryError as exc:
            raise ConfigError(f"backend: the CPU library cannot be used: {exc}") from exc
        # It is the pool's thread 0.
        self.step_thread = Place(cores=cores[:1], niceness=niceness)
        self._quantization = Quantization(quantization)
        self._kv_cache_dtype = kv_cache_dtype
        self._config: ModelConfig | None = None
        self._weights: CpuWeights | None = None
        self._layouts: tuple[KVLayout, ...] = ()
        self._program: CpuProgram | None = None
        self._blocks: NDArray[np.uint8] | None = None

    def load(self, model: str, dtype: str, block_size: int | None, progress: ProgressCallback) -> ModelInfo:
        if dtype not in DTYPES:
            raise ConfigError(
                f"dtype: {dtype!r} is not for the CPU library; use bfloat16 or float32, or --backend torch"
            )
        if DTYPES[dtype] == "float32" and self._kv_cache_dtype is not KVCacheDtype.AUTO:
            raise ConfigError(f"kv-cache-dtype: {self._kv_cache_dtype.value} needs --dtype bfloat16, not float32")
        size = block_size or self.default_block_size
        if size % TOKEN_TILE:
            raise ConfigError(
                f"block-size {size}: the CPU library needs a multiple of {TOKEN_TILE}; or use --backend torch"
            )
        started, dtype_name = time.monotonic(), DTYPES[dtype]
        with open_checkpoint(model) as checkpoint:
            config = checkpoint.config
            if config.head_dim % 2 or config.head_dim > MAX_HEAD_DIM:
                raise ConfigError(
                    f"{model}: head_dim {config.head_dim} is not an even number up to {MAX_HEAD_DIM}; use --backend torch"
                )
            of_weights = self._quantization.of_weights
            if of_weights is not Quantization.NONE and checkpoint.reader.is_quantised:
                raise already_quantised(model, of_weights.value)
            quantization = "" if of_weights is Quantization.NONE else of_weights.value
            states = FileStates(checkpoint.reader.stored_regions())
            names = fingerprints(config, checkpoint.reader.stored_regions(), dtype_name, quantization)
            self._weights = load_cpu_weights(
                self._library,
                config,
                checkpoint.reader,
                dtype_name,
                self._quantization,
                names.model,
                self._pool.num_threads,
                progress.of_weights(),
                states.check,
                # Or the server would take a core that waits for another's for one that hangs.
                lambda: progress(WAITING_STAGE, 0.0),
            )
        self._config = config
        if self._quantization is Quantization.INT8_ACTIVATIONS:
            if not any(weight.format.has_four_bits for weight in self._weights.weights.values()):
                raise no_four_bits(model)
            # What is packed is the same, what is computed is not.
            names = Fingerprints(model=with_int8_activations(names.model), weights=with_int8_activations(names.weights))
            quantization = self._quantization.value
        self._layouts = plan_layouts(config, self._kv_cache_dtype.item_dtype(dtype_name), size, CPU_PACKING)
        log.info(
            "loaded %s: %s, %s, %d KV groups in %s, %s, %d threads, %.2f s",
            model,
            config.architecture,
            f"{dtype_name} {quantization}".rstrip(),
            len(self._layouts),
            self._layouts[0].dtype,
            self.instruction_set,
            self._pool.num_threads,
            time.monotonic() - started,
        )
        for reason, count in self._weights.expanded.items():
            log.warning(
                "%d of %d weight matrices are quantised in %s and kept in bfloat16 (%s): as slow as a checkpoint in 16 bits, and "
                "as large in memory; see docs/quantization.md",
                count,
                len(self._weights.weights),
                model,
                reason,
            )
        return ModelInfo(
            fingerprint=with_kv_cache(names.model, self._kv_cache_dtype),
            weights_fingerprint=names.weights,
            groups=tuple(layout.spec() for layout in self._layouts),
            max_model_len=config.max_positions,
            vocab_size=config.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            dtype=dtype_name,
            expanded_weights=self._weights.expanded,
        )

    def available_kv_bytes(self, fraction: float) -> int:
        return available_bytes(fraction=fraction)

    def profile(self, max_num_tokens: int, max_num_seqs: int) -> int:
        assert self._config is not None, "profile before load"
        # The library says it exactly, once it has a program; one over a single block is made for that.
        block = aligned_bytes(self._layouts[0].block_bytes).reshape(1, -1)
        program = self._make_program(block)
        try:
            logits_bytes = max_num_seqs * self._config.vocab_size * BYTES_PER_LOGIT
            return program.num_bytes(max_num_tokens, max_num_seqs) + logits_bytes
        finally:
            program.close()

    def bind(self, pool: KVPool) -> None:
        assert self._layouts, "bind before load"
        assert pool.shape.block_bytes == self._layouts[0].block_bytes, "pool of another layout"
        self._blocks = pool.blocks
        self._program = self._make_program(pool.blocks)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        assert self._blocks is not None, "copy before bind"
        if pairs:
            # All sources are read before the first target is written.
            sources, targets = np.array(pairs).T
            self._blocks[targets] = self._blocks[sources]

    def forward(self, batch: StepBatch) -> StepLogits:
        assert self._program is not None, "forward before bind"
        assert self._weights is not None
        logits_RV, best_ids = self._program.run(self._pool, batch)
        # Before anybody sees what was computed with other weights than the model's.
        try:
            self._weights.file.check()
        except WeightsChangedError as exc:
            raise BackendLostError(str(exc)) from exc
        return StepLogits(logits_RV, best_ids.astype(np.int64))

    def close(self) -> None:
        if self._program is not None:
            self._program.close()
        self._program = None
        self._pool.close()
        if self._weights is not None:
            self._weights.file.close()

    def _make_program(self, blocks: NDArray[np.uint8]) -> CpuProgram:
        assert self._config is not None
        assert self._weights is not None
        has_int8_rows = self._quantization is Quantization.INT8_ACTIVATIONS
        return CpuProgram(
            self._library,
            self._isa,
            self._config,
            self._weights,
            self._layouts,
            blocks,
            has_int8_rows=has_int8_rows,
        )
