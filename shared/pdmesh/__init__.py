"""pdmesh: an LLM serving mesh with prefill and decode disaggregated."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "BeamSearchParams", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from pdmesh.offline import LLM, BeamSearchParams, SamplingParams
else:
    # Services import this package too, and most need nothing of the offline API. Python looks for this name itself.
    from pdmesh.lazy_exports import load as __getattr__  # noqa: F401
