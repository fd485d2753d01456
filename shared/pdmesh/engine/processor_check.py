"""A process that only imports logits processors: `python -m pdmesh.engine.processor_check NAME…`, for `--check-config`.

They may bring torch along, which a server process stays free of. What is wrong is the last line of its standard output.
"""

import sys

from pdmesh.engine.logits_processors import load_processors
from pdmesh.errors import ConfigError

IMPORT_FAILED = 2


def main(names: list[str]) -> int:
    """Import what `names` list and what is installed. Returns the exit code."""
    try:
        load_processors(names)
    except ConfigError as exc:
        sys.stdout.write(f"\n{exc.message}\n")
        return IMPORT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
