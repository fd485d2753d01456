"""What a mesh is made of and what keeps it from disaggregating, as its proxy's metrics say, for people at a terminal."""

from collections.abc import Iterator

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pdmesh.cli.engine_states import engine_states
from pdmesh.errors import ConfigError, InternalError, PeerUnavailable

TIMEOUT_S = 5.0
PREFIX = "pdmesh_proxy_"
COUNTED = {"engines_resting": "resting after failures", "engines_refused": "not used, they serve another model"}


def status_lines(url: str, api_key: str) -> list[str]:
    """Ask the proxy behind an API's base URL. Raises PeerUnavailable when nobody answers, InternalError for what it answers."""
    return list(_lines(*_asked(url, api_key)))


def status_json(url: str, api_key: str) -> str:
    """The same for programs. Raises as `status_lines` does."""
    return as_json(*_asked(url, api_key))


def as_json(samples: list[Sample], told: dict[str, Sample]) -> str:
    """One object: the engines in use, those that are listed and not used, and pairs that cannot hand over."""
    listed = {"unreached": f"{PREFIX}engines_unreached", "unpaired": f"{PREFIX}unpaired_engines"}
    found: dict[str, object] = {"engines": engine_states(samples)}
    found |= {key: [sample.labels for sample in samples if sample.name == name] for key, name in listed.items()}
    found |= {name: int(told[name].value) for name in (*COUNTED, "requests_in_flight") if name in told}
    return msgspec.json.encode(found).decode()


def _asked(url: str, api_key: str) -> tuple[list[Sample], dict[str, Sample]]:
    samples = [sample for family in text_string_to_metric_families(_metrics(url, api_key)) for sample in family.samples]
    told = {sample.name.removeprefix(PREFIX): sample for sample in samples if sample.name.startswith(PREFIX)}
    if "engines" not in told:
        raise InternalError(f"{url} is no proxy of pdmesh: it has no metric {PREFIX}engines")
    return samples, told


def _lines(samples: list[Sample], told: dict[str, Sample]) -> Iterator[str]:
    roles = [sample for sample in samples if sample.name == f"{PREFIX}engines" and sample.value]
    yield "engines: " + (", ".join(f"{sample.value:.0f} {sample.labels['role']}" for sample in roles) or "none")
    yield from (f"  {engine.line}" for engine in engine_states(samples))
    for name, words in COUNTED.items():
        if name in told and (count := told[name].value):
            yield f"  {count:.0f} {words}"
    yield from _models([sample for sample in samples if sample.name == f"{PREFIX}engine_models"])
    for sample in samples:
        if sample.name == f"{PREFIX}engines_unreached":
            yield f"  listed, but not used: {sample.labels['address']}: {sample.labels['why']}"
    yield f"requests in flight: {told['requests_in_flight'].value:.0f}"
    for sample in samples:
        if sample.name == f"{PREFIX}unpaired_engines":
            yield f"not disaggregated: {sample.labels['why']}"


def _models(samples: list[Sample]) -> Iterator[str]:
    """Each model once, with who has it, those in use first."""
    engines: dict[tuple[bool, str, str], list[str]] = {}
    for sample in samples:
        labels = sample.labels
        key = (not sample.value, labels["fingerprint"], labels["model"])
        engines.setdefault(key, []).append(f"{labels['engine']} ({labels['role']})")
    for (is_refused, fingerprint, model), names in sorted(engines.items()):
        words = "not used: " if is_refused else ""
        yield f"  {words}model {model}, fingerprint {fingerprint}: {', '.join(sorted(names))}"


def _metrics(url: str, api_key: str) -> str:
    root = url.rstrip("/").removesuffix("/v1")
    # PDMESH_API_KEY may hold several.
    key = api_key.partition(",")[0].strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{root}/metrics", headers=headers, timeout=TIMEOUT_S)
    except httpx.InvalidURL as exc:
        raise ConfigError(f"url: {url!r} is no URL: {exc}") from None
    except httpx.HTTPError as exc:
        raise PeerUnavailable(f"{url} cannot be reached: {str(exc) or type(exc).__name__}") from None
    if answer.status_code != 200:
        raise InternalError(f"{root}/metrics: {answer.status_code}: {answer.text[:200]}")
    return answer.text
