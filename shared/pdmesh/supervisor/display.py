"""What `pdmesh up` shows: progress while it starts, then a table and commands to try; plain lines without a terminal."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pdmesh.supervisor.keeper import PORT_FACTS, Keeper, KeeperState


class Display:
    """Draws from the keepers' state whenever `update` is called; has no thread of its own."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: dict[str, KeeperState] = {}
        self._tasks: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        if console.is_terminal:
            # No refresh thread: the supervisor forks, and forks from one thread only.
            self._progress = Progress(
                TextColumn("{task.description:<12}"),
                BarColumn(24),
                TextColumn("{task.fields[stage]}"),
                TimeElapsedColumn(),
                console=console,
                auto_refresh=False,
                transient=True,
            )
            self._progress.start()

    def update(self, keepers: list[Keeper]) -> None:
        """Show what changed."""
        for keeper in keepers:
            if self._progress is not None:
                self._draw(self._progress, keeper)
            elif self._seen.get(keeper.spec.name) is not keeper.state:
                self._seen[keeper.spec.name] = keeper.state
                self.say(f"{keeper.spec.name}: {keeper.state}")
        if self._progress is not None:
            with self._unread():
                self._progress.refresh()

    def say(self, text: str) -> None:
        """Print news, above the progress while that is shown."""
        with self._unread():
            self._console.print(escape(text), highlight=False, soft_wrap=True)

    def stop_progress(self) -> None:
        """Take the progress away, for good."""
        if self._progress is not None:
            with self._unread():
                self._progress.stop()
            self._progress = None

    def table(self, keepers: list[Keeper]) -> None:
        """Print one line per service."""
        rows = [("service", "pid", *PORT_FACTS, "log")]
        for keeper in keepers:
            child = keeper.child
            facts = child.facts if child is not None else {}
            pid = str(child.pid) if child is not None else "-"
            ports = [str(facts.get(fact, "-")) for fact in PORT_FACTS.values()]
            rows.append((keeper.spec.name, pid, *ports, keeper.log_path))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            # Lines longer than the terminal wrap there, so that paths can still be copied whole.
            self.say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    @contextlib.contextmanager
    def _unread(self) -> Iterator[None]:
        """Go quiet when the terminal or pipe is gone: a mesh drains just as well unseen. (rich exits on a broken pipe.)"""
        try:
            yield
        except (OSError, SystemExit):
            self._console.quiet = True

    def _draw(self, progress: Progress, keeper: Keeper) -> None:
        name, child = keeper.spec.name, keeper.child
        if name not in self._tasks:
            self._tasks[name] = progress.add_task(name, total=1.0, stage="")
        stage = child.stage if child is not None else str(keeper.state)
        progress.update(self._tasks[name], completed=child.fraction if child is not None else 0.0, stage=stage)
