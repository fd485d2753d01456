"""A decoder's weights as the CPU library reads them: packed once into the weights cache, then mapped from it."""

import hashlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdmesh.models.model_config import ModelConfig
from pdmesh.models.weight_formats import (
    ComputeDType,
    FormatChoice,
    Quantization,
    choose_format,
    pack_projection,
    why_expanded,
)
from pdmesh.models.weight_plan import Gain, Projection, WeightPlan, plan_weights
from pdmesh.models.weights import WeightReader, check_shapes
from pdmesh_kernels.cpu import packing
from pdmesh_kernels.cpu.abi import ABI_VERSION, Format
from pdmesh_kernels.cpu.library import Library
from pdmesh_kernels.cpu.packing import PackedWeight, packed_bytes
from pdmesh_kernels.cpu.weight_file import WeightFile, create_weight_file, open_weight_file
from pdmesh_kernels.cpu.weight_folder import weight_path
from pdmesh_kernels.cpu.weight_index import Entry, EntryMeta

FLOAT_BYTES = 4
MAX_PACKING_THREADS = 16
"""Each holds a projection in float32 beside its packed form, which for large models is GBs; memory is as fast as fewer are."""


@dataclass(frozen=True, slots=True)
class CpuWeights:
    """Views into `file`, which is kept open."""

    plan: WeightPlan
    file: WeightFile
    weights: dict[str, PackedWeight]
    """By the projection's name."""
    vectors: dict[str, NDArray[np.float32]]
    """Gains by checkpoint name; biases by the projection's name and `.bias`."""
    expanded: dict[str, int]
    """How many matrices are kept in bf16 that the checkpoint has in fewer bits, by reason."""


def load_cpu_weights(
    library: Library,
    config: ModelConfig,
    reader: WeightReader,
    dtype: ComputeDType,
    quantization: Quantization,
    fingerprint: str,
    num_threads: int,
    report: Callable[[float], None],
    check_source: Callable[[], None],
    on_wait: Callable[[], None] = lambda: None,
) -> CpuWeights:
    """Map the packed weights, made now by `num_threads` where the cache has none. `report` gets the fraction done; what was
    made counts when `check_source` does not raise then; `on_wait` is called from time to time while another process makes them.

    Torch is imported only to make them, and for AWQ and GPTQ, whose scales decide what they are kept as. Raises ConfigError.
    """
    plan = plan_weights(config)
    check_shapes(plan.shapes(), reader, config.architecture)
    tables = {plan.embedding.name, plan.head.name}
    choices = {
        each.name: choose_format(reader, each, dtype, quantization, is_table=each.name in tables)
        for each in plan.projections()
    }
    expanded = Counter(why_expanded(reader, each, choices[each.name]) for each in plan.projections())
    del expanded[""]
    formats = "-".join(sorted({choice.format.name.lower() for choice in choices.values()}))
    entries = _entries(library, plan, choices)
    key = (
        f"{fingerprint}-{formats}-{quantization.of_weights.value}-{ABI_VERSION}-{library.packing}-{_contents(entries)}"
    )
    path = weight_path(key)
    file = open_weight_file(path, key)
    if file is None:

        def fill(made: WeightFile) -> None:
            _fill(library, reader, plan, choices, config, made, num_threads, report)
            check_source()

        file = create_weight_file(path, key, entries, fill, on_wait)
    report(1.0)
    return CpuWeights(plan, file, *_views(file), dict(expanded))


def _contents(entries: list[Entry]) -> str:
    """Name what is in a file, and how it got there: another version of this code may choose, read or fuse otherwise."""
    digest = hashlib.sha256(repr(entries).encode())
    for source in (*sorted(Path(__file__).parent.glob("*.py")), Path(packing.__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _entries(library: Library, plan: WeightPlan, choices: dict[str, FormatChoice]) -> list[Entry]:
    entries = []
    for each in plan.projections():
        choice = choices[each.name]
        num_bytes = packed_bytes(library, choice.format, each.num_outputs, each.num_inputs, choice.group, each.is_gated)
        meta = EntryMeta(
            kind="weight",
            format=choice.format,
            num_outputs=each.num_outputs,
            num_inputs=each.num_inputs,
            group=choice.group,
            is_gated=each.is_gated,
        )
        entries.append(Entry(each.name, meta, num_bytes))
        if each.has_bias:
            entries.append(_vector(f"{each.name}.bias", each.num_outputs))
    return entries + [_vector(gain.name, gain.size) for gain in plan.gains()]


def _vector(name: str, size: int) -> Entry:
    return Entry(name, EntryMeta(kind="vector", format=Format.F32, num_outputs=size, num_inputs=1), size * FLOAT_BYTES)


def _fill(
    library: Library,
    reader: WeightReader,
    plan: WeightPlan,
    choices: dict[str, FormatChoice],
    config: ModelConfig,
    file: WeightFile,
    num_threads: int,
    report: Callable[[float], None],
) -> None:
    """Pack everything, one projection per thread and time, by `num_threads` or what memory is for."""
    import torch

    def pack(projection: Projection) -> int:
        target = file.array(projection.name)
        pack_projection(library, reader, projection, choices[projection.name], target)
        if projection.has_bias:
            _read_bias(reader, projection, file.array(f"{projection.name}.bias").view(np.float32))
        return target.nbytes

    for gain in plan.gains():
        _read_gain(reader, gain, config.unit_offset_norms, file.array(gain.name).view(np.float32))
    projections = list(plan.projections())
    total = sum(file.array(each.name).nbytes for each in projections)
    done = 0
    num_torch_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(min(num_threads, MAX_PACKING_THREADS), initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in as_completed([pool.submit(pack, each) for each in projections]):
            done += future.result()
            report(done / total)
    finally:
        pool.shutdown(cancel_futures=True)
        # What one thread sets, threads that start later begin with.
        torch.set_num_threads(num_torch_threads)


def _read_gain(reader: WeightReader, gain: Gain, has_offset: bool, target: NDArray[np.float32]) -> None:
    import torch

    values = torch.from_numpy(target)
    reader.read(f"{gain.name}.weight", values)
    if has_offset:
        values += 1


def _read_bias(reader: WeightReader, projection: Projection, target: NDArray[np.float32]) -> None:
    import torch

    parts = torch.split(torch.from_numpy(target), list(projection.parts.values()))
    for name, rows in zip(projection.parts, parts, strict=True):
        reader.read(f"{name}.bias", rows)


def _views(file: WeightFile) -> tuple[dict[str, PackedWeight], dict[str, NDArray[np.float32]]]:
    weights: dict[str, PackedWeight] = {}
    vectors: dict[str, NDArray[np.float32]] = {}
    for entry in file.entries:
        meta, memory = entry.meta, file.array(entry.name)
        if meta.kind == "vector":
            vectors[entry.name] = memory.view(np.float32)
        else:
            weights[entry.name] = PackedWeight(
                Format(meta.format), meta.num_outputs, meta.num_inputs, meta.group, meta.is_gated, memory
            )
    return weights, vectors
