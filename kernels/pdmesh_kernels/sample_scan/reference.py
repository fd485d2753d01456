"""The definition of a draw, by a full sort and noise for every token: the largest of logit / temperature plus Gumbel noise among
the tokens that top_k, top_p and min_p leave."""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10


def draw_tokens(logits_RV: NDArray[np.float32], draws: NDArray[np.void]) -> NDArray[np.int64]:
    """Draw one token for each of `draws` (see `DRAW`). A border that float64 cannot tell falls as it falls."""
    return np.array([_draw(logits_RV[draw["row"]], draw) for draw in draws], dtype=np.int64)


def _draw(logits_V: NDArray[np.float32], draw: np.void) -> int:
    values_V = logits_V / np.float32(draw["temperature"])
    order = np.argsort(-values_V, kind="stable")
    if 0 < draw["top_k"] < len(order):
        order = order[: draw["top_k"]]
    values_K = values_V[order]
    weights_K = np.exp(values_K - values_K[0]).astype(np.float64)
    kept = np.cumsum(weights_K) - weights_K < draw["top_p"] * weights_K.sum() if draw["top_p"] < 1.0 else weights_K >= 0
    if draw["log_min_p"] > -np.inf:
        kept &= values_K >= np.float32(float(values_K[0]) + draw["log_min_p"])
    kept[0] = True
    ids = np.sort(order[kept])
    scores = values_V[ids].astype(np.float64) + _gumbel(ids, draw)
    return int(ids[scores.argmax()])


def _gumbel(ids: NDArray[np.int64], draw: np.void) -> NDArray[np.float64]:
    """Philox4x32-10 with the seed as key over counters (token / 4, position, choice, 0); token modulo 4 picks the word."""
    counter = np.zeros((4, len(ids)), dtype=np.uint64)
    counter[0], counter[1], counter[2] = ids >> 2, draw["position"] & 0xFFFFFFFF, draw["choice"] & 0xFFFFFFFF
    seed = int(draw["seed"]) & (2**64 - 1)
    key = [seed & 0xFFFFFFFF, seed >> 32]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(ROUNDS):
        product_0, product_1 = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = np.stack(
            [
                (product_1 >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]),
                product_1 & low,
                (product_0 >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]),
                product_0 & low,
            ]
        )
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    words = counter[ids & 3, np.arange(len(ids))]
    noise: NDArray[np.float64] = -np.log(-np.log((words.astype(np.float64) + 0.5) * 2.0**-32))
    return noise
