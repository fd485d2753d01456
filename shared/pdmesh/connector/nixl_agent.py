"""The few NIXL calls that pulls and pushes need, over the bindings of the installed wheel. Used in the helper process only.

The bindings and not NIXL's Python class, because that class fixes the progress thread's delay to zero, with which two idle
agents were measured to take half a core each. With a delay the thread blocks on UCX's event descriptors, wakes when there
is traffic, and took no measurable CPU while 64 blocks of 720 KiB moved faster than before.
"""

import contextlib
import importlib
import logging
import os
from dataclasses import replace
from typing import Any

from pdmesh.connector.native_agent import AgentSettings, CopyState, NothingPosted, Ranges, WritingAgent
from pdmesh.connector.paired_agent import PairedAgent

log = logging.getLogger(__name__)

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""Import names under which NIXL is published."""
BACKEND = "UCX"
# Events wake the thread at once; this only bounds the harm of one that was missed, well within a handshake's 4.5 s.
PROGRESS_DELAY_US = 2_000_000


class NixlAgent(WritingAgent):
    """One NIXL agent with the UCX backend. Handles are NIXL's own.

    When a write is done its bytes are at the peer: NIXL's UCX plug-in flushes the endpoint behind the puts of a request and
    counts that flush to the request (nixlUcxEngine::sendXferRange in src/plugins/ucx/ucx_backend.cpp), and UCX promises of
    ucp_ep_flush_nbx that all operations before it are complete at both ends (its API reference, UCP endpoint).

    To release a request that runs is no end: the plug-in cancels it and forgets it, and blocks were seen to arrive for 0.3 s
    after that. A lost connection is one, as UCX completes all that was under way on the endpoint with it (tried: after the
    owner's SIGKILL not a byte came); with threads of its own an agent has several endpoints to a peer, and one of them says
    nothing of the others.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._bindings = _import_bindings()
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_DELAY_US
        self._name = settings.name
        self._agent = self._bindings.nixlAgent(settings.name, config)
        parameters = {"num_threads": str(settings.num_threads)} if settings.num_threads else {}
        self._backends = [self._agent.createBackend(BACKEND, parameters)]
        self._has_many_endpoints = settings.num_threads > 0

    def register(self, address: int, num_bytes: int) -> None:
        regions = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, [(address, num_bytes, 0, "")])
        self._agent.registerMem(regions, self._backends)

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def add_peer(self, metadata: bytes) -> str:
        if metadata == self.metadata():
            # Its own pool, at the start's probe: NIXL refuses to load what it has.
            return self._name
        name = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        if name != self._name:
            self._agent.invalidateRemoteMD(name)

    def read(self, local: Ranges, remote: Ranges, peer: str) -> int:
        return self._post(self._bindings.NIXL_READ, local, remote, peer)

    def write(self, local: Ranges, remote: Ranges, peer: str) -> int:
        return self._post(self._bindings.NIXL_WRITE, local, remote, peer)

    def _post(self, operation: Any, local: Ranges, remote: Ranges, peer: str) -> int:
        segment = self._bindings.DRAM_SEG
        try:
            handle = self._agent.createXferReq(
                operation,
                self._bindings.nixlXferDList(segment, local),
                self._bindings.nixlXferDList(segment, remote),
                peer,
                b"",
                self._backends,
            )
        except Exception as exc:  # any of the bindings' classes
            raise NothingPosted(str(exc)) from exc
        try:
            self._agent.postXferReq(handle, b"")
        except Exception as exc:  # any of the bindings' classes
            if self._is_over(exc):
                with contextlib.suppress(Exception):  # the first is the one to tell
                    self._agent.releaseXferReq(handle)
                raise NothingPosted(str(exc)) from exc
            raise
        return int(handle)

    def state(self, handle: int) -> CopyState:
        try:
            status = self._agent.getXferStatus(handle)
        except Exception as exc:  # the bindings raise one of a dozen classes without a common base
            if self._is_over(exc):
                return CopyState.FAILED
            log.warning("a copy of NIXL's failed, and may go on for all that is known: %s", exc)
            return CopyState.UNSETTLED
        if status == self._bindings.NIXL_SUCCESS:
            return CopyState.DONE
        return CopyState.RUNNING if status == self._bindings.NIXL_IN_PROG else CopyState.UNSETTLED

    def release(self, handle: int) -> None:
        if self.state(handle) is CopyState.RUNNING:
            raise RuntimeError("the copy runs")
        self._agent.releaseXferReq(handle)

    def _is_over(self, failure: Exception) -> bool:
        """Whether a copy's failure is that of its connection, and so of all of it. What is not found is a peer whose metadata
        NIXL dropped, as it does where another copy of that peer found the connection lost; nobody else drops it under a copy."""
        of_connection = (self._bindings.nixlRemoteDisconnectError, self._bindings.nixlNotFoundError)
        return isinstance(failure, of_connection) and not self._has_many_endpoints


def nixl_agents(settings: AgentSettings) -> WritingAgent:
    """An agent that shares large reads within the host with another one, where there is a CPU for that and NIXL has no threads
    of its own that do."""
    first = NixlAgent(settings)
    if settings.num_threads or len(os.sched_getaffinity(0)) < 2:
        return first
    return PairedAgent(first, lambda: NixlAgent(replace(settings, name=f"{settings.name}/2")))


def _import_bindings() -> Any:
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
    raise RuntimeError(f"none of the packages {', '.join(PACKAGES)} is installed")
