"""The CPU library in a C++ program that address, undefined-behaviour and thread sanitizers watch.

The driver's buffers are exactly as large as the interface says; some end at a page without access, for tile loads.
"""

import pytest

from pdmesh_kernels.cpu.abi import Isa
from pdmesh_kernels.cpu.library import LibraryError, load
from support.cpu_driver import ADDRESS, THREAD, run_driver

ALL = tuple(Isa)
# What instructions the sanitizer does not see stay out of this one.
QUICK = Isa.AVX512_BF16


def supported(isa: Isa) -> Isa:
    try:
        isas = load().isas
    except LibraryError as exc:
        pytest.skip(str(exc))
    if isa not in isas:
        pytest.skip(f"this processor has no {isa.name}")
    return isa


@pytest.fixture
def quick_isa() -> Isa:
    try:
        return min(QUICK, load().isas[0])
    except LibraryError as exc:
        pytest.skip(str(exc))


# The first run after a change of the sources compiles.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["operations", "batches"])
def test_nothing_is_touched_outside_its_buffers(what: str, quick_isa: Isa) -> None:
    output = run_driver(what, quick_isa, 1, 25, ADDRESS, (quick_isa,))
    assert "1 threads:" in output
    assert "3 threads:" in output


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", Isa)
@pytest.mark.parametrize("what", ["operations", "batches", "threads"])
def test_no_instruction_set_touches_what_it_may_not(what: str, isa: Isa) -> None:
    for seed in (2, 3):
        run_driver(what, supported(isa), seed, 60, ADDRESS, ALL)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", Isa)
@pytest.mark.parametrize("what", ["operations", "threads"])
def test_threads_share_only_what_they_may(what: str, isa: Isa) -> None:
    run_driver(what, supported(isa), 4, 10, THREAD, ALL)
