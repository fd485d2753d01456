"""The CPU library's draws against the definition by a full sort, and against the engine's own shortcuts: same tokens, or none."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pdmesh.engine.draw import Stream, draw, find_candidates
from pdmesh.protocol.messages import SamplingParams
from pdmesh_kernels.sample_scan import DRAW, UNDECIDED, Scanner
from pdmesh_kernels.sample_scan.reference import draw_tokens
from support.scanner import scanner_or_skip

Floats = NDArray[np.float32]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 3000},
    {"top_p": 1e-9},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.03},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 3000, "top_p": 0.97, "min_p": 0.01},
]
SIZES = [1, 2, 15, 33, 63, 1000, 4099]


@pytest.fixture(params=["avx2", "avx512"])
def scanner(request: pytest.FixtureRequest) -> Scanner:
    return scanner_or_skip(request.param)


def draws_of(logits_RV: Floats, first_seed: int, **sampling: Any) -> NDArray[np.void]:
    draws = np.zeros(len(logits_RV), dtype=DRAW)
    draws["row"], draws["best"] = np.arange(len(logits_RV)), logits_RV.argmax(axis=-1)
    params = SamplingParams(**({"temperature": 1.0} | sampling))
    draws["temperature"], draws["top_k"], draws["top_p"] = params.temperature, params.top_k, params.top_p
    draws["log_min_p"] = math.log(params.min_p) if params.min_p else -math.inf
    draws["seed"] = np.arange(len(logits_RV)) + first_seed
    draws["choice"], draws["position"] = draws["seed"] % 3, draws["seed"] * 7 & 0xFFFFF
    return draws


def rows(size: int, kind: str, seed: int) -> Floats:
    source = np.random.default_rng(seed)
    spreads = np.array([0.01, 1.0, 2.0, 4.0, 30.0])
    logits = (source.standard_normal((5, size)) * spreads[:, None]).astype(np.float32)
    if kind == "few values":
        # As from a model in bfloat16: each many times.
        return np.round(logits)
    if kind == "masked":
        logits[:, source.integers(0, size, size // 2)] = -np.inf
        logits[:, 0] = 1.0
    return logits


@pytest.mark.parametrize("kind", ["noise", "few values", "masked"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_are_the_definitions(scanner: Scanner, options: dict[str, Any], size: int, kind: str) -> None:
    num_undecided = 0
    for temperature in (1.0, 0.7, 0.05, 2.0):
        logits = rows(size, kind, size)
        draws = draws_of(logits, -2, temperature=temperature, **options)
        drawn, expected = scanner.draw_tokens(logits, draws), draw_tokens(logits, draws)
        is_decided = drawn != UNDECIDED
        assert (drawn[is_decided] == expected[is_decided]).all()
        num_undecided += int((~is_decided).sum())
    # Only a border of top_p can be too close to tell, and that seldom: one token in a hundred thousand weighs little.
    assert num_undecided <= (10 if "top_p" in options else 0)


@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_are_those_of_the_engines_shortcuts(scanner: Scanner, options: dict[str, Any]) -> None:
    logits = np.concatenate([rows(5001, kind, 3) for kind in ("noise", "few values", "masked")])
    for first_seed in (0, 100, -(2**63)):
        draws = draws_of(logits, first_seed, **options)
        sampling = SamplingParams(**({"temperature": 1.0} | options))
        streams = [Stream(int(each["seed"]), int(each["choice"]), int(each["position"])) for each in draws]
        expected = draw(
            [
                find_candidates(row, int(best), sampling, stream)
                for row, best, stream in zip(logits, draws["best"], streams, strict=True)
            ]
        )
        drawn = scanner.draw_tokens(logits, draws)
        assert all(token in (UNDECIDED, same) for token, same in zip(drawn.tolist(), expected, strict=True))


def test_draws_follow_the_distribution(scanner: Scanner) -> None:
    size, num_draws = 50, 4000
    logits = np.tile((np.random.default_rng(4).standard_normal(size) * 2).astype(np.float32), (num_draws, 1))
    counts = np.bincount(scanner.draw_tokens(logits, draws_of(logits, 0, temperature=0.8)), minlength=size)
    expected = np.exp(logits[0] / 0.8 - (logits[0] / 0.8).max())
    expected *= num_draws / expected.sum()
    common = expected >= 5
    chi2 = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = int(common.sum()) - 1
    # Five standard deviations of the chi-squared law.
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_a_temperature_that_overflows_is_left_to_the_definition(scanner: Scanner) -> None:
    logits = np.array([[1.0, 2.0, 3e38]], dtype=np.float32)
    assert scanner.draw_tokens(logits, draws_of(logits, 0, temperature=1e-5)).tolist() == [UNDECIDED]


def test_rows_that_are_not_neighbours_and_draws_in_any_order(scanner: Scanner) -> None:
    logits = rows(1000, "noise", 9)
    draws = draws_of(logits, 0, top_k=50)
    expected = scanner.draw_tokens(logits, draws)
    order = np.array([3, 0, 4])
    assert scanner.draw_tokens(logits, draws[order].copy()).tolist() == expected[order].tolist()
    wide = np.full((10, 1040), np.nan, dtype=np.float32)
    wide[::2, :1000] = logits
    assert scanner.draw_tokens(wide[::2, :1000], draws).tolist() == expected.tolist()
    assert scanner.draw_tokens(logits, draws[:0]).tolist() == []


def test_what_would_read_elsewhere_is_refused(scanner: Scanner) -> None:
    logits = rows(33, "noise", 1)
    draws = draws_of(logits, 0)
    for field, value in (("row", 5), ("row", -1), ("best", 33), ("best", -1)):
        broken = draws.copy()
        broken[field][2] = value
        with pytest.raises(ValueError, match=field):
            scanner.draw_tokens(logits, broken)
    with pytest.raises(ValueError, match="contiguous"):
        scanner.draw_tokens(logits.T, draws)
    with pytest.raises(TypeError, match="float32"):
        scanner.draw_tokens(logits.astype(np.float64), draws)  # type: ignore[arg-type]


# A vocabulary for which the first of the scanner's arrays can be had, and none behind it; then there is memory again.
OUT_OF_MEMORY = """
import resource
import numpy as np
from pdmesh_kernels.cpu.library import LibraryError, load
from pdmesh_kernels.sample_scan import DRAW, Scanner
library = load()
scanner = Scanner(library, library.isas[0])
vocab = 16 << 20
logits = np.zeros((1, vocab), np.float32)
logits[0, 5] = 50
draws = np.zeros(1, DRAW)
draws["best"], draws["temperature"], draws["top_k"], draws["top_p"], draws["log_min_p"] = 5, 1.0, 0, 1.0, -np.inf
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 6 * vocab, unlimited[1]))
try:
    scanner.draw_tokens(logits, draws)
except LibraryError as exc:
    print(exc)
resource.setrlimit(resource.RLIMIT_AS, unlimited)
print(scanner.draw_tokens(logits, draws)[0])
"""


def test_a_draw_for_which_there_was_no_memory_leaves_nothing_half_grown() -> None:
    """The arrays behind the one that had grown were taken for as large, and written beyond their ends."""
    scanner_or_skip("avx2")
    ended = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.splitlines()) == (0, ["pdm_sample_draw: out of memory", "5"]), ended.stderr
