"""Finds the CPU library, builds it where it is missing or older than its sources, and loads it once per process.

Where there is none, `load` says why, and the caller goes on with PyTorch.
"""

import contextlib
import ctypes
import fcntl
import functools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pdmesh_kernels.cpu.abi import ABI_VERSION, FUNCTIONS, Isa
from pdmesh_kernels.cpu.build import (
    LIBRARY,
    SOURCES,
    BuildError,
    build,
    is_whole,
    packing_digest,
    remove_unfinished,
    source_digest,
)

PACKAGED = Path(__file__).resolve().parent / LIBRARY
BUILDING_TIMEOUT_S = 600.0
"""For another process that builds it; less than a service waits for a core that says nothing."""

_POLL_S = 0.05


class LibraryError(Exception):
    """There is no library, or what it was asked for was wrong; the message is for the operator."""


class UnsupportedProcessorError(LibraryError):
    """The library is there, and has nothing that runs here."""


class Library:
    """The loaded library: `call` for what returns 0 or fails, `functions` for the rest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.functions: Any = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments
        if self.functions.pdm_abi_version() != ABI_VERSION:
            raise LibraryError(f"{path} has interface {self.functions.pdm_abi_version()}, not {ABI_VERSION}")

    @property
    def isas(self) -> list[Isa]:
        """What this processor can run, the fastest first."""
        return [isa for isa in sorted(Isa, reverse=True) if self.functions.pdm_isa_supported(isa)]

    @property
    def packing(self) -> str:
        """Names how it lays out weights: what was packed under another name is of no use to it."""
        if SOURCES.is_dir():
            return packing_digest()
        digest: bytes = self.functions.pdm_source_digest()
        return digest.decode()

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function that returns a number of at least 0; raises LibraryError with its own words otherwise."""
        result: int = getattr(self.functions, name)(*arguments)
        if result < 0:
            raise LibraryError(f"{name}: {self.last_error()}")
        return result

    def last_error(self) -> str:
        text: bytes = self.functions.pdm_last_error()
        return text.decode()


class Pool:
    """Threads of the library. Not for use by two threads at a time; `close` ends them."""

    def __init__(
        self, library: Library, num_threads: int, cpus: Sequence[int] | None = None, niceness: int = 0
    ) -> None:
        """`cpus`: one per thread, -1 for not pinned; thread 0 is whoever calls: it is neither pinned nor made nicer here.
        `niceness` is added to the process's."""
        self._library = library
        places = None if cpus is None else (ctypes.c_int * num_threads)(*cpus)
        # Threads inherit niceness from the one that starts them, and on Linux each has its own.
        with ThreadPoolExecutor(1, initializer=os.nice, initargs=(niceness,)) as starter:
            created = starter.submit(library.functions.pdm_pool_create, num_threads, places)
        self.handle: int | None = created.result()
        if not self.handle:
            raise LibraryError(f"cpu-threads {num_threads}: the threads could not be started")
        self.num_threads = num_threads

    def close(self) -> None:
        if self.handle:
            self._library.functions.pdm_pool_destroy(self.handle)
        self.handle = None


@functools.cache
def load() -> Library:
    """Return the library; the first call may build it (half a minute of CPU). Raises LibraryError that says why there is none."""
    try:
        return find()
    except UnsupportedProcessorError:
        # Half a minute of compiling would end in the same.
        raise
    except LibraryError as exc:
        packaged_error = str(exc)
    try:
        return _build_in_cache()
    except (OSError, BuildError, AttributeError) as exc:
        raise LibraryError(f"{packaged_error}, and building failed: {exc}") from exc


def find() -> Library:
    """Return the library if it is there already. Raises LibraryError that says why it is not."""
    error = "it is not in the package"
    if PACKAGED.exists():
        try:
            library = _opened(PACKAGED)
            if not SOURCES.is_dir() or library.functions.pdm_source_digest().decode() == source_digest():
                return _checked(library)
            error = "the packaged one is older than its sources"
        except UnsupportedProcessorError:
            raise
        except (OSError, AttributeError, LibraryError) as exc:
            error = str(exc)
    try:
        if (cached := _cached()).exists():
            return _trusted(cached)
    except (OSError, AttributeError) as exc:
        raise LibraryError(f"{error}, and {exc}") from exc
    raise LibraryError(error)


def is_built() -> bool:
    """Whether `load` would find a library that is there already."""
    try:
        return PACKAGED.exists() or _cached().exists()
    except OSError:
        return False


def choose_isa(library: Library, wanted: str) -> Isa:
    """Return the instruction set named `wanted` (lower case), or the fastest for "auto". Raises LibraryError."""
    names = {isa.name.lower(): isa for isa in library.isas}
    if wanted == "auto":
        return library.isas[0]
    if wanted not in names:
        raise LibraryError(f"cpu-isa {wanted}: this processor has {', '.join(names)}")
    return names[wanted]


def cache_folder() -> Path:
    """Return where what can be made again is kept: $XDG_CACHE_HOME or ~/.cache. Raises OSError without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "pdmesh"
    except RuntimeError as exc:
        raise FileNotFoundError(f"no cache folder: {exc}") from exc


def is_ours(status: os.stat_result) -> bool:
    """Whether nobody but this user, its group and root can have written a file or folder."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o002


def _cached() -> Path:
    return cache_folder() / f"libpdmesh_cpu-{source_digest()}.so"


def _build_in_cache() -> Library:
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_ours(folder)
    target = _cached()
    with _locked(folder / "build.lock"):
        # Another process may have built it meanwhile; one that is no library, or somebody else's, is replaced.
        with contextlib.suppress(OSError, AttributeError):
            return _trusted(target)
        # The lock is ours: whoever left these is dead.
        remove_unfinished(target)
        build(target)
    return _trusted(target)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock, which ends with its process. Raises TimeoutError."""
    deadline_s = time.monotonic() + BUILDING_TIMEOUT_S
    with path.open("w") as lock:
        while True:
            try:
                # flock knows no timeout, so it is asked again and again.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"another process has been building it for {BUILDING_TIMEOUT_S:.0f} s") from None
                time.sleep(_POLL_S)
        yield


def _trusted(cached: Path) -> Library:
    """Open a library that nobody else can have put there: its code runs in this process. Raises OSError, AttributeError."""
    _check_ours(cached.parent)
    _check_ours(cached)
    return _checked(_opened(cached))


def _check_ours(path: Path) -> None:
    if not is_ours(path.stat()):
        raise PermissionError(f"{path} belongs to, or can be written by, another user")


def _opened(path: Path) -> Library:
    # Reading the mapping of a truncated one would be a SIGBUS.
    if not is_whole(path):
        raise OSError(f"{path} is not a whole library")
    return Library(path)


def _checked(library: Library) -> Library:
    if not library.isas:
        raise UnsupportedProcessorError("this processor has none of AVX2 with FMA, AVX-512, AMX")
    return library
