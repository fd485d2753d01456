"""What every test of the engine core leaves behind: nothing."""

from collections.abc import Iterator

import pytest
import torch

from support.core_harness import CoreHarness

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def close_cores() -> Iterator[None]:
    yield
    for core in list(CoreHarness.opened):
        core.close()
