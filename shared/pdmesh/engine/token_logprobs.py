"""Log-probabilities as clients see them: of the model itself, before penalties and temperature."""

import numpy as np
from numpy.typing import NDArray

from pdmesh.engine.truncation import Floats, top_ids
from pdmesh.protocol.messages import TokenLogprobs


# A row without a finite largest logit becomes NaN, which whoever reports it looks for.
@np.errstate(invalid="ignore")
def raw_logprobs(logits_RV: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the log-softmax of each row; a new array, so that later edits of the logits do not reach it."""
    logprobs_RV = np.empty_like(logits_RV)
    # Row by row: what is between stays in the cache.
    for logits_V, logprobs_V in zip(logits_RV, logprobs_RV, strict=True):
        np.subtract(logits_V, logits_V.max(), out=logprobs_V)
        logprobs_V -= np.log(np.exp(logprobs_V).sum())
    return logprobs_RV


def describe_token(logprobs_V: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Describe the chosen token and the `num_top` most likely ones, best first, which may include it.

    Equal ones come in order of their ids; the chosen one's rank is the last among its equals.
    """
    assert num_top >= 0, "the whole vocabulary has its number by now"
    chosen = logprobs_V[token_id]
    rank = int(np.count_nonzero(logprobs_V >= chosen))
    ids = np.zeros(0, dtype=np.int64)
    if num_top > 0:
        ids = top_ids(logprobs_V, float(logprobs_V.max()), num_top)
        ids = ids[np.argsort(-logprobs_V[ids], kind="stable")]
    return TokenLogprobs(
        token_ids=[token_id, *ids.tolist()], logprobs=[float(chosen), *logprobs_V[ids].tolist()], rank=rank
    )
