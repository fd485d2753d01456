"""sample_scan: tokens drawn from logits without sorting the vocabulary, by temperature, top_k, top_p, min_p, and noise that is a
function of seed, choice, position and token."""

from pdmesh_kernels.cpu.library import choose_isa, find, load
from pdmesh_kernels.sample_scan.cpu import Scanner
from pdmesh_kernels.sample_scan.draws import DRAW, UNDECIDED

__all__ = ["DRAW", "UNDECIDED", "Scanner", "make_scanner"]


def make_scanner(isa: str = "auto", *, may_build: bool = True) -> Scanner:
    """Make a scanner of the CPU library, which is built where it is missing and may be. Raises LibraryError that says why."""
    library = load() if may_build else find()
    return Scanner(library, choose_isa(library, isa))
