"""A logits processor, as operators write them, by which the fault tests slow an engine's steps down or hold one.

A request asks for it in `vllm_xargs`: `pace_s` sleeps before each of its tokens, where a path `pace_while` is given as long as
that exists; `hold` is a path, and while that exists the step in which the request gets its token number `hold_at` (any, when
absent) waits. All else in the same step waits along.
"""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pdmesh.engine.logits_processors import LogitsProcessor, RowView
from pdmesh.protocol.messages import SamplingParams

if TYPE_CHECKING:
    import torch

# A test that died holds no engine for longer.
MAX_HOLD_S = 30.0
LOOK_EVERY_S = 0.005


class Pacer(LogitsProcessor):
    """Changes no logits."""

    def is_active(self, sampling: SamplingParams) -> bool:
        return bool(sampling.extra_args)

    def apply(self, logits_V: torch.Tensor, row: RowView) -> None:
        args = row.extra_args
        pace_while = args.get("pace_while")
        if (pace_s := args.get("pace_s")) and (not pace_while or Path(str(pace_while)).exists()):
            _sleep(float(str(pace_s)))
        if (hold := args.get("hold")) and args.get("hold_at", len(row.output)) == len(row.output):
            until = time.monotonic() + MAX_HOLD_S
            while Path(str(hold)).exists() and time.monotonic() < until:
                _sleep(LOOK_EVERY_S)


def _sleep(seconds: float) -> None:
    # Not time.sleep, which libfaketime lets fail now and then (EINVAL) in a process whose wall clock it skews.
    select.select([], [], [], seconds)
