"""Reads what compose and Kubernetes would run: one record per service, whatever the format it came from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
KUBERNETES = COMPOSE / "kubernetes"
SERVICES = ("proxy", "prefill", "decode", "kvcache")
ENGINES = ("prefill", "decode")
SECRET = "a-secret-for-the-tests"
API_KEY = "a-key-for-the-tests"


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """How one service is started."""

    service: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    config: str
    """Text of the file that is mounted at /etc/pdmesh/config.toml."""


@cache
def compose_config(*files: str) -> dict[str, Any]:
    """What docker-compose makes of the files; raises CalledProcessError with its complaint."""
    flags = [part for name in files for part in ("-f", str(COMPOSE / name))]
    environment = os.environ | {"PDMESH_SECRET": SECRET, "PDMESH_API_KEY": API_KEY}
    done = subprocess.run(
        ["docker-compose", *flags, "config"], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    loaded: dict[str, Any] = yaml.safe_load(done.stdout)
    return loaded


def from_compose(service: str) -> Deployed:
    """One service of the CPU file; without docker-compose, the file is read as YAML and its variables filled in."""
    if shutil.which("docker-compose"):
        described = compose_config("docker-compose.yml")["services"][service]
    else:
        described = yaml.safe_load(_fill_in((COMPOSE / "docker-compose.yml").read_text()))["services"][service]
    mounts = [volume.split(":")[0] for volume in described["volumes"] if ":/etc/pdmesh/config.toml" in volume]
    return Deployed(
        service=service,
        command=described["command"],
        environment={name: str(value) for name, value in described["environment"].items()},
        config=(COMPOSE / mounts[0]).read_text(),
    )


@cache
def kubernetes_objects(overlay: str) -> list[dict[str, Any]]:
    """All objects of an overlay, made by kubectl; without it, the base alone with its generated ConfigMaps."""
    if shutil.which("kubectl"):
        done = subprocess.run(
            ["kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return [each for each in yaml.safe_load_all(done.stdout) if each]
    base = KUBERNETES / "base"
    kustomization = yaml.safe_load((base / "kustomization.yaml").read_text())
    objects = [each for name in kustomization["resources"] for each in yaml.safe_load_all((base / name).read_text())]
    for generator in kustomization["configMapGenerator"]:
        data = dict(literal.split("=", 1) for literal in generator.get("literals", []))
        for entry in generator.get("files", []):
            key, path = entry.split("=", 1)
            data[key] = (base / path).read_text()
        metadata = {"name": generator["name"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    return objects


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def from_kubernetes(service: str, overlay: str = "cpu") -> Deployed:
    """One Deployment's container, its references resolved as the cluster would."""
    objects = kubernetes_objects(overlay)
    maps = of_kind(objects, "ConfigMap")
    pod = of_kind(objects, "Deployment")[service]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    config_mount = next(mount for mount in container["volumeMounts"] if mount["mountPath"] == "/etc/pdmesh")
    return Deployed(
        service=service,
        command=container["command"],
        environment={entry["name"]: _value(entry, maps, container["resources"]) for entry in container["env"]},
        config=maps[volumes[config_mount["name"]]["configMap"]["name"]]["data"]["config.toml"],
    )


def _value(entry: dict[str, Any], maps: dict[str, dict[str, Any]], resources: dict[str, dict[str, Any]]) -> str:
    if "value" in entry:
        return str(entry["value"])
    source = entry["valueFrom"]
    if "configMapKeyRef" in source:
        return str(maps[source["configMapKeyRef"]["name"]]["data"][source["configMapKeyRef"]["key"]])
    if "secretKeyRef" in source:
        return {"secret": SECRET, "api-key": API_KEY}[source["secretKeyRef"]["key"]]
    if "resourceFieldRef" in source:
        amount, _, name = source["resourceFieldRef"]["resource"].partition(".")
        return str(resources[amount][name])
    return {"status.podIP": "127.0.0.1"}[source["fieldRef"]["fieldPath"]]


def _fill_in(text: str) -> str:
    known = {"PDMESH_SECRET": SECRET, "PDMESH_API_KEY": API_KEY}
    return re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", lambda match: known.get(match[1], match[2] or ""), text)
