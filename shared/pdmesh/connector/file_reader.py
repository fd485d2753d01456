"""The consumer's side of connector `file`: reads blocks out of offers' files into the pool, each checked before it gets there.

A file system may hang, and a read that hangs cannot be taken back. So threads read into buffers of their own, and copy a block
into the pool under the pull's lock, unless the pull has ended meanwhile: its end never waits for a file system, and nothing
writes to its blocks after it.
"""

import hmac
import os
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pdmesh.connector.active import ActivePulls, PullEnd, are_as_told, error_reason
from pdmesh.connector.base import Pull
from pdmesh.connector.file_format import Seals, file_name, read_contents, read_exactly
from pdmesh.connector.pool import PullTarget
from pdmesh.connector.throttle import Throttle
from pdmesh_kernels.block_sum import copy_blocks

PIECE_BYTES = 8 << 20


class FilePull:
    """One pull under way. Its deadline is kept by a timer, whatever its thread waits for."""

    def __init__(self, pull: Pull, pulls: ActivePulls, target: PullTarget) -> None:
        self.pull = pull
        self.block_bytes = target.shape.block_bytes
        self._pulls = pulls
        self._target = target
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._timer = threading.Timer(pull.deadline_s, self.end, [PullEnd.TIMEOUT])
        self._timer.name = "file-deadline"
        self._timer.daemon = True
        if pull.deadline_s > 0:
            self._timer.start()
        else:
            self.end(PullEnd.TIMEOUT)

    @property
    def goes_on(self) -> bool:
        return not self._ended.is_set()

    def pause_until(self, due_s: float) -> bool:
        """Wait for a monotonic time; whether the pull goes on."""
        return not self._ended.wait(max(0.0, due_s - time.monotonic()))

    def end(self, reason: str, num_bytes: int = 0) -> None:
        """End it, unless it has ended; nothing of it is stored any more."""
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                self._pulls.finish(self.pull.transfer_id, reason, num_bytes)
        self._timer.cancel()

    def store(self, place: int, data: memoryview) -> bool:
        """Copy the block at a place of the lists into the pool, while the pull goes on; whether it is what its owner summed."""
        block = np.frombuffer(data, dtype=np.uint8)[None, :]
        with self._lock:
            if self._ended.is_set():
                return True
            sums = copy_blocks(self._target.blocks, [self.pull.target_block_ids[place]], block, [0])
        return not self.pull.checksums or are_as_told(sums, self.pull.checksums[place : place + 1])


@dataclass(frozen=True, slots=True)
class _Task:
    pull: FilePull
    directory: Path
    seals: Seals


class FileReader:
    """A few threads that carry out pulls."""

    def __init__(self, num_threads: int, throttle: Throttle) -> None:
        self._throttle = throttle
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"file-read-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, pull: FilePull, directory: Path, seals: Seals) -> None:
        """Carry out a pull from the files of the owner of `directory`; never blocks."""
        self._tasks.put(_Task(pull, directory, seals))

    def close(self) -> None:
        """Let the threads end when they come to it: one that a file system holds up is left behind."""
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not task.pull.goes_on:
                continue
            try:
                reason = self._read(task)
            except FileNotFoundError:
                reason = PullEnd.PEER_LOST if not task.directory.exists() else error_reason("the offer is not there")
            except OSError as exc:
                reason = error_reason(f"the offer cannot be read: {exc.strerror}")
            except ValueError as exc:
                reason = error_reason(f"the offer's file is not sound: {exc}")
            except Exception as exc:  # the thread's top
                reason = error_reason(f"{type(exc).__name__}: {exc}")
            pull = task.pull.pull
            task.pull.end(reason, 0 if reason else len(pull.source_block_ids) * task.pull.block_bytes)
            # Nothing of a pool may be held on to while there is nothing to do.
            del task, pull

    def _read(self, task: _Task) -> str:
        pull = task.pull.pull
        block_bytes = task.pull.block_bytes
        fd = os.open(task.directory / file_name(pull.offer_id), os.O_RDONLY | os.O_CLOEXEC)
        try:
            contents = read_contents(
                fd, task.seals, peer_id=pull.peer_id, offer_id=pull.offer_id, block_bytes=block_bytes
            )
            places = {
                pair: place for place, pair in enumerate(zip(contents.block_ids, contents.generations, strict=True))
            }
            wanted = list(zip(pull.source_block_ids, pull.generations, strict=True))
            if any(pair not in places for pair in wanted):
                return PullEnd.STALE
            most = self._throttle.piece_blocks(block_bytes, PIECE_BYTES)
            for run in _runs([places[pair] for pair in wanted], most):
                if not task.pull.pause_until(self._throttle.book(run.num * block_bytes)):
                    return PullEnd.CANCELLED
                buffer = memoryview(bytearray(run.num * block_bytes))
                if not read_exactly(fd, buffer, run.place * block_bytes, goes_on=lambda: task.pull.goes_on):
                    return error_reason("the offer's file ends early")
                for number in range(run.num):
                    data = buffer[number * block_bytes : (number + 1) * block_bytes]
                    mac = task.seals.of_block(pull.offer_id, *wanted[run.first + number], data)
                    if not hmac.compare_digest(mac, contents.macs[run.place + number]):
                        return error_reason("a block is not what its owner wrote")
                    if not task.pull.store(run.first + number, data):
                        return PullEnd.CORRUPT
        finally:
            os.close(fd)
        return ""


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks that follow each other in the file and in the pull."""

    first: int
    """In the pull."""
    place: int
    """In the file."""
    num: int


def _runs(places: list[int], most: int) -> list[_Run]:
    runs: list[_Run] = []
    for first, place in enumerate(places):
        last = runs[-1] if runs else None
        if last is not None and last.num < most and place == last.place + last.num:
            runs[-1] = _Run(last.first, last.place, last.num + 1)
        else:
            runs.append(_Run(first, place, 1))
    return runs
