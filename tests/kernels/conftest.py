"""One thread and a fixed seed for every test here."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_settings() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
