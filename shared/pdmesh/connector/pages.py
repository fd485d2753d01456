"""Has the memory of the blocks that a pool gives out next at hand before they are written.

A pool takes memory page by page as blocks are first written, and then a page costs as much as writing it fifteen times: 12 MB of
KV that a copy of 0.6 ms brought took 8.7 ms where they were the first in their blocks. A thread that gives way to everything
else pays that beforehand, for a little more than is in use.
"""

import ctypes
import errno
import logging
import os
import threading
from types import TracebackType
from typing import Self

from pdmesh.connector.pool import PAGE_BYTES, KVPool

log = logging.getLogger(__name__)

BYTES_AHEAD = 64 << 20
SHARE_AHEAD = 8
"""At most this part of a pool: a small one shall not be taken whole for a first request."""
NICENESS = 15
MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; Python's mmap has no name for it, and would keep its lock meanwhile."""


class PagesAhead:
    """A context manager around a pool that is written here; asleep but for the first time that blocks are given out.

    Blocks must be given out in the order of their ids the first time, as free lists do.
    """

    def __init__(self, pool: KVPool, *, bytes_ahead: int = BYTES_AHEAD) -> None:
        shape = pool.shape
        self._base = pool.blocks.ctypes.data
        self._block_bytes = shape.block_bytes
        self._num_blocks = shape.num_blocks
        self._num_ahead = min(bytes_ahead // shape.block_bytes, shape.num_blocks // SHARE_AHEAD)
        self._num_given = 0
        """Blocks up to here have been given out."""
        self._wake = threading.Event()
        self._closing = False
        self._pool = pool
        self._thread = threading.Thread(target=self._work, name="pages-ahead", daemon=True)

    def __enter__(self) -> Self:
        if self._num_ahead:
            self._thread.start()
            self._pool.on_bump = self._given
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.on_bump = None
        self._closing = True
        self._wake.set()
        if self._num_ahead:
            # Before the pool is unmapped.
            self._thread.join()

    def _given(self, block_ids: list[int]) -> None:
        num_given = max(block_ids, default=-1) + 1
        if num_given > self._num_given:
            self._num_given = num_given
            self._wake.set()

    def _work(self) -> None:
        # On Linux each thread has a niceness of its own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        num_ready = 0
        while not self._closing:
            if not self._num_given or num_ready >= min(self._num_given + self._num_ahead, self._num_blocks):
                self._wake.wait()
                self._wake.clear()
                # What is given out is being written already.
                num_ready = max(num_ready, self._num_given)
                continue
            begin = self._base + num_ready * self._block_bytes
            first = begin // PAGE_BYTES * PAGE_BYTES
            if madvise(first, begin + self._block_bytes - first, MADV_POPULATE_WRITE):
                code = ctypes.get_errno()
                log.info("memory of the KV pool is taken as blocks are written: %s", errno.errorcode.get(code, code))
                return
            num_ready += 1
