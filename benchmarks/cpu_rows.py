"""What `cpu.py` measures: loads, who is compared on them, and how far ours has to be ahead."""

from dataclasses import dataclass
from typing import Literal

from load import COLUMNS, Load

SideName = Literal["serve", "mesh", "gguf", "vllm", "vllm-pd", "llama", "llama-amx"]
MORE_IS_BETTER = {key: more for key, _, _, more in COLUMNS}
HEADINGS = {key: heading for key, heading, _, _ in COLUMNS}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A number of a round and what ours, divided by the peer's, has to reach."""

    key: str
    ratio: float

    @property
    def more_is_better(self) -> bool:
        """Whether the ratio is a lower bound."""
        return MORE_IS_BETTER[self.key]

    def is_met(self, ratio: float) -> bool:
        """Whether a measured ratio reaches the goal."""
        return ratio >= self.ratio if self.more_is_better else ratio <= self.ratio

    def __str__(self) -> str:
        return f"{'≥' if self.more_is_better else '≤'} {self.ratio:g} ×"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One load on ours and on a peer."""

    name: str
    """What `--rows` takes."""
    title: str
    ours: SideName
    peer: SideName
    load: Load
    goals: tuple[Goal, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of how the cost grows: streams of one length in flight together."""

    batch: int
    context: int


def _load(num_requests: int, concurrency: int, input_len: int, output_len: int, long_every: int = 0) -> Load:
    return Load(
        num_requests=num_requests,
        concurrency=concurrency,
        rate_per_s=0.0,
        input_len=input_len,
        prefix_len=0,
        output_len=output_len,
        vocab_size=40000,
        seed=0,
        timeout_s=600.0,
        long_every=long_every,
        long_len=3000,
    )


def _four_bit_rows(peer: SideName, suffix: str, title: str) -> tuple[Row, Row]:
    return (
        Row(
            name=f"itl-4bit{suffix}",
            title=f"1 stream, 32 in, 128 out, 4-bit{title}",
            ours="gguf",
            peer=peer,
            load=_load(4, 1, 32, 128),
            goals=(Goal(key="itl_p50_ms", ratio=0.6),),
        ),
        Row(
            name=f"ttft-4bit{suffix}",
            title=f"1 stream, 1,024 in, 4-bit{title}",
            ours="gguf",
            peer=peer,
            load=_load(3, 1, 1024, 4),
            goals=(Goal(key="ttft_p50_ms", ratio=0.2),),
        ),
    )


ROWS = (
    Row(
        name="itl-1",
        title="1 stream, 32 in, 128 out",
        ours="serve",
        peer="vllm",
        load=_load(4, 1, 32, 128),
        goals=(Goal(key="itl_p50_ms", ratio=0.5),),
    ),
    Row(
        name="ttft-1024",
        title="1 stream, 1,024 in",
        ours="serve",
        peer="vllm",
        load=_load(6, 1, 1024, 4),
        goals=(Goal(key="ttft_p50_ms", ratio=0.6),),
    ),
    Row(
        name="ttft-4096",
        title="1 stream, 4,096 in",
        ours="serve",
        peer="vllm",
        load=_load(3, 1, 4096, 4),
        goals=(Goal(key="ttft_p50_ms", ratio=0.7),),
    ),
    Row(
        name="streams-8",
        title="8 streams, 512 in, 64 out",
        ours="serve",
        peer="vllm",
        load=_load(24, 8, 512, 64),
        goals=(Goal(key="output_tokens_per_s", ratio=2.0),),
    ),
    Row(
        name="streams-32",
        title="32 streams, 128 in, 128 out",
        ours="serve",
        peer="vllm",
        load=_load(64, 32, 128, 128),
        goals=(Goal(key="output_tokens_per_s", ratio=1.6),),
    ),
    Row(
        name="mixed",
        title="8 streams mixed (64 in, every fourth 3,000 in; 64 out), 1P1D mesh",
        ours="mesh",
        peer="vllm",
        load=_load(32, 8, 64, 64, long_every=4),
        goals=(
            Goal(key="itl_p99_ms", ratio=0.2),
            Goal(key="output_tokens_per_s", ratio=1.0),
            Goal(key="ttft_p50_ms", ratio=1.0),
        ),
    ),
    Row(
        name="mixed-pd",
        title="the same, against vLLM P/D",
        ours="mesh",
        peer="vllm-pd",
        load=_load(16, 8, 64, 64, long_every=4),
        goals=(Goal(key="output_tokens_per_s", ratio=10.0),),
    ),
    *_four_bit_rows("llama", "", ""),
    *_four_bit_rows("llama-amx", "-amx", ", llama.cpp with AMX"),
)
# The start has no load: each run starts both servers, one after the other.
START = "start"
START_TITLE = "start to the first answer, weights and caches warm"
START_RATIO = 0.04
GROWTH = "growth"
GROWTH_CELLS = tuple(
    Cell(batch=batch, context=context)
    for context in (128, 512, 2048, 7900)
    for batch in (1, 8, 32, 64)
    if batch * context <= 20_000
)
GROWTH_OUTPUT_LEN = 48
NAMES = (*(row.name for row in ROWS), START, GROWTH)


def growth_load(cell: Cell) -> Load:
    """All streams of the cell at once; the median gap between tokens is then a step of that batch at that context."""
    return _load(cell.batch, cell.batch, cell.context, GROWTH_OUTPUT_LEN)
