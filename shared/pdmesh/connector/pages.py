"""Has the memory of the blocks that a pool gives out next at hand before they are written, and before they are read elsewhere.

A pool takes memory page by page as blocks are first written, and then a page costs as much as writing it fifteen times: 12 MB of
KV that a copy of 0.6 ms brought took 8.7 ms where they were the first in their blocks. Where the pool is mapped for reading, the
pages are there, but each process that first reads them has to find them: the same copy took 1.6 ms instead of 0.8, a sum 1.2
instead of 0.55. A thread that gives way to everything else pays that beforehand, for a little more than is in use.
"""

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from pdmesh.connector.pool import PAGE_BYTES, KVPool

log = logging.getLogger(__name__)

BYTES_AHEAD = 64 << 20
SHARE_AHEAD = 8
"""At most this part of a pool: a small one shall not be taken whole for a first request."""
NICENESS = 15
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
"""Since Linux 5.14; Python's mmap has no names for them, and would keep its lock meanwhile."""


class PagesAhead:
    """A context manager around a pool; `close` does as well. Asleep but for the first time that blocks are given out.

    Blocks must be given out in the order of their ids the first time, as free lists do. Of a pool that is written here the next
    blocks' memory is taken. Of one that is only read here it never is: what the owner has of them is mapped, each time that
    `note` names later blocks than before.
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
        if self._pool.writable:
            self._pool.on_bump = self.note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop; before the pool is unmapped."""
        if self._pool.writable:
            self._pool.on_bump = None
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def note(self, block_ids: Iterable[int]) -> None:
        """Such blocks have been given out. Not for several threads."""
        num_given = max(block_ids, default=-1) + 1
        if num_given > self._num_given and self._num_ahead and not self._closing:
            self._num_given = num_given
            self._wake.set()
            if self._thread.ident is None:
                self._start()

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as exc:
            # This only makes things faster: whoever gives blocks out, or copies them, goes on without it.
            self._num_ahead = 0
            log.warning("memory of the KV pool is taken as blocks are used: %s", exc)

    def _work(self) -> None:
        # On Linux each thread has a niceness of its own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advice = MADV_POPULATE_WRITE if self._pool.writable else MADV_POPULATE_READ
        # What is given out is being written, or read, already.
        num_ready = self._num_given
        while not self._closing:
            if num_ready >= self._num_wanted(num_ready):
                self._wake.wait()
                self._wake.clear()
                num_ready = max(num_ready, self._num_given)
                continue
            begin = self._base + num_ready * self._block_bytes
            first = begin // PAGE_BYTES * PAGE_BYTES
            if madvise(first, begin + self._block_bytes - first, advice):
                code = ctypes.get_errno()
                log.info("memory of the KV pool is taken as blocks are used: %s", errno.errorcode.get(code, code))
                return
            num_ready += 1

    def _num_wanted(self, num_ready: int) -> int:
        """Up to which block the memory should be here by now."""
        num_wanted = min(self._num_given + self._num_ahead, self._num_blocks)
        if self._pool.writable or num_ready >= num_wanted:
            return num_wanted
        # Reading a page that the owner has not taken would take it.
        header_bytes, end = self._pool.shape.header_bytes, self._pool.shape.total_bytes
        hole = os.lseek(self._pool.fd, min(header_bytes + num_ready * self._block_bytes, end), os.SEEK_HOLE)
        return min(num_wanted, (hole - header_bytes) // self._block_bytes)
