"""`pdmesh serve` or `pdmesh decode` with the core of `loop_core.py`, for `loop.py`.

python loop_service.py MODULE OPTIONS_JSON FLAGS...
"""

import importlib
import os
import sys
from pathlib import Path

from pdmesh.engine import core_client

CORE = Path(__file__).with_name("loop_core.py")


def main() -> int:
    """Run the service until told to stop."""
    module, options, flags = sys.argv[1], sys.argv[2], sys.argv[3:]

    def tied_command(_: str) -> list[str]:
        return [sys.executable, str(CORE), str(os.getpid()), options]

    core_client.tied_command = tied_command  # type: ignore[attr-defined, assignment]
    code: int = importlib.import_module(module).main(flags)
    return code


if __name__ == "__main__":
    sys.exit(main())
