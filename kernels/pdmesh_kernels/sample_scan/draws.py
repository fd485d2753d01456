"""What a draw is made of, as the CPU library reads it (`pdm_draw` in sampling.h)."""

import numpy as np

UNDECIDED = -1
"""In place of a token: rounding could decide, so the definition must."""

DRAW = np.dtype(
    [
        ("row", "<i8"),
        ("best", "<i8"),
        ("temperature", "<f8"),
        ("top_k", "<i8"),
        ("top_p", "<f8"),
        ("log_min_p", "<f8"),
        ("seed", "<i8"),
        ("choice", "<i8"),
        ("position", "<i8"),
    ]
)
"""`row` of the logits; `best`: the lowest id of its largest logit, which is finite; `temperature` over 0; `top_k` 0, `top_p` 1
and `log_min_p` -inf are off; seed, choice and position of the token are the noise's."""
