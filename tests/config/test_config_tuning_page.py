"""The tuning page names settings that exist, with the defaults that they have, and explains flags that are really refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdmesh.config import EngineConfig
from pdmesh.config.vllm_flags import FOREIGN_FLAGS

PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def flags(cell: str) -> list[str]:
    return [name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)", cell)]


def test_settings_exist_and_have_the_defaults_that_are_told() -> None:
    table = rows("The table")
    assert len(table) > 20
    for setting, told, *_ in table:
        [name] = flags(setting)
        default = EngineConfig.model_fields[name].default
        first = re.match(r"`?([\w.]+)", told)
        assert first is not None
        shown = {"True": "on", "False": "off", "[]": "none", "": "none", "0.0": "0"}.get(str(default), str(default))
        if told.startswith(("the model's", "the backend's", "by device")):
            shown = first[1]
            assert default == 0
        assert first[1] == shown, f"{name}: the page says {told!r}, the default is {default!r}"


@pytest.mark.parametrize(
    "name", sorted({flag for row in rows("Flags of vLLM that are not here") for flag in flags(row[0])})
)
def test_flags_of_vllm_are_refused_or_the_same_here(name: str) -> None:
    assert (name.replace("_", "-") in FOREIGN_FLAGS) != (name in EngineConfig.model_fields)


def test_every_setting_that_shapes_steps_is_on_the_page() -> None:
    steps = (
        "max_num",
        "long_prefill",
        "prefix_caching_hash_algo",
        "scheduling",
        "priority",
        "stream",
        "watermark",
        "kv_cache",
    )
    missing = [
        name
        for name in EngineConfig.model_fields
        if name.startswith(steps) and f"--{name.replace('_', '-')}" not in PAGE
    ]
    assert not missing
