"""The documentation says what is there: links lead somewhere, named functions exist, commands and options are real."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from pdmesh.supervisor import UpConfig

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(path for pattern in ("*.md", "docs/*.md", "services/*/*.md") for path in ROOT.glob(pattern))
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = [target.split("#")[0] for _, target in LINK.findall(document.read_text()) if "://" not in target]
    assert not [target for target in targets if target and not (document.parent / target).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_named_functions_are_where_the_link_says(document: Path) -> None:
    wrong = []
    for text, target in LINK.findall(document.read_text()):
        called = text.strip("`")
        if not target.endswith(".py") or called.endswith(".py") or not re.fullmatch(r"`[A-Za-z_.]+`", text):
            continue
        if called not in defined_in((document.parent / target).resolve()):
            wrong.append(f"{text} in {target}")
    assert not wrong


def test_the_request_path_goes_through_the_whole_mesh() -> None:
    text = (ROOT / "docs" / "request-path.md").read_text()
    for part in (
        "pdmesh/openai/",
        "pdmesh_proxy/",
        "pdmesh/engine/server/",
        "pdmesh/engine/core.py",
        "pdmesh/connector/",
    ):
        assert part in text


@cache
def defined_in(path: Path) -> set[str]:
    """`function`, `Class` and `Class.method` of a file, and what is defined inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_options_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Options of") : text.index("While it runs")]
    known = {"--" + field.replace("_", "-") for field in UpConfig.model_fields} | {"--no-kvcache"}
    mentioned = set(re.findall(r"--[a-z][a-z-]+", section))
    assert mentioned
    assert mentioned <= known


def test_commands_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    shown = subprocess.run(
        [sys.executable, "-m", "pdmesh", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = set(re.findall(r"^  (\w+)", shown.split("Commands:")[1], re.MULTILINE))
    mentioned = set(re.findall(r"(?:\.venv/bin/|`)pdmesh\s([a-z]+)", text))
    assert {"up", "chat", "scale", "proxy"} <= mentioned
    assert mentioned <= commands
    dev = set(re.findall(r"\./dev ([a-z]+)", text))
    assert dev <= {"up", "test", "faults", "soak", "fmt", "proto"}


@pytest.mark.parametrize(
    "command", ["up", "scale", "chat", "complete", "proxy", "prefill", "decode", "kvcache", "serve", "run-batch"]
)
def test_every_command_has_help(command: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "pdmesh", command, "--help"], capture_output=True, text=True, check=False, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert "usage" in shown.stdout.lower()
