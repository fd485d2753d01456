"""Has the memory of the blocks that a pool gives out next at hand before they are written, and before they are read elsewhere.

A pool takes memory page by page as blocks are first written, and then a page costs as much as writing it fifteen times: 12 MB of
KV that a copy of 0.6 ms brought took 8.7 ms where they were the first in their blocks. Where the pool is mapped for reading, the
pages are there, but each process that first reads them has to find them: the same copy took 1.6 ms instead of 0.8, a sum 1.2
instead of 0.55. A thread that gives way to everything else pays that beforehand, for a little more than is in use. It is the CPU
library's: one of Python's would now and then lose its processor while it has Python's lock, and all others wait for milliseconds.
Where the library is not there, nobody does it.
"""

import errno
import functools
import logging
import os
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from pdmesh.connector.pool import KVPool
from pdmesh_kernels.cpu.library import Library, LibraryError, find
from pdmesh_kernels.cpu.pages import PageTaker

log = logging.getLogger(__name__)

BYTES_AHEAD = 64 << 20
SHARE_AHEAD = 8
"""At most this part of a pool: a small one shall not be taken whole for a first request."""
NICENESS = 15


class PagesAhead:
    """A context manager around a pool; `close` does as well. Asleep but for the first time that blocks are given out.

    Blocks must be given out in the order of their ids the first time, as free lists do. Of a pool that is written here the next
    blocks' memory is taken. Of one that is only read here it never is: what the owner has of them is mapped, each time that
    `note` names later blocks than before.
    """

    def __init__(self, pool: KVPool, *, bytes_ahead: int = BYTES_AHEAD) -> None:
        shape = pool.shape
        self._num_ahead = min(bytes_ahead // shape.block_bytes, shape.num_blocks // SHARE_AHEAD)
        self._num_given = 0
        """Blocks up to here have been given out."""
        self._taker: PageTaker | None = None
        self._thread: threading.Thread | None = None
        self._pool = pool

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
        self._num_ahead = 0
        if self._taker is not None:
            self._taker.end()
            if self._thread is not None:
                self._thread.join()
            self._taker.close()
            self._taker = self._thread = None

    def note(self, block_ids: Iterable[int]) -> None:
        """Such blocks have been given out. Not for several threads."""
        num_given = max(block_ids, default=-1) + 1
        if num_given > self._num_given and self._num_ahead:
            self._num_given = num_given
            if self._taker is None:
                self._start()
            else:
                self._taker.give(num_given)

    def _start(self) -> None:
        shape = self._pool.shape
        try:
            self._taker = PageTaker(
                _library(),
                blocks=self._pool.blocks.ctypes.data,
                block_bytes=shape.block_bytes,
                header_bytes=shape.header_bytes,
                num_blocks=shape.num_blocks,
                num_ahead=self._num_ahead,
                pool_fd=-1 if self._pool.writable else self._pool.fd,
            )
            self._taker.give(self._num_given)
            thread = threading.Thread(target=_work, args=(self._taker,), name="pages-ahead", daemon=True)
            thread.start()
            self._thread = thread
        except (LibraryError, AttributeError, OSError, RuntimeError) as exc:
            # This only makes things faster: whoever gives blocks out, or copies them, goes on without it.
            self.close()
            _tell(exc, logging.INFO if isinstance(exc, LibraryError | AttributeError) else logging.WARNING)


def _work(taker: PageTaker) -> None:
    # On Linux each thread has a niceness of its own.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    if code := taker.run():
        _tell(errno.errorcode.get(code, code))


@functools.cache
def _library() -> Library:
    return find()


def _tell(why: object, level: int = logging.INFO) -> None:
    log.log(level, "memory of the KV pool is taken as blocks are used: %s", why)
