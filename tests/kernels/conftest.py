"""One thread and a fixed seed for every test here; the CPU library, and each instruction set that this processor has."""

import pytest
import torch

from pdmesh_kernels.cpu.abi import Isa
from pdmesh_kernels.cpu.library import Library, load


@pytest.fixture(autouse=True)
def _torch_settings() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def library() -> Library:
    return load()


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest, library: Library) -> Isa:
    if request.param not in library.isas:
        pytest.skip("this processor does not have it")
    return Isa(request.param)
