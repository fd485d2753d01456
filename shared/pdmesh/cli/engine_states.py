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

    @property
    def line(self) -> str:
        """It, for people."""
        load = f"{self.num_sequences} sequences, {self.kv_usage:.0%} of its KV blocks in use"
        return f"{self.engine} ({self.role}) at {self.address}: {self.state}, {load}"


def engine_states(samples: Sequence[Sample]) -> list[EngineState]:
    """Those of a scrape, by name; none from a proxy of before that tells only how many there are."""
    loads = {
        (sample.name.removeprefix(PREFIX), sample.labels["engine"], sample.labels["address"]): sample.value
        for sample in samples
        if sample.name in (f"{PREFIX}sequences", f"{PREFIX}kv_usage_ratio")
    }
    found = []
    for sample in samples:
        if sample.name == f"{PREFIX}state":
            engine, address = sample.labels["engine"], sample.labels["address"]
            found.append(
                EngineState(
                    engine=engine,
                    address=address,
                    role=sample.labels["role"],
                    state=sample.labels["state"],
                    num_sequences=int(loads.get(("sequences", engine, address), 0)),
                    kv_usage=loads.get(("kv_usage_ratio", engine, address), 0.0),
                )
            )
    return sorted(found, key=lambda each: (each.role, each.engine, each.address))
