"""The life of `pdmesh run-batch`: settings, files, engine, every line, the finished file."""

import asyncio
import contextlib
import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pdmesh.config import EngineConfig, load_config
from pdmesh.errors import ConfigError, MeshError
from pdmesh.logging import setup_logging
from pdmesh.offline.batch.config import BatchConfig, BatchSettings, engine_options
from pdmesh.offline.batch.output import BatchOutput
from pdmesh.offline.batch.run import BatchCounts, BatchRun
from pdmesh.offline.engine import offline_engine
from pdmesh.offline.options import engine_config
from pdmesh.offline.progress import ProgressBar

PROG = "pdmesh run-batch"
STANDARD_INPUT = "-"
MIN_CONCURRENCY = 512
INTERRUPTED = 130
_SHORT = {"-i": "--input-file", "-o": "--output-file"}


def main(argv: list[str]) -> int:
    """Run a batch. Returns 0 when every line has an answer, be it a failure; raises MeshError otherwise."""
    config = load_config(BatchConfig, [_SHORT.get(word, word) for word in argv], prog=PROG)
    _check_files(config)
    engine = engine_config(getattr(config, "model", ""), engine_options(config))
    setup_logging("run-batch", engine.log_level, engine.log_format)
    output = BatchOutput(Path(config.output_file), resume=config.resume)
    with _input(config.input_file) as lines, output:
        try:
            counts = asyncio.run(_run(config, engine, lines, output))
        except (KeyboardInterrupt, asyncio.CancelledError):
            _tell(f"interrupted; {output.state()}")
            return INTERRUPTED
        except ConfigError:
            raise
        except MeshError:
            _tell(output.state())
            raise
        try:
            output.finish()
        except MeshError:
            _tell(output.state())
            raise
    _tell(f"{counts.answered} answered, {counts.failed} failed, {counts.kept} kept: {config.output_file}")
    return 0


async def _run(config: BatchSettings, engine: EngineConfig, lines: IO[bytes], output: BatchOutput) -> BatchCounts:
    task = asyncio.current_task()
    assert task is not None
    # As Ctrl-C does: what runs is aborted and the engine ends in order.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with offline_engine(engine) as opened:
        limit = config.max_concurrency or max(MIN_CONCURRENCY, 2 * engine.max_num_seqs)
        with ProgressBar("Requests", _num_lines(lines), enabled=True) as bar:
            run = BatchRun(opened, output, bar, max_concurrency=limit)
            await run.all(lines)
            return run.counts


def _tell(text: str) -> None:
    sys.stderr.write(f"{PROG}: {text}\n")


def _check_files(config: BatchSettings) -> None:
    for name in ("input_file", "output_file"):
        if not getattr(config, name):
            raise ConfigError(f"{PROG}: {name.replace('_', '-')}: none given; see {PROG} --help")
    if config.output_file == STANDARD_INPUT:
        raise ConfigError(f"{PROG}: output-file: must be a file, as its lines are put in order at the end (got '-')")
    output = Path(config.output_file)
    if output.exists() and not output.is_file():
        raise ConfigError(f"{PROG}: output-file: {output} is no regular file")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"{PROG}: output-file: the directory {output.absolute().parent} does not exist")
    source = Path(config.input_file)
    if config.input_file != STANDARD_INPUT and source.exists() and output.exists() and output.samefile(source):
        raise ConfigError(f"{PROG}: output-file: {output} is the input file")


@contextlib.contextmanager
def _input(name: str) -> Iterator[IO[bytes]]:
    """Open the input, which can be read twice: once to count."""
    if name == STANDARD_INPUT:
        yield io.BytesIO(sys.stdin.buffer.read())
        return
    with contextlib.ExitStack() as closing:
        try:
            file = closing.enter_context(Path(name).open("rb"))
        except OSError as exc:
            raise ConfigError(f"{PROG}: input-file: {name} cannot be read ({exc.strerror})") from exc
        yield file


def _num_lines(lines: IO[bytes]) -> int:
    number = sum(1 for line in lines if line.strip())
    lines.seek(0)
    return number
