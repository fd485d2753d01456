"""The CPU library's sampling for tests, or a skip that says why there is none."""

import pytest

from pdmesh_kernels.cpu.library import LibraryError
from pdmesh_kernels.sample_scan import Scanner, make_scanner


def scanner_or_skip(isa: str = "auto") -> Scanner:
    try:
        return make_scanner(isa)
    except LibraryError as exc:
        pytest.skip(str(exc))
