"""Lists of cores, as flags, environment and TOML have them."""

from pathlib import Path

import pytest

from pdmesh.config import EngineConfig, load_config
from pdmesh.config.cores import format_cores, parse_cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [("", ()), (" ", ()), ("3", (3,)), ("0-3,8", (0, 1, 2, 3, 8)), ("8, 0-1 ", (8, 0, 1)), ("5-5,1023", (5, 1023))],
)
def test_cores_come_in_the_order_in_which_they_are_named(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize(
    "text", ["0-", "-1", "0..3", "0 1", "0-3-5", ",", "0x1", "1024", "99999", "2-1", "0,0", "0-3,3", "²"]
)
def test_what_is_no_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="core"):
        parse_cores(text)


def test_cores_are_told_as_they_are_asked_for() -> None:
    assert format_cores(set()) == ""
    assert format_cores({8, 0, 2, 1}) == "0-2,8"
    assert set(parse_cores(format_cores({1, 3, 4, 5, 9}))) == {1, 3, 4, 5, 9}


def test_cores_can_be_set_in_every_way(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('cpu_cores = "0-3,8"\ncpu_nice = 3\n')
    from_file = load_config(EngineConfig, ["--config", str(file)], prog="pdmesh decode", environ={})
    assert (from_file.cpu_cores, from_file.cpu_nice) == ("0-3,8", 3)
    environ = {"PDMESH_CPU_CORES": "1,2", "PDMESH_CPU_NICE": "7"}
    assert load_config(EngineConfig, [], prog="pdmesh decode", environ=environ).cpu_cores == "1,2"
    flags = ["--cpu-cores", "5-6", "--cpu-threads", "2"]
    assert load_config(EngineConfig, flags, prog="pdmesh decode", environ=environ).cpu_cores == "5-6"
