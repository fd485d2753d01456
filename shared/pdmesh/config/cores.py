"""Lists of cores as people write them: `0-3,8`, as taskset and vLLM take them."""

import re

MAX_CORE = 1023
"""The highest that the kernel's plain affinity masks can name."""


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores in the order in which they are named; empty text names none. Raises ValueError."""
    cores: list[int] = []
    for part in text.split(",") if text.strip() else ():
        given = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        first, last = (int(given[1]), int(given[2] or given[1])) if given else (1, 0)
        if not first <= last <= MAX_CORE:
            raise ValueError(f"{part.strip()!r} is neither a core nor a range of cores in 0…{MAX_CORE}, as in 0-3,8")
        cores += range(first, last + 1)
    if twice := sorted({core for core in cores if cores.count(core) > 1}):
        raise ValueError(f"core {twice[0]} is named twice; each thread has a core of its own")
    return tuple(cores)


def format_cores(cores: set[int]) -> str:
    """Return `0-3,8` for what `parse_cores` takes."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
