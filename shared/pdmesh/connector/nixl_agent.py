"""The few NIXL calls that pulls and pushes need, over the bindings of the installed wheel. Used in the helper process only.

The bindings and not NIXL's Python class, because that class fixes the progress thread's delay to zero, with which two idle
agents were measured to take half a core each. With a delay the thread blocks on UCX's event descriptors, wakes when there
is traffic, and took no measurable CPU while 64 blocks of 720 KiB moved faster than before.
"""

import contextlib
import importlib
from typing import Any

from pdmesh.connector.native_agent import AgentSettings, CopyState, Ranges, WritingAgent

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
        handle = self._agent.createXferReq(
            operation,
            self._bindings.nixlXferDList(segment, local),
            self._bindings.nixlXferDList(segment, remote),
            peer,
            b"",
            self._backends,
        )
        try:
            self._agent.postXferReq(handle, b"")
        except Exception:
            with contextlib.suppress(Exception):  # any of the bindings' classes; the first is the one to tell
                self._agent.releaseXferReq(handle)
            raise
        return int(handle)

    def state(self, handle: int) -> CopyState:
        try:
            status = self._agent.getXferStatus(handle)
        except Exception:  # the bindings raise one of a dozen classes without a common base for a lost peer
            return CopyState.FAILED
        if status == self._bindings.NIXL_SUCCESS:
            return CopyState.DONE
        return CopyState.RUNNING if status == self._bindings.NIXL_IN_PROG else CopyState.FAILED

    def release(self, handle: int) -> None:
        self._agent.releaseXferReq(handle)


def _import_bindings() -> Any:
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
    raise RuntimeError(f"none of the packages {', '.join(PACKAGES)} is installed")
