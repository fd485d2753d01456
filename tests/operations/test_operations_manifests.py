"""compose and Kubernetes files: valid for their own tools, loadable by our services, and consistent with each other."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pdmesh.config import ServiceConfig, load_config
from support.manifests import (
    COMPOSE,
    ENGINES,
    KUBERNETES,
    ROOT,
    SECRET,
    SERVICES,
    Deployed,
    compose_config,
    from_compose,
    from_kubernetes,
    kubernetes_objects,
    of_kind,
)

needs_docker_compose = pytest.mark.skipif(
    not shutil.which("docker-compose"), reason="docker-compose is not installed; .ci/run installs it"
)
CONFIG_CLASSES = {
    "proxy": "ProxyConfig",
    "prefill": "PrefillConfig",
    "decode": "DecodeConfig",
    "kvcache": "KVCacheConfig",
}
ORIGINS = {"compose": from_compose, "kubernetes": from_kubernetes}


def load(deployed: Deployed, folder: Path) -> Any:
    """What the service itself makes of its command, environment and file."""
    path = folder / "config.toml"
    path.write_text(deployed.config)
    secret = folder / "secret"
    secret.write_text(SECRET)
    assert deployed.command[:4] == ["pdmesh", deployed.service, "--config", "/etc/pdmesh/config.toml"]
    environ = {
        name: value.replace("/etc/pdmesh-secret/secret", str(secret)) for name, value in deployed.environment.items()
    }
    module = importlib.import_module(f"pdmesh_{deployed.service}.config")
    cls: type[ServiceConfig] = getattr(module, CONFIG_CLASSES[deployed.service])
    return load_config(cls, ["--config", str(path), *deployed.command[4:]], prog="test", environ=environ)


@needs_docker_compose
@pytest.mark.parametrize("files", [("docker-compose.yml",), ("docker-compose.yml", "docker-compose.gpu.yml")])
def test_docker_compose_accepts_the_files(files: tuple[str, ...]) -> None:
    services = compose_config(*files)["services"]
    assert set(services) - {"model"} == set(SERVICES) | {"valkey", "prometheus"}
    for engine in ENGINES if len(files) == 2 else ():
        assert services[engine]["image"].endswith(":gpu")
        assert services[engine]["deploy"]["resources"]["reservations"]["devices"]


def test_a_model_from_hugging_face_can_be_fetched_once_and_is_found_without_network() -> None:
    """The mesh's network is internal; one service with a way out fills the folder that all the others read."""
    described = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())
    model = described["services"]["model"]
    assert model["profiles"] == ["fetch"]
    assert not (described["networks"][model["networks"][0]] or {}).get("internal")
    (volume,) = model["volumes"]
    for service in ("proxy", *ENGINES):
        assert f"{volume}:ro" in described["services"][service]["volumes"]
        assert " HF_HOME=/models/huggingface" in (ROOT / "services" / service / "Dockerfile").read_text()
    source = model["command"][2]
    done = subprocess.run(
        [sys.executable, "-c", source], env=os.environ | {"PDMESH_MODEL": "smollm2-135m"}, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize("origin", ORIGINS)
def test_tier_starts_whenever_valkey_does(origin: str, tmp_path: Path) -> None:
    config = load(ORIGINS[origin]("kvcache"), tmp_path)
    assert config.valkey
    assert not config.valkey_required


@needs_docker_compose
def test_compose_without_a_secret_says_what_to_do() -> None:
    done = subprocess.run(
        ["docker-compose", "-f", str(COMPOSE / "docker-compose.yml"), "config"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "set PDMESH_SECRET in .env" in done.stderr


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_kubernetes_objects_are_valid(overlay: str) -> None:
    for each in kubernetes_objects(overlay):
        kubernetes_validate.validate(each, "1.30", strict=True)


def test_example_secret_has_what_the_deployments_ask_for() -> None:
    example = yaml.safe_load((KUBERNETES / "secret.example.yaml").read_text())
    kubernetes_validate.validate(example, "1.30", strict=True)
    asked = set(re.findall(r"name: pdmesh-secret, key: ([\w-]+)", _base_text())) | set(
        re.findall(r"secretName: pdmesh-secret.*?key: ([\w-]+)", _base_text())
    )
    assert asked == set(example["stringData"]) == {"secret", "api-key"}


def _base_text() -> str:
    return "".join(path.read_text() for path in sorted((KUBERNETES / "base").glob("*.yaml")))


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("origin", ORIGINS)
def test_service_loads_what_it_is_given(origin: str, service: str, tmp_path: Path) -> None:
    config = load(ORIGINS[origin](service), tmp_path)
    assert config.host == "0.0.0.0"
    assert config.secret or config.secret_file


@pytest.mark.parametrize("service", SERVICES)
def test_config_file_beside_each_service_loads(service: str) -> None:
    cls = getattr(importlib.import_module(f"pdmesh_{service}.config"), CONFIG_CLASSES[service])
    path = ROOT / "services" / service / "config.toml"
    assert load_config(cls, ["--config", str(path)], prog="test", environ={}).on_loopback


@pytest.mark.parametrize("origin", ORIGINS)
def test_names_and_ports_meet(origin: str, tmp_path: Path) -> None:
    """Every address that one service is given is a name and a port that another one has."""
    configs = {service: load(ORIGINS[origin](service), tmp_path) for service in SERVICES}
    listening = {f"{name}:{getattr(config, 'grpc_port', 0)}" for name, config in configs.items()}
    proxy: Any = configs["proxy"]
    assert proxy.prefill == ["prefill:8101"]
    assert proxy.decode == ["decode:8201"]
    # Without it a stock router's decode leg is refused off loopback.
    decode: Any = configs["decode"]
    assert decode.kv_peers == proxy.prefill
    given = {*proxy.prefill, *proxy.decode, *(configs[engine].kvcache for engine in ENGINES)}
    assert given <= listening


def test_kubernetes_ports_probes_and_policies_meet(tmp_path: Path) -> None:
    objects = kubernetes_objects("cpu")
    services, policies = of_kind(objects, "Service"), of_kind(objects, "NetworkPolicy")
    for name, deployment in of_kind(objects, "Deployment").items():
        pod = deployment["spec"]["template"]["spec"]
        container = pod["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for port in services[name]["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
        for probe in ("readinessProbe", "livenessProbe"):
            check = container[probe]
            assert (check.get("httpGet") or check["tcpSocket"])["port"] in ports
        allowed = {
            port["port"]
            for policy in policies.values()
            if policy["spec"]["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/name") == name
            for rule in policy["spec"].get("ingress", [])
            for port in rule["ports"]
        }
        expected = {number for key, number in ports.items() if key in ("grpc", "valkey") or name == "proxy"}
        assert expected <= allowed, name
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["resources"]["limits"]["memory"]
        assert pod["terminationGracePeriodSeconds"] > 30 if name in SERVICES else True
    for name in (*ENGINES, "kvcache"):
        assert services[name]["spec"]["clusterIP"] == "None"


@pytest.mark.skipif(not shutil.which("kubectl"), reason="components are put together by kubectl")
@pytest.mark.parametrize("service", SERVICES)
def test_mutual_tls_is_one_component_on_top(service: str, tmp_path: Path) -> None:
    """Each service is given the three files of the one certificate, whose name and use are what all of them expect."""
    objects = kubernetes_objects("cpu-mtls")
    for each in objects:
        if not each["apiVersion"].startswith("cert-manager.io/"):
            kubernetes_validate.validate(each, "1.30", strict=True)
    config = load(from_kubernetes(service, "cpu-mtls"), tmp_path)
    assert config.secret_file
    certificate = of_kind(objects, "Certificate")["pdmesh-tls"]["spec"]
    assert certificate["dnsNames"] == [config.tls_server_name]
    assert {"server auth", "client auth"} <= set(certificate["usages"])
    pod = of_kind(objects, "Deployment")[service]["spec"]["template"]["spec"]
    (volume,) = [
        each for each in pod["volumes"] if each.get("secret", {}).get("secretName") == certificate["secretName"]
    ]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == volume["name"]]
    # cert-manager's names.
    names = {"tls_cert": "tls.crt", "tls_key": "tls.key", "tls_ca": "ca.crt"}
    assert {name: f"{mount['mountPath']}/{file}" for name, file in names.items()} == {
        name: getattr(config, name) for name in names
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_data_plane_range_is_the_one_that_ucx_gets(engine: str) -> None:
    """UCX cannot authenticate, so the policy that admits it must name its ports and admit engines only."""
    environment = from_kubernetes(engine).environment
    low, high = environment["UCX_TCP_PORT_RANGE"].split("-")
    policy = of_kind(kubernetes_objects("cpu"), "NetworkPolicy")[f"data-plane-{engine}"]["spec"]["ingress"][0]
    assert policy["ports"] == [{"protocol": "TCP", "port": int(low), "endPort": int(high)}]
    senders = {sender["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for sender in policy["from"]}
    assert senders == set(ENGINES)


@pytest.mark.parametrize("engine", ENGINES)
def test_packed_weights_have_room_and_are_shared(engine: str) -> None:
    """They lay in /tmp: a pod was evicted with a model of more than its 1 GiB, a container packed anew at each start."""
    dockerfile = (ROOT / "services" / engine / "Dockerfile").read_text()
    (folder,) = re.findall(r" XDG_CACHE_HOME=(\S+)", dockerfile)
    # A named volume takes its owner from the image's folder.
    assert f"RUN install -d -o 10001 -g 10001 {folder}\n" in dockerfile
    assert "\nUSER 10001:10001\n" in dockerfile
    pod = of_kind(kubernetes_objects("cpu"), "Deployment")[engine]["spec"]["template"]["spec"]
    (name,) = [mount["name"] for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == folder]
    assert [volume for volume in pod["volumes"] if volume["name"] == name] == [{"name": name, "emptyDir": {}}]
    described = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())
    assert f"cache:{folder}" in described["services"][engine]["volumes"]
    assert "cache" in described["volumes"]
    assert folder not in described["services"][engine]["tmpfs"]


def test_prefill_gives_way_to_decode_or_has_cores_of_its_own(tmp_path: Path) -> None:
    """Niceness does not reach from one container to another."""
    services = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())["services"]
    assert services["prefill"]["cpu_shares"] == 335
    assert [name for name in services if "cpu_shares" in services[name]] == ["prefill"]
    for engine in ENGINES:
        deployment = of_kind(kubernetes_objects("cpu"), "Deployment")[engine]
        requested = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        config: Any = load(from_kubernetes(engine), tmp_path)
        assert config.cpu_threads == int(requested) > 0


@pytest.mark.parametrize("service", SERVICES)
def test_dockerfile_installs_that_service_only(service: str) -> None:
    text = (ROOT / "services" / service / "Dockerfile").read_text()
    extras = re.findall(r'"/src\[([\w,]+)\]"', text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [extra.split(",")[0] for extra in extras] == [service]
    assert set(extras[0].split(",")) <= set(known)
    assert "\nUSER 10001:10001\n" in text
    if service not in ENGINES:
        assert "torch" not in text.replace("no torch", "")


def test_prometheus_scrapes_every_service_at_its_port(tmp_path: Path) -> None:
    scraped = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    ports = {job["job_name"]: job["dns_sd_configs"][0]["port"] for job in scraped}
    assert ports == {service: load(from_compose(service), tmp_path).port for service in SERVICES}
