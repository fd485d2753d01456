"""From what goes wrong with one row of a step to what ends its choice, and nothing else."""

import logging

from pdmesh.engine.plan import RowFailure
from pdmesh.errors import EngineFault, InternalError, MeshError

log = logging.getLogger(__name__)

NAN_FAILURE = RowFailure(
    code=EngineFault.__name__, message="the model returned logits that are not numbers", is_nan=True
)


class BrokenLogits(Exception):
    """Logits that are not numbers any more by the engine's own doing; counted like those that a model returned."""


def row_failure(exc: Exception) -> RowFailure:
    """Log what failed for one row of a step, and return what ends its choice.

    What a request's own parameters or a logits processor do would fail on any engine; the rest is this engine's fault.
    """
    if isinstance(exc, MeshError):
        return RowFailure(code=exc.code, message=exc.message)
    log.error("a choice could not be sampled", exc_info=exc)
    if isinstance(exc, BrokenLogits):
        return RowFailure(code=InternalError.__name__, message=str(exc), is_nan=True)
    return RowFailure(code=EngineFault.__name__, message=f"the engine failed to sample: {type(exc).__name__}: {exc}")
