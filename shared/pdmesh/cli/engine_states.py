"""The engines that a proxy uses, read from its metrics: one line or one JSON object each."""

from collections.abc import Sequence

import msgspec
from prometheus_client.samples import Sample

PREFIX = "pdmesh_proxy_engine_"


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    engine: str
    address: str
    role: str
    state: str
    num_sequences: int
    """Running and waiting."""
    kv_usage: float
    context_tokens: int | None
    """Most tokens of a request that it holds; None from a proxy of before that does not tell."""

    @property
    def line(self) -> str:
        """It, for people."""
        load = f"{self.num_sequences} sequences, {self.kv_usage:.0%} of its KV blocks in use"
        context = "" if self.context_tokens is None else f", a context of {self.context_tokens} tokens"
        return f"{self.engine} ({self.role}) at {self.address}: {self.state}, {load}{context}"


def engine_states(samples: Sequence[Sample]) -> list[EngineState]:
    """Those of a scrape, by name; none from a proxy of before that tells only how many there are."""
    loads = {
        (sample.name.removeprefix(PREFIX), sample.labels["engine"], sample.labels["address"]): sample.value
        for sample in samples
        if sample.name in (f"{PREFIX}sequences", f"{PREFIX}kv_usage_ratio", f"{PREFIX}context_tokens")
    }
    found = []
    for sample in samples:
        if sample.name == f"{PREFIX}state":
            engine, address = sample.labels["engine"], sample.labels["address"]
            context = loads.get(("context_tokens", engine, address))
            found.append(
                EngineState(
                    engine=engine,
                    address=address,
                    role=sample.labels["role"],
                    state=sample.labels["state"],
                    num_sequences=int(loads.get(("sequences", engine, address), 0)),
                    kv_usage=loads.get(("kv_usage_ratio", engine, address), 0.0),
                    context_tokens=None if context is None else int(context),
                )
            )
    return sorted(found, key=lambda each: (each.role, each.engine, each.address))
