"""Measures what a number format costs in accuracy: how far its next-token probabilities are from float32's over a fixed text.

    python benchmarks/accuracy.py --model SmolLM2-135M-bf16/ --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Every format predicts each token of `text.txt` from all tokens before it in its window, through the CPU backend. The reference is
the same weights in float32: of a GGUF, those that it holds. So a GGUF's rows show what computing in bf16 changes, not what
making the file has cost. Prints a table in Markdown and writes it to `results/DATE-accuracy.md`. Exit code 2: nothing to measure.
"""

import argparse
import datetime
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cpu_report import machine
from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.engine.backend import ProgressCallback, StepBatch
from pdmesh.engine.cpu_backend import CpuBackend
from pdmesh.errors import ConfigError
from pdmesh.models.kv_cache_dtype import KVCacheDtype
from pdmesh.openai.text.load import load_text_model
from pdmesh_kernels.cpu.library import choose_isa, load

FOLDER = Path(__file__).parent
# Tokens of a step, and rows compared at once: more only takes memory.
STEP_TOKENS, COMPARED_ROWS = 256, 16


@dataclass(frozen=True, kw_only=True)
class Format:
    """How the engine computes, as its flags say it."""

    name: str
    dtype: str = "bfloat16"
    quantization: str = "none"
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO

    def with_int8_kv(self) -> "Format":
        """Return the same with keys and values in 8 bits."""
        return Format(
            name=f"{self.name}, int8 KV",
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=KVCacheDtype.INT8_PER_TOKEN_HEAD,
        )


REFERENCE = Format(name="float32", dtype="float32")
OF_MODEL = (
    Format(name="bf16"),
    Format(name="int8 (W8A8)", quantization="int8"),
    Format(name="int8_weight_only (W8A16)", quantization="int8_weight_only"),
)
OF_GGUF = (
    Format(name="4-bit codes, bf16 products"),
    Format(name="4-bit codes, int8_activations (W4A8)", quantization="int8_activations"),
)


class Subject:
    """A model in one format, with room for one window of tokens."""

    def __init__(self, model: str, form: Format, num_threads: int, isa: str, window: int) -> None:
        self._backend = CpuBackend(num_threads, isa, quantization=form.quantization, kv_cache_dtype=form.kv_cache_dtype)
        info = self._backend.load(model, form.dtype, None, ProgressCallback())
        if window > info.max_model_len:
            raise ConfigError(f"--window {window}: {model} has a context of {info.max_model_len} tokens")
        width = -(-window // info.groups[0].block_size)
        shape = PoolShape(width * len(info.groups), info.groups[0].block_bytes)
        descriptor = create_pool_file("accuracy")
        size_pool_file(descriptor, shape)
        self._pool = KVPool(descriptor, shape, writable=True)
        self._backend.bind(self._pool)
        self._tables = [
            np.arange(group * width, (group + 1) * width, dtype=np.int32).reshape(1, -1)
            for group in range(len(info.groups))
        ]

    def logits(self, window: NDArray[np.int64], start: int, end: int) -> NDArray[np.float32]:
        """Compute tokens [start, end) of the window, whose tokens before them have been computed."""
        count = end - start
        batch = StepBatch(
            token_ids=np.ascontiguousarray(window[start:end]),
            positions=np.arange(start, end, dtype=np.int64),
            query_start=np.array([0, count], dtype=np.int64),
            context_len=np.array([start], dtype=np.int64),
            block_tables=self._tables,
            logits_index=np.arange(count, dtype=np.int64),
        )
        return self._backend.forward(batch).logits_RV

    def close(self) -> None:
        """Free weights and pool."""
        self._backend.close()
        self._pool.close()


@dataclass(kw_only=True)
class Accuracy:
    """What one format was at each position of the text. Divergences in nats, of the format from the reference."""

    name: str
    divergences: list[torch.Tensor] = field(default_factory=list)
    agreements: list[torch.Tensor] = field(default_factory=list)
    """Whether the most probable token is the reference's."""
    surprises: list[torch.Tensor] = field(default_factory=list)
    """Of the token that the text goes on with, nats."""

    def add(self, reference: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> None:
        """Compare log-probabilities [R, V] of positions whose next tokens are `targets` [R]."""
        self.divergences.append((reference.exp() * (reference - found)).sum(dim=1))
        self.agreements.append(reference.argmax(dim=1) == found.argmax(dim=1))
        self.surprises.append(-found.gather(1, targets.unsqueeze(1)).squeeze(1))

    def num_predictions(self) -> int:
        """Return how many positions were compared."""
        return sum(len(each) for each in self.surprises)

    def cells(self) -> list[str]:
        """As the table has it: mean and 99th percentile of the divergence, agreement, perplexity."""
        divergence = torch.cat(self.divergences)
        return [
            self.name,
            f"{divergence.mean():.5f}",
            f"{divergence.quantile(0.99):.4f}",
            f"{100 * torch.cat(self.agreements).double().mean():.2f} %",
            f"{torch.cat(self.surprises).mean().exp():.3f}",
        ]


def windows_of(token_ids: Sequence[int], size: int) -> Iterator[NDArray[np.int64]]:
    """Part the text; each window starts from an empty context. One of a single token predicts nothing and is left out."""
    for begin in range(0, len(token_ids), size):
        if len(token_ids) - begin > 1:
            yield np.array(token_ids[begin : begin + size], dtype=np.int64)


def measure(
    model: str, formats: Sequence[Format], token_ids: Sequence[int], options: argparse.Namespace
) -> list[Accuracy]:
    """Compare each format of a model with the reference, which comes first."""
    forms = [REFERENCE, *formats]
    found = [Accuracy(name=form.name) for form in forms]
    with ExitStack() as stack:
        subjects = [
            stack.enter_context(
                closing(Subject(model, form, options.threads, options.isa, min(options.window, len(token_ids))))
            )
            for form in forms
        ]
        for window in windows_of(token_ids, options.window):
            # The last token of a window has no next one.
            for start in range(0, len(window) - 1, STEP_TOKENS):
                end = min(start + STEP_TOKENS, len(window) - 1)
                print(f"{Path(model).name}: token {start} of {len(window)}", file=sys.stderr)
                logits = [torch.from_numpy(subject.logits(window, start, end)) for subject in subjects]
                targets = torch.from_numpy(window[start + 1 : end + 1])
                for begin in range(0, end - start, COMPARED_ROWS):
                    rows = slice(begin, begin + COMPARED_ROWS)
                    # In float64: divergences are smaller than what float32 leaves of a sum over the vocabulary.
                    each = [given[rows].double().log_softmax(dim=1) for given in logits]
                    for accuracy, given in zip(found, each, strict=True):
                        accuracy.add(each[0], given, targets[rows])
    return found


def markdown(results: dict[str, list[Accuracy]], options: argparse.Namespace) -> str:
    """Return the tables, and the command behind them."""
    facts, isa = machine(), choose_isa(load(), options.isa).name.lower()
    parts = [
        f"# Accuracy, {datetime.date.today().isoformat()}",
        f"{facts['cpu']}, instruction set {isa}. {options.text.name} in windows of {options.window} tokens. "
        "KL divergence from float32 of the same weights, in nats.",
    ]
    for model, accuracies in results.items():
        heads = ["format", "mean KL", "p99 KL", "same most probable token", "perplexity"]
        lines = [heads, ["---"] * len(heads), *(accuracy.cells() for accuracy in accuracies)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"{Path(model).name}, {accuracies[0].num_predictions()} predictions:\n\n{table}")
    parts.append(f"```\n{shlex.join(['python', *sys.argv])}\n```")
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="bf16 model directory in Hugging Face format")
    parser.add_argument("--gguf", help="GGUF file with quantised weights")
    parser.add_argument("--text", type=Path, default=FOLDER / "text.txt")
    parser.add_argument("--window", type=int, default=4096, help="tokens; the context of a prediction lies within one")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--isa", default="auto", help="instruction set; last bits depend on it")
    parser.add_argument("--output", type=Path, default=FOLDER / "results", help="folder of the table")
    options = parser.parse_args(argv)
    if options.model is None and options.gguf is None:
        parser.error("nothing to measure: name --model or --gguf")
    if options.window < 2:
        parser.error(f"--window {options.window}: at least 2")
    results: dict[str, list[Accuracy]] = {}
    try:
        for model, formats in ((options.model, OF_MODEL), (options.gguf, OF_GGUF)):
            if model is not None:
                token_ids = load_text_model(model).encode(options.text.read_text(encoding="utf-8"))
                if len(token_ids) < 2:
                    raise ConfigError(f"--text {options.text}: its {len(token_ids)} tokens leave nothing to predict")
                forms = [each for form in formats for each in (form, form.with_int8_kv())]
                results[model] = measure(model, forms, token_ids, options)
    except (ConfigError, OSError) as exc:
        print(exc, file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    text = markdown(results, options)
    (options.output / f"{datetime.date.today().isoformat()}-accuracy.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
