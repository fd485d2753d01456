"""The library's thread that has a pool's next pages at hand: `src/pages.h`."""

import ctypes
import os
from typing import Any, ClassVar

from pdmesh_kernels.cpu.library import Library

ENDED = -1


class _Pages(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("blocks", ctypes.c_void_p),
        ("block_bytes", ctypes.c_size_t),
        ("header_bytes", ctypes.c_size_t),
        ("num_blocks", ctypes.c_int64),
        ("num_ahead", ctypes.c_int64),
        ("num_given", ctypes.c_int64),
        ("wake_fd", ctypes.c_int32),
        ("pool_fd", ctypes.c_int32),
    ]


class PageTaker:
    """One pool's pages. `run` belongs in a thread of its own, and needs Python's lock for nothing; `close` after its end."""

    def __init__(
        self,
        library: Library,
        *,
        blocks: int,
        block_bytes: int,
        header_bytes: int,
        num_blocks: int,
        num_ahead: int,
        pool_fd: int,
    ) -> None:
        """`blocks`: where the first block is mapped. `pool_fd`: -1 for a pool that is written here, whose pages are taken."""
        self._run = library.functions.pdm_pages_ahead
        self._run.restype, self._run.argtypes = ctypes.c_int, [ctypes.POINTER(_Pages)]
        wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._pages = _Pages(blocks, block_bytes, header_bytes, num_blocks, num_ahead, 0, wake_fd, pool_fd)

    def give(self, num_given: int) -> None:
        """Blocks up to here are in use."""
        self._pages.num_given = num_given
        os.eventfd_write(self._pages.wake_fd, 1)

    def end(self) -> None:
        """Have `run` return."""
        self.give(ENDED)

    def run(self) -> int:
        """Take or map what comes next, again and again, until `end`. Returns 0, or the error number for which it ended early."""
        code: int = self._run(ctypes.byref(self._pages))
        return code

    def close(self) -> None:
        os.close(self._pages.wake_fd)
