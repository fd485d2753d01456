"""Which of the libraries behind native connectors work here: some need parts of the system that a package cannot bring."""

import functools
import subprocess
import sys

IMPORTS = {"nixl": "nixl_cu12._bindings", "mooncake": "mooncake.engine", "ucxx": "ucxx"}
REMEDIES = {
    "nixl": "pip install nixl-cu12",
    "mooncake": "pip install mooncake-transfer-engine-non-cuda and libibverbs1",
    "ucxx": "pip install ucxx-cu12 with its CUDA parts",
}


@functools.cache
def missing(connector: str) -> str:
    """Why a connector cannot be used here, as a skip's reason; empty when it can. Asked in a process of its own, since some
    libraries start threads when they are imported."""
    module = IMPORTS.get(connector)
    if (
        module is None
        or subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode == 0
    ):
        return ""
    return REMEDIES[connector]
