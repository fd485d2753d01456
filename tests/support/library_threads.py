"""The CPU library's threads of this process, as the kernel lists them."""

from pathlib import Path


def library_threads() -> dict[int, Path]:
    """Thread id -> its folder under /proc."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == "pdm-cpu":
                found[int(task.name)] = task
        except (FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
            continue
    return found
