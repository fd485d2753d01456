"""All engines of the mesh as this proxy knows them: endpoints come and go with discovery, `view()` is the router's picture.

Which model. New requests go to that of most engines, as `model_choice` has it; engines with another end what runs there.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from pdmesh.errors import PeerUnavailable
from pdmesh.openai.generator import ModelCard
from pdmesh.protocol.exchange import Exchange, KVNames, have_same_weights
from pdmesh.security import MeshSecret
from pdmesh_proxy.config import ProxyConfig
from pdmesh_proxy.contexts import Contexts
from pdmesh_proxy.discovery import Addresses, Discovery, Listed
from pdmesh_proxy.endpoint import Endpoint
from pdmesh_proxy.engine_metrics import EngineCollector
from pdmesh_proxy.engine_session import EngineSession, SessionSettings
from pdmesh_proxy.metrics import ProxyMetrics
from pdmesh_proxy.model_choice import Candidate, serves
from pdmesh_proxy.pairs import conversion, exchange_of, refusal
from pdmesh_proxy.served_model import Heard, ServedModel
from pdmesh_proxy.view import ClusterView, EngineView

log = logging.getLogger(__name__)

ROLE_PREFILL, ROLE_DECODE, ROLE_BOTH = "prefill", "decode", "both"


class Cluster:
    """Owns discovery and one task per endpoint, from entering its context until leaving it."""

    def __init__(self, config: ProxyConfig, *, secret: MeshSecret, metrics: ProxyMetrics) -> None:
        self._config, self._secret, self._metrics = config, secret, metrics
        self._settings = SessionSettings(
            connect_timeout_s=config.connect_timeout_s,
            heartbeat_interval_s=config.heartbeat_interval_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            buffer_tokens=config.request_buffer_tokens,
            keep_offers_s=config.keep_offers_s,
        )
        self._discovery = Discovery(
            {Listed.PREFILL: config.prefill, Listed.DECODE: config.decode},
            interval_s=config.resolve_interval_s,
            rest_interval_s=config.resolve_rest_interval_s,
            on_addresses=self._on_addresses,
            is_settled=self._is_settled,
        )
        self._endpoints: dict[str, Endpoint] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._num_used = 0
        self._leaving = False
        self._model = ServedModel(config.model_fingerprint, metrics)
        self._unlike: set[tuple[str, str]] = set()
        """Prefill and decode processes that cannot exchange KV as it is, already logged."""
        self._contexts = Contexts()
        self._vocab_size = 0
        metrics.watch(EngineCollector(self.view))

    async def __aenter__(self) -> Self:
        # The first look is awaited so that a proxy that says it is ready has at least tried.
        await self._discovery.look()
        self._start(self._discovery.run())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leaving = True
        # A cancellation that meets a breaking stream is lost in the session's TaskGroup (Python < 3.13), the wish is not.
        for endpoint in self._endpoints.values():
            endpoint.unwant()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what requests need --------------------------------------------------------------------

    def view(self, model: KVNames | None = None) -> ClusterView:
        """Picture every engine that answers and serves a model, new requests' if none is given.

        Where no engine is left that takes a request of the model, those of new requests are as good if their weights are the
        same: the last decode may have gone, and a prefill of another dtype goes on.
        """
        served = self._model.names
        engines = self._engines_of(model or served)
        is_left = any(not engine.draining for engine in engines)
        if not is_left and model and served and have_same_weights(model.description, served.description):
            engines = self._engines_of(served)
        return ClusterView(
            engines=engines,
            wants_prefill=Listed.PREFILL in self._discovery.wanted,
            wants_decode=Listed.DECODE in self._discovery.wanted,
        )

    def model_named(self, fingerprint: str) -> KVNames | None:
        """The model of a fingerprint; that of new requests for an empty one, None while it is not known."""
        return self._model.named(fingerprint)

    def why_none(self, model: KVNames | None) -> str:
        """Why no engine has the model that a request began with, or begins with now; empty when that is not the reason."""
        return self._model.why_none(model)

    def _engines_of(self, model: KVNames | None) -> tuple[EngineView, ...]:
        engines: dict[str, EngineView] = {}
        for endpoint, session in self._answering():
            if serves(_candidate(endpoint, session), model):
                # One process reached under two addresses is one engine.
                engines.setdefault(session.peer_id, _engine_view(endpoint, session))
        return tuple(engines.values())

    def _answering(self) -> list[tuple[Endpoint, EngineSession]]:
        return [
            (endpoint, endpoint.session)
            for endpoint in self._endpoints.values()
            if endpoint.session is not None and not endpoint.session.broken
        ]

    def session(self, engine: EngineView) -> tuple[Endpoint, EngineSession]:
        """The connection a view was made from. Raises PeerUnavailable when it has gone since."""
        endpoint = self._endpoints.get(engine.address)
        if endpoint is None or endpoint.session is None or endpoint.session.session_id != engine.session_id:
            raise PeerUnavailable(f"engine {engine.engine_id} at {engine.address} is gone")
        self._num_used += 1
        endpoint.last_used = self._num_used
        return endpoint, endpoint.session

    def expect_requests(self) -> None:
        """A request has come: notice engines that join or leave soon."""
        self._discovery.hurry()

    async def changed(self) -> None:
        """Return when an engine joins, leaves or drains; the caller sets the deadline."""
        await self._changed.wait()

    @property
    def serving(self) -> bool:
        """Whether some engine takes requests now."""
        return any(not engine.draining for engine in self.view().engines)

    @property
    def looking(self) -> bool:
        """Whether the model is not known because not every engine has been heard yet, as just after a start."""
        return self._model.names is None and not self._all_tried

    def card(self, created_s: int) -> ModelCard:
        """Describe the model of new requests. Raises PeerUnavailable while no engine has ever answered with it."""
        if self._model.names is None:
            why = self.why_none(None)
            raise PeerUnavailable(why or "no engine has answered yet, so the model is not known", retry_after_s=1)
        return ModelCard(
            name=self._config.served_model_name or self._model.name,
            root=self._config.model,
            max_model_len=self._contexts.longest,
            created_s=created_s,
            vocab_size=self._vocab_size,
        )

    # ---- what changes --------------------------------------------------------------------------

    def _on_addresses(self, addresses: Addresses) -> None:
        for address, endpoint in self._endpoints.items():
            if address not in addresses:
                endpoint.unwant()
        for address, listed in addresses.items():
            endpoint = self._endpoints.get(address) or self._add(address)
            endpoint.want(listed)
        self._on_change()

    def _add(self, address: str) -> Endpoint:
        endpoint = Endpoint(
            address,
            settings=self._settings,
            secret=self._secret,
            metrics=self._metrics,
            on_change=self._on_change,
        )
        self._endpoints[address] = endpoint
        self._start(self._keep(endpoint))
        return endpoint

    async def _keep(self, endpoint: Endpoint) -> None:
        # The address may be listed again while its last session ends.
        while not endpoint.unwanted:
            await endpoint.run()
        del self._endpoints[endpoint.address]
        self._model.forget(endpoint.address)
        self._on_change()

    def _start(self, life: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(life)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("a task of the cluster ended by a defect", exc_info=exc)

    def _on_change(self) -> None:
        heard = [Heard(candidate=_candidate(*each), session=each[1]) for each in self._answering()]
        # The first to answer may be the odd one out: all are heard, or found silent, before any is believed. And which of our own
        # sessions we end last says nothing.
        if not self.looking and not self._leaving:
            self._model.choose(heard)
        serving = [each.session for each in heard if serves(each.candidate, self._model.names)]
        if serving:
            self._vocab_size = serving[0].info.vocab_size
        roles = Counter(session.info.role for session in {session.peer_id: session for session in serving}.values())
        for role in (ROLE_PREFILL, ROLE_DECODE, ROLE_BOTH):
            self._metrics.engines.labels(role).set(roles[role])
        self._metrics.engines_refused.set(0 if self.looking else len(heard) - len(serving))
        self._metrics.unreached({each.address: each.problem for each in self._endpoints.values() if each.problem})
        self._contexts.note(self.view().engines)
        self._tell_of_unlike()
        if not self._is_settled():
            self._discovery.hurry()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _is_settled(self) -> bool:
        """Whether there are engines and each has an open session."""
        sessions = [endpoint.session for endpoint in self._endpoints.values()]
        return bool(sessions) and all(session is not None and not session.broken for session in sessions)

    @property
    def _all_tried(self) -> bool:
        return all(endpoint.tried for endpoint in self._endpoints.values())

    def _tell_of_unlike(self) -> None:
        """Say once of each two processes that they cannot disaggregate, or not as they are: requests are served all the same."""
        engines = self.view().engines
        pairs = {
            (prefill.peer_id, decode.peer_id): (prefill, decode)
            for prefill in engines
            for decode in engines
            if prefill.can_prefill and decode.can_decode and prefill.peer_id != decode.peer_id
        }
        unlike = {pair: kind for pair, ends in pairs.items() if (kind := exchange_of(*ends)) is not Exchange.BYTES}
        for pair in unlike.keys() - self._unlike:
            prefill, decode = pairs[pair]
            if unlike[pair] is None:
                log.warning("%s", refusal(prefill, decode))
            else:
                log.warning(
                    "%s hands over to %s by conversion: %s",
                    prefill.engine_id,
                    decode.engine_id,
                    conversion(prefill, decode),
                )
        if unlike.keys() != self._unlike:
            refused = [pairs[pair] for pair, kind in unlike.items() if kind is None]
            self._metrics.unpaired({(one.engine_id, other.engine_id): refusal(one, other) for one, other in refused})
        self._unlike = set(unlike)


def _candidate(endpoint: Endpoint, session: EngineSession) -> Candidate:
    return Candidate(
        names=session.names,
        can_decode=_roles(endpoint.listed, session.info.role)[1],
        draining=session.control.load.draining or session.closing,
    )


def _engine_view(endpoint: Endpoint, session: EngineSession) -> EngineView:
    info, load = session.info, session.control.load
    can_prefill, can_decode = _roles(endpoint.listed, info.role)
    return EngineView(
        address=endpoint.address,
        session_id=session.session_id,
        engine_id=info.engine_id,
        epoch=info.epoch,
        can_prefill=can_prefill,
        can_decode=can_decode,
        model_fingerprint=info.model_fingerprint,
        layout_fingerprints=tuple(info.layout_fingerprints),
        connectors=frozenset(info.connectors),
        protocol_min=info.protocol_min,
        protocol_max=info.protocol_max,
        capabilities=session.names.capabilities,
        description=session.names.description,
        draining=load.draining or session.closing,
        resting=endpoint.resting,
        num_sequences=max(session.num_sequences, load.num_running + load.num_waiting),
        max_model_len=info.max_model_len,
        max_step_tokens=info.max_num_batched_tokens,
        waiting_tokens=max(session.waiting_tokens, load.num_waiting_tokens),
        kv_usage=load.kv_usage,
        last_used=endpoint.last_used,
    )


def _roles(listed: frozenset[Listed], role: str) -> tuple[bool, bool]:
    """An engine does what it is listed for and can do; one listed for what it cannot do does what it can."""
    able = (role in (ROLE_PREFILL, ROLE_BOTH), role in (ROLE_DECODE, ROLE_BOTH))
    asked = (able[0] and Listed.PREFILL in listed, able[1] and Listed.DECODE in listed)
    return asked if any(asked) else able
