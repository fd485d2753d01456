"""The model of this proxy's new requests: chosen anew whenever an engine joins, leaves or drains; told and counted here.

A switch moves no request: what runs keeps the model that it began with, for as long as an engine has it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.protocol.exchange import KVNames
from pdmesh_proxy.engine_session import EngineSession
from pdmesh_proxy.metrics import EngineModel, ProxyMetrics
from pdmesh_proxy.model_choice import Candidate, choose_model, serves

log = logging.getLogger(__name__)

# Requests that began with a model seldom outlive more switches than this.
NUM_REMEMBERED = 16
# One of each kind tells what is wrong; an error need not list a large mesh.
NUM_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """An engine that answers, and how it counts."""

    candidate: Candidate
    session: EngineSession

    @property
    def model(self) -> str:
        info = self.session.info
        return f"{info.model} ({info.model_fingerprint})"


class ServedModel:
    """`choose` is told of every engine that answers; the rest says what came of it."""

    def __init__(self, wanted: str, metrics: ProxyMetrics) -> None:
        self._wanted, self._metrics = wanted, metrics
        self.names: KVNames | None = None
        """None until an engine has answered that has a model which may be served."""
        self.name = ""
        """What the engines call it."""
        self._heard: Sequence[Heard] = ()
        self._past: dict[str, KVNames] = {}
        self._refused: dict[str, str] = {}
        """Address -> process there with another model, already logged."""

    def choose(self, heard: Sequence[Heard]) -> None:
        """Look at all engines that answer."""
        self._heard = heard
        # One process reached under two addresses is one engine.
        by_peer: dict[str, Candidate] = {}
        for each in sorted(heard, key=lambda each: each.candidate.can_decode):
            by_peer[each.session.peer_id] = each.candidate
        before, name_before = self.names, self.name
        self.names = choose_model(before, list(by_peer.values()), wanted=self._wanted)
        if self.names is not None:
            self._name(self.names)
            if before is None or before.model_fingerprint != self.names.model_fingerprint:
                self._refused.clear()
                if before is not None:
                    self._tell_switch(f"{name_before} ({before.model_fingerprint})", self.names)
        self._tell_refused()
        self._metrics.engine_models([self._shown(each) for each in heard])

    def named(self, fingerprint: str) -> KVNames | None:
        """The model of a fingerprint that was served once; that of new requests for an empty one."""
        if not fingerprint:
            return self.names
        return self._past.get(fingerprint) or KVNames(model_fingerprint=fingerprint, layout_fingerprints=())

    def forget(self, address: str) -> None:
        """The address is not listed any more."""
        self._refused.pop(address, None)

    def why_none(self, model: KVNames | None) -> str:
        """Why no engine takes a request, empty when that is not for its model; `model`: the one that it began with."""
        strangers = [each for each in self._heard if not serves(each.candidate, self.names)]
        strangers.sort(key=lambda each: each.session.info.engine_id)
        if self._wanted and strangers and len(strangers) == len(self._heard):
            told = ", ".join(f"{each.session.info.engine_id} serves {each.model}" for each in strangers[:NUM_NAMED])
            more = len(strangers) - NUM_NAMED
            return f"no engine has the model that model-fingerprint {self._wanted} asks for: {told}" + (
                f", and {more} more" if more > 0 else ""
            )
        if model is not None and self.names is not None and model.model_fingerprint != self.names.model_fingerprint:
            return (
                f"no engine is left with the model that this answer began with ({model.model_fingerprint}); the mesh "
                f"serves {self.name} ({self.names.model_fingerprint}) now"
            )
        return ""

    def _name(self, names: KVNames) -> None:
        self._past.pop(names.model_fingerprint, None)
        self._past[names.model_fingerprint] = names
        if len(self._past) > NUM_REMEMBERED:
            del self._past[next(iter(self._past))]
        called = sorted(
            each.session.info.model
            for each in self._heard
            if each.candidate.names.model_fingerprint == names.model_fingerprint
        )
        self.name = called[0] if called else self.name

    def _tell_switch(self, before: str, names: KVNames) -> None:
        self._metrics.model_switches.inc()
        usable = [each for each in self._heard if serves(each.candidate, names)]
        log.warning(
            "new requests go to another model: %s (%s), with which %d of %d engines can be used; what runs ends with %s",
            self.name,
            names.model_fingerprint,
            len(usable),
            len(self._heard),
            before,
        )

    def _tell_refused(self) -> None:
        """Say once of each process that it is not used, and why."""
        for each in self._heard:
            session = each.session
            if serves(each.candidate, self.names) or self._refused.get(session.address) == session.peer_id:
                continue
            self._refused[session.address] = session.peer_id
            log.warning(
                "engine %s at %s is not used: it serves %s, %s; model and quantization must be the same, and between engines "
                "that decode dtype and kv-cache-dtype too",
                session.info.engine_id,
                session.address,
                each.model,
                self._standard,
            )

    @property
    def _standard(self) -> str:
        """By what engines are measured."""
        asked = f"model-fingerprint asks for {self._wanted}" if self._wanted else ""
        if self.names is None:
            return asked
        return f"the mesh serves {self.name} ({self.names.model_fingerprint})" + (f" as {asked}" if asked else "")

    def _shown(self, heard: Heard) -> EngineModel:
        info = heard.session.info
        return EngineModel(
            engine_id=info.engine_id,
            address=heard.session.address,
            role=info.role,
            model=info.model,
            fingerprint=info.model_fingerprint,
            is_used=serves(heard.candidate, self.names),
        )
