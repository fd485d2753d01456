"""The progress bar of long calls, on a terminal's standard error."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ProgressBar:
    """Counts what is done, with estimated speeds in tokens per second; nothing at all when `enabled` is False.

    A context manager; `advance` may be called from any thread.
    """

    def __init__(self, description: str, total: int, *, enabled: bool) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=console,
            disable=not enabled or not (console.is_terminal or console.is_jupyter),
        )
        self._task = self._bar.add_task(description, total=total, speed="")
        self._num_in = self._num_out = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, *, num_in: int = 0, num_out: int = 0) -> None:
        """Note one more as done, with the tokens of its prompt and of its answers."""
        self._num_in += num_in
        self._num_out += num_out
        elapsed_s = self._bar.tasks[0].elapsed or 0.0
        speed = ""
        if elapsed_s > 0 and (self._num_in or self._num_out):
            speed = f"in {self._num_in / elapsed_s:.1f} tok/s, out {self._num_out / elapsed_s:.1f} tok/s"
        self._bar.update(self._task, advance=1, speed=speed)
