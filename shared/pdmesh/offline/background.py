"""An event loop in a thread of its own, so that blocking calls work anywhere: in scripts, in notebooks, inside other loops."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pdmesh.errors import InternalError

# For tokenising and reading files.
NUM_WORKERS = 2

ResultT = TypeVar("ResultT")


class BackgroundLoop:
    """Runs coroutines for threads that wait for them. Ended by `close`, else its thread ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # Its own, as asyncio's takes a new thread to shut down, which at the program's end cannot be had.
        self._executor = ThreadPoolExecutor(max_workers=NUM_WORKERS, thread_name_prefix="pdmesh-offline")
        self._loop.set_default_executor(self._executor)
        self._pid = os.getpid()
        # Not joined at exit: what must end in order is closed before.
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdmesh-offline", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether the calling thread can wait for it: a forked child has the object but not the thread."""
        own = self._thread is threading.current_thread()
        return self._pid == os.getpid() and self._thread.is_alive() and not own

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run to the end and return the result, or raise its error.

        What interrupts the wait, such as Ctrl-C, cancels the coroutine and is raised once that has cleaned up. Raises
        InternalError in a forked child, where the thread that would run it is not.
        """
        if self._pid != os.getpid():
            coroutine.close()
            raise InternalError(
                f"this LLM belongs to process {self._pid}; a process forked from that must make its own"
            )
        ended = threading.Event()
        tasks: list[asyncio.Task[ResultT]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: ended.set())

        self._loop.call_soon_threadsafe(begin)
        try:
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait()
            raise
        if tasks[0].cancelled():
            raise InternalError("the engine was closed while this call ran")
        return tasks[0].result()

    def close(self) -> None:
        """End the loop and its thread; what still runs there is cancelled. Again: no effect."""
        if not self.usable:
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._executor.shutdown()
        self._loop.close()


async def _cancel_others() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
