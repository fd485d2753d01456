"""Metric names: ours or vLLM's (its http_ ones too), with their unit, each with a line of help."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"Counter", "Gauge", "Histogram", "CounterMetricFamily", "GaugeMetricFamily"}
NAME = re.compile(r"(pdmesh_|vllm:|http_)[a-z][a-z0-9_]*$")
NOT_BASE_UNITS = ("_ms", "_milliseconds", "_us", "_kb", "_mb", "_kib", "_mib", "_minutes", "_percent")


def metrics() -> list[tuple[str, str, str]]:
    """(file, name, help) of every metric that is made with a literal name."""
    found = []
    for folder in ("shared", "services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or len(node.args) < 2:
                    continue
                kind = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                texts = [
                    arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                ]
                if kind in KINDS and len(texts) == 2:
                    found.append((str(path.relative_to(ROOT)), texts[0], texts[1]))
    return found


def test_names_help_and_units() -> None:
    seen = metrics()
    assert len(seen) > 20
    wrong = []
    for file, name, help_text in seen:
        if not NAME.match(name) or name.endswith(NOT_BASE_UNITS):
            wrong.append(f"{file}: {name}: pdmesh_, vllm: or http_ (as vLLM has it), lower case, base units")
        if not help_text.strip():
            wrong.append(f"{file}: {name}: no help")
    assert not wrong
