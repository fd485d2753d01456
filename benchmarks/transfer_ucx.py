"""Bare UCX for `transfer.py`: RMA reads of registered memory by UCP's own calls, over the very library that NIXL has loaded.

Only what such a read needs, by ctypes; the structures are those of UCX's ABI, whose fields are named by a mask and only ever
added to. Nothing is set that UCX does not choose by itself but the transports' names, which the environment gives to all.
"""

import ctypes
import re
import select
import threading
from pathlib import Path
from typing import Any

API_VERSION = (1, 18)
"""Asked for; every later library of the same major answers to it."""
FEATURE_RMA, FEATURE_WAKEUP = 1 << 1, 1 << 4
PARAMS_FEATURES = 1 << 0
WORKER_THREAD_MODE, THREAD_MODE_MULTI = 1 << 0, 2
MAP_ADDRESS, MAP_LENGTH = 1 << 0, 1 << 1
ENDPOINT_ADDRESS = 1 << 0
OPERATION_MEMORY = 1 << 8
NO_MESSAGE, IN_PROGRESS, BUSY = 0, 1, -15
LEAST_ERROR = 2**64 - 100
"""Pointers from here on are error codes."""

_u32, _u64, _pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class _Params(ctypes.Structure):
    # What follows is not read, as the mask does not name it.
    _fields_ = (("mask", _u64), ("features", _u64), ("rest", _u64 * 10))


class _WorkerParams(ctypes.Structure):
    _fields_ = (("mask", _u64), ("thread_mode", _u32), ("rest", _u64 * 30))


class _MapParams(ctypes.Structure):
    _fields_ = (("mask", _u64), ("address", _u64), ("length", _u64), ("rest", _u64 * 4))


class _EndpointParams(ctypes.Structure):
    _fields_ = (("mask", _u64), ("address", _pointer), ("rest", _u64 * 14))


class _OperationParams(ctypes.Structure):
    _fields_ = (
        ("mask", _u32),
        ("flags", _u32),
        ("request", _pointer),
        ("callback", _pointer),
        ("datatype", _u64),
        ("user_data", _pointer),
        ("reply_buffer", _pointer),
        ("memory_type", _u32),
        ("received", _pointer),
        ("memory", _pointer),
    )


class UcxMemory:
    """A UCX context with one worker and one registered piece of memory. Never closed: the process ends without destructors."""

    def __init__(self, address: int, num_bytes: int, features: int = FEATURE_RMA) -> None:
        self.library = ctypes.CDLL(str(loaded_library()))
        self.library.ucp_get_version_string.restype = ctypes.c_char_p
        for name in ("ucp_get_nbx", "ucp_ep_flush_nbx"):
            getattr(self.library, name).restype = _u64
        self.context, self.worker, self.memory = _pointer(), _pointer(), _pointer()
        params = _Params(mask=PARAMS_FEATURES, features=features)
        self.call("ucp_init_version", *API_VERSION, ctypes.byref(params), None, ctypes.byref(self.context))
        worker_params = _WorkerParams(mask=WORKER_THREAD_MODE, thread_mode=THREAD_MODE_MULTI)
        self.call("ucp_worker_create", self.context, ctypes.byref(worker_params), ctypes.byref(self.worker))
        map_params = _MapParams(mask=MAP_ADDRESS | MAP_LENGTH, address=address, length=num_bytes)
        self.call("ucp_mem_map", self.context, ctypes.byref(map_params), ctypes.byref(self.memory))

    @property
    def version(self) -> str:
        """The library's."""
        return bytes(self.library.ucp_get_version_string()).decode()

    def call(self, name: str, *arguments: Any, least: int = NO_MESSAGE) -> int:
        """Call what answers with a status; raises RuntimeError with UCX's words when that is below `least`."""
        status = int(getattr(self.library, name)(*arguments))
        if status < least:
            self.library.ucs_status_string.restype = ctypes.c_char_p
            raise RuntimeError(f"{name}: {self.library.ucs_status_string(status).decode()}")
        return status

    def progress(self) -> int:
        """Let the worker do what there is to do."""
        return int(self.library.ucp_worker_progress(self.worker))


class UcxOwner(UcxMemory):
    """The end that is read. A thread answers the handshake and sleeps otherwise."""

    def __init__(self, address: int, num_bytes: int) -> None:
        super().__init__(address, num_bytes, FEATURE_RMA | FEATURE_WAKEUP)
        threading.Thread(target=self._serve, name="ucx-owner", daemon=True).start()

    def worker_address(self) -> bytes:
        """What a reader connects to."""
        return self._packed("ucp_worker_get_address", self.worker)

    def memory_key(self) -> bytes:
        """What a reader needs to read the memory."""
        return self._packed("ucp_rkey_pack", self.context, self.memory)

    def _packed(self, name: str, *arguments: Any) -> bytes:
        data, length = _pointer(), ctypes.c_size_t()
        self.call(name, *arguments, ctypes.byref(data), ctypes.byref(length))
        assert data.value is not None
        return ctypes.string_at(data.value, length.value)

    def _serve(self) -> None:
        event_fd = ctypes.c_int()
        self.call("ucp_worker_get_efd", self.worker, ctypes.byref(event_fd))
        while True:
            while self.progress():
                pass
            if self.call("ucp_worker_arm", self.worker, least=BUSY) == NO_MESSAGE:
                select.select([event_fd.value], [], [])


class UcxReader(UcxMemory):
    """The end that reads: an endpoint to an owner, and the same reads again and again."""

    def __init__(
        self, address: int, num_bytes: int, worker_address: bytes, memory_key: bytes, reads: list[tuple[int, int, int]]
    ) -> None:
        """`reads`: local address, remote address, bytes of each."""
        super().__init__(address, num_bytes)
        endpoint, key = _pointer(), _pointer()
        self._address = ctypes.create_string_buffer(worker_address, len(worker_address))
        params = _EndpointParams(mask=ENDPOINT_ADDRESS, address=ctypes.addressof(self._address))
        self.call("ucp_ep_create", self.worker, ctypes.byref(params), ctypes.byref(endpoint))
        self.call("ucp_ep_rkey_unpack", endpoint, memory_key, ctypes.byref(key))
        self._endpoint = endpoint
        self._operation = _OperationParams(mask=OPERATION_MEMORY, memory=self.memory.value)
        by_reference = ctypes.byref(self._operation)
        self._reads = [
            (endpoint, _pointer(local), ctypes.c_size_t(size), _u64(remote), key, by_reference)
            for local, remote, size in reads
        ]

    def move(self) -> None:
        """Read all of it, and wait until it is there."""
        get = self.library.ucp_get_nbx
        begun = [get(*each) for each in self._reads]
        begun.append(self.library.ucp_ep_flush_nbx(self._endpoint, ctypes.byref(_OperationParams())))
        for request in begun:
            if request >= LEAST_ERROR:
                self.call("ucp_request_check_status", _pointer(request))
            if request:
                self._wait(_pointer(request))

    def _wait(self, request: ctypes.c_void_p) -> None:
        while self.call("ucp_request_check_status", request) == IN_PROGRESS:
            self.progress()
        self.library.ucp_request_free(request)


def loaded_library() -> Path:
    """The libucp that NIXL's plug-in has loaded into this process; an agent has to have been made before."""
    if found := re.search(r"/\S*/libucp[-.]\S*", Path("/proc/self/maps").read_text(encoding="utf-8")):
        return Path(found.group(0))
    raise RuntimeError("no libucp is loaded in this process")
