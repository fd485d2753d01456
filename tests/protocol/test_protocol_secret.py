"""Where the mesh secret comes from, and what is said when it is none."""

from pathlib import Path

import pytest

from pdmesh.config import ServiceConfig
from pdmesh.errors import ConfigError
from pdmesh.security import MeshSecret

NOT_UTF8 = b"\xff\xfe-0123456789abcdef"


def test_a_secret_that_is_not_text_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the mesh secret is not UTF-8"):
        MeshSecret.load(ServiceConfig(secret=NOT_UTF8.decode(errors="surrogateescape")))
    file = tmp_path / "secret"
    file.write_bytes(NOT_UTF8)
    with pytest.raises(ConfigError, match=f"secret-file {file} is not UTF-8"):
        MeshSecret.load(ServiceConfig(secret_file=str(file)))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "pdmesh").mkdir()
    own = tmp_path / "pdmesh" / "mesh-secret"
    own.write_bytes(NOT_UTF8)
    own.chmod(0o600)
    with pytest.raises(ConfigError, match="mesh-secret is not UTF-8"):
        MeshSecret.load(ServiceConfig())
