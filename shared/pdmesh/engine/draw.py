"""Draws one token for each of many rows: the largest of logit plus Gumbel noise, which draws from the softmax.

Each row first names the few tokens that can win at all; the noise of all rows' candidates is then made in one go. What a row
draws depends on its own logits and on its `Stream`, not on the rows beside it.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdmesh.engine.philox import CHUNK, MASK32, gumbel_noise, gumbel_noise_of_one, words_of_all
from pdmesh.engine.truncation import Floats, TokenIds, round_down, truncate
from pdmesh.protocol.messages import SamplingParams

# No noise is above 33 log 2 = 22.874.
MAX_NOISE = 22.88
# A Philox call for one token costs what it costs for the four that share it.
TOKENS_PER_CALL = 4
# Up to here the shared noise is cheaper than a search of its own.
MAX_DIRECT_TOKENS = 1024
# Candidates that share one call for their noise, and the memory of it, at most twice as many.
MAX_SHARED_TOKENS = CHUNK
# Far above the relative error of float32 times.
RACE_MARGIN = 1.0001


@dataclass(frozen=True, slots=True)
class Stream:
    """What a row's noise is made of, beside the token id."""

    seed: int
    choice: int
    position: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens of one row that may be drawn: ascending ids, their logits over temperature, and the row's stream."""

    token_ids: TokenIds
    logits: Floats
    stream: Stream


# Distances between extreme logits may be infinite, which is as far as it gets.
@np.errstate(over="ignore")
def find_candidates(logits_V: Floats, best: int, sampling: SamplingParams, stream: Stream) -> Candidates:
    """Divide by the temperature, truncate, and leave out what cannot win. `best` has the largest logit, which is finite."""
    if sampling.temperature != 1.0:
        logits_V = _divided(logits_V, best, np.float32(sampling.temperature))
    largest = float(logits_V[best])
    if 0 < sampling.top_k < len(logits_V) or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        ids = truncate(logits_V, largest, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        if _is_race_cheaper(len(ids), len(logits_V)):
            ids = ids[_run_race(logits_V, largest, stream, ids)]
        assert len(ids), "parameters within their ranges leave a token"
        return Candidates(ids, logits_V[ids], stream)
    score = largest + gumbel_noise_of_one(stream.seed, stream.choice, stream.position, best)
    is_near = logits_V >= round_down(score - MAX_NOISE)
    if _is_race_cheaper(int(np.count_nonzero(is_near)), len(logits_V)):
        is_near = _run_race(logits_V, largest, stream)
    ids = np.flatnonzero(is_near)
    return Candidates(ids, logits_V[ids], stream)


def _divided(logits_V: Floats, best: int, temperature: np.float32) -> Floats:
    divided_V: Floats = logits_V / temperature
    if np.isfinite(divided_V[best]):
        return divided_V
    # Only distances from the largest count, and those have room.
    shifted_V: Floats = (logits_V - logits_V[best]) / temperature
    return shifted_V


def draw(rows: list[Candidates]) -> list[int]:
    """Return one token id for each row."""
    chosen: list[int] = []
    first, num_tokens = 0, 0
    for end, row in enumerate(rows, start=1):
        num_tokens += len(row.token_ids)
        if num_tokens >= MAX_SHARED_TOKENS or end == len(rows):
            chosen += _draw_together(rows[first:end])
            first, num_tokens = end, 0
    return chosen


def _draw_together(rows: list[Candidates]) -> list[int]:
    lengths = np.array([len(row.token_ids) for row in rows])
    starts = np.zeros(len(rows), dtype=np.int64)
    np.cumsum(lengths[:-1], out=starts[1:])
    ids = np.concatenate([row.token_ids for row in rows])
    scores = np.concatenate([row.logits for row in rows]).astype(np.float64)
    scores += _noise([row.stream for row in rows], lengths, ids)
    best = np.maximum.reduceat(scores, starts)
    # Equal scores go to the lower id, which comes first.
    winners = np.flatnonzero(scores == np.repeat(best, lengths))
    chosen: list[int] = ids[winners[np.searchsorted(winners, starts)]].tolist()
    return chosen


def _noise(streams: list[Stream], lengths: NDArray[np.int64], ids: TokenIds) -> NDArray[np.float64]:
    if len(streams) == 1:
        return gumbel_noise(streams[0].seed, streams[0].choice, streams[0].position, ids)
    fields = np.array([(each.seed, each.choice, each.position) for each in streams], dtype=np.int64)
    seeds, choices, positions = np.repeat(fields, lengths, axis=0).T
    return gumbel_noise(seeds, choices, positions, ids)


def _is_race_cheaper(num_candidates: int, vocab_size: int) -> bool:
    return num_candidates > MAX_DIRECT_TOKENS and num_candidates * TOKENS_PER_CALL > vocab_size


def _run_race(logits_V: Floats, largest: float, stream: Stream, ids: TokenIds | None = None) -> NDArray[np.bool_]:
    """Mark all of `ids` (None: of the vocabulary) but those that surely lose.

    The largest logit plus Gumbel noise is the shortest of the times -log(u) / w, where w is the weight and u the noise's
    number in (0, 1). No time is below (1 - u) / w: who is there later than another's whole time has lost. That takes one
    exponential a token, in single precision, instead of two precise logarithms.
    """
    distances_V = np.empty(-(-len(logits_V) // TOKENS_PER_CALL) * TOKENS_PER_CALL, dtype=np.float32)
    for first, words in words_of_all(stream.seed, stream.choice, stream.position, len(logits_V)):
        for lane, word in enumerate(words):
            word ^= np.uint64(MASK32)
            distances_V[first + lane : first + TOKENS_PER_CALL * len(word) : TOKENS_PER_CALL] = word
    distances_V += np.float32(0.5)
    distances_V *= np.float32(2.0**-32)
    earliest = np.exp(np.float32(largest) - logits_V)
    earliest *= distances_V[: len(logits_V)]
    if ids is not None:
        earliest = earliest[ids]
    leader = int(earliest.argmin())
    distance = float(distances_V[leader if ids is None else ids[leader]])
    limit = float(earliest[leader]) * _time_over_distance(distance) * RACE_MARGIN
    is_in_time: NDArray[np.bool_] = earliest <= np.float32(limit)
    return is_in_time


def _time_over_distance(distance: float) -> float:
    """An upper bound of -log(u) / (1 - u) for u = 1 - distance."""
    # A float32 near 1 does not tell how near, but no -log(u) is above the largest noise.
    return -math.log1p(-distance) / distance if distance < 0.99 else MAX_NOISE
