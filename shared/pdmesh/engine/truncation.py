"""top_k, top_p and min_p: which tokens may be drawn. No vocabulary is sorted for it.

All three keep the beginning of one order, in which a larger logit comes first and of equal ones the lower id, so top_k 1 is
greedy. A glance at what lies near the largest logit is enough for most rows; the others look deeper.

Shapes: V vocabulary, K candidates (ids ascending).
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
TokenIds = NDArray[np.int64]

# Below the largest logit, in logits: what lies deeper than 8 weighs e**-8 of the largest at most.
LOOKS = (8.0, 16.0, math.inf)
# Candidates that are few enough to be sorted; more are halved first.
MAX_SORTED = 1024


def truncate(logits_V: Floats, largest: float, *, top_k: int, top_p: float, min_p: float) -> TokenIds:
    """Return the ids that may be drawn, at least one; `largest` is the maximum, which must be finite.

    top_k (0: off) leaves that many; of their probability, top_p takes the shortest beginning that reaches it; min_p drops
    what has less than that share of the largest one's probability.
    """
    if 0 < top_k < len(logits_V):
        ids_K = top_ids(logits_V, largest, top_k)
        if top_p < 1.0:
            values_K = logits_V[ids_K]
            weights_K = _weights(values_K, largest)
            ids_K = ids_K[_heaviest(values_K, weights_K, top_p * _sum(weights_K))]
    elif top_p < 1.0:
        ids_K = _nucleus(logits_V, largest, top_p)
    else:
        return np.flatnonzero(logits_V >= _floor(largest, min_p))
    return ids_K[logits_V[ids_K] >= _floor(largest, min_p)] if min_p > 0.0 else ids_K


def top_ids(values_V: Floats, largest: float, count: int) -> TokenIds:
    """Return the ids of the first `count` tokens in order of value, ascending by id. The values may be log-probabilities."""
    if count >= len(values_V):
        return np.arange(len(values_V))
    for ids_K in _glances(values_V, largest):
        if len(ids_K) >= count:
            break
    values_K = values_V[ids_K]
    if len(ids_K) == count:
        return ids_K
    border = np.partition(values_K, len(values_K) - count)[len(values_K) - count]
    num_above = int(np.count_nonzero(values_K > border))
    return ids_K[_beginning(values_K, border, count - num_above)]


def _nucleus(logits_V: Floats, largest: float, top_p: float) -> TokenIds:
    weights_V = _weights(logits_V, largest)
    target = top_p * _sum(weights_V)
    for ids_K in _glances(logits_V, largest):
        weights_K = weights_V[ids_K]
        if _sum(weights_K) >= target:
            break
    return ids_K[_heaviest(logits_V[ids_K], weights_K, target)]


def _heaviest(values_K: Floats, weights_K: Floats, target: float) -> NDArray[np.bool_]:
    """Mark the shortest beginning whose weight reaches `target`; all that weighs anything when rounding keeps it from that."""
    values, weights = values_K, weights_K
    # Each round decides for the half above a median or for the half below, or ends among what equals it.
    while len(values) > MAX_SORTED:
        median = np.partition(values, len(values) // 2)[len(values) // 2]
        above = values > median
        above_weight = _sum(weights[above])
        if above_weight >= target:
            values, weights = values[above], weights[above]
            continue
        target -= above_weight
        tied_weights = weights[values == median]
        num_needed = _num_needed(tied_weights, target)
        if num_needed <= len(tied_weights):
            return _beginning(values_K, median, num_needed)
        target -= _sum(tied_weights)
        below = values < median
        values, weights = values[below], weights[below]
    if len(values) == 0:
        return weights_K > 0.0
    order = np.argsort(-values, kind="stable")
    values, weights = values[order], weights[order].astype(np.float64)
    num_kept = max(int(np.count_nonzero(np.cumsum(weights) - weights < target)), 1)
    border = values[num_kept - 1]
    return _beginning(values_K, border, int(np.count_nonzero(values[:num_kept] == border)))


def _num_needed(tied_weights: Floats, target: float) -> int:
    """How many of equal weights reach `target`; those without any weight are not worth taking."""
    weight = float(tied_weights[0])
    return math.ceil(target / weight) if weight > 0.0 else 0


def _beginning(values_K: Floats, border: np.float32, num_ties: int) -> NDArray[np.bool_]:
    """Mark what lies above `border`, and the first `num_ties` of what equals it."""
    kept_K: NDArray[np.bool_] = values_K > border
    kept_K[np.flatnonzero(values_K == border)[:num_ties]] = True
    return kept_K


def _glances(values_V: Floats, largest: float) -> Iterator[TokenIds]:
    """Yield the ids near the largest value, deeper each time; at last all."""
    for depth in LOOKS:
        yield np.flatnonzero(values_V >= round_down(largest - depth))


def _weights(values: Floats, largest: float) -> Floats:
    weights: Floats = np.exp(values - np.float32(largest))
    return weights


def _sum(weights: Floats) -> float:
    return float(weights.sum(dtype=np.float64))


def _floor(largest: float, min_p: float) -> np.float32:
    """The least logit whose probability is `min_p` of the largest one's, or more."""
    return np.float32(largest + math.log(min_p)) if min_p > 0.0 else np.float32(-np.inf)


def round_down(value: float) -> np.float32:
    """A float32 that is at most `value`, so that a comparison with it drops nothing by rounding."""
    return np.float32(np.nextafter(np.float32(value), np.float32(-np.inf)))
