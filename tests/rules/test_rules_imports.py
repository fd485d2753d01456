"""Who may import whom, read from the source: kernels ← shared ← services, and torch only where tensors are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("proxy", "prefill", "decode", "kvcache")
SOURCES = {
    "kernels": ROOT / "kernels" / "pdmesh_kernels",
    "shared": ROOT / "shared" / "pdmesh",
    **{name: ROOT / "services" / name / f"pdmesh_{name}" for name in SERVICES},
}
MAY_IMPORT = {
    "kernels": {"pdmesh_kernels"},
    "shared": {"pdmesh_kernels", "pdmesh"},
    **{name: {"pdmesh_kernels", "pdmesh", f"pdmesh_{name}"} for name in SERVICES},
}
# What runs in every service without torch; each must import where torch cannot be imported.
TORCH_FREE = [
    "pdmesh.cli.app",
    "pdmesh.supervisor",
    "pdmesh.lifecycle",
    "pdmesh.offline",
    "pdmesh.offline.batch",
    "pdmesh.models.source",
    "pdmesh.engine.block_hash",
    "pdmesh.engine.block_key",
    "pdmesh.engine.core_client",
    "pdmesh.engine.core_process",
    "pdmesh.engine.cpu_backend",
    "pdmesh.engine.kv_events_config",
    "pdmesh.engine.kv_transfer_config",
    "pdmesh.engine.server.front",
    "pdmesh.engine.server.service",
    "pdmesh.protocol.wire",
    "pdmesh.protocol.ticket",
    "pdmesh.protocol.offers",
    "pdmesh.connector.registry",
    "pdmesh.connector.owner",
    "pdmesh.connector.peers",
    "pdmesh.openai.app",
    "pdmesh_proxy.service",
    "pdmesh_kvcache.server",
]
BLOCK_TORCH = """
import sys, importlib
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "transformers", "nixl", "nixl_cu12"):
            raise ImportError(f"{name} must not be imported here")
sys.meta_path.insert(0, Block())
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as exc:
        sys.exit(f"{name}: {exc}")
"""


def modules(part: str) -> list[Path]:
    return sorted(SOURCES[part].rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("part", SOURCES)
def test_imports_point_one_way(part: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(part)
        for name in imported(path)
        if (top := name.split(".")[0]).startswith("pdmesh") and top not in MAY_IMPORT[part]
    ]
    assert not wrong


@pytest.mark.parametrize("part", ["proxy", "kvcache"])
def test_torch_free_services_never_name_torch(part: str) -> None:
    assert not [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(part)
        for name in imported(path)
        if name.split(".")[0] in ("torch", "transformers", "triton")
    ]


def test_server_processes_import_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK_TORCH, *TORCH_FREE], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
