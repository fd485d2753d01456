"""Where the `pdmesh` command begins: a service gets its process at once, everything else needs typer."""

import os
import sys

# Command -> what follows `pdmesh_` in the module that is run.
SERVICES = {"proxy": "proxy", "prefill": "prefill", "decode": "decode", "kvcache": "kvcache", "serve": "decode.serve"}


def main() -> None:
    """Run the command line."""
    if len(sys.argv) > 1 and sys.argv[1] in SERVICES:
        become(sys.argv[1], sys.argv[2:])
    # Importing typer takes a tenth of a second.
    from pdmesh.cli.app import main as run

    run()


def become(command: str, args: list[str]) -> None:
    """Replace this process by the service's own; shared code never imports a service."""
    os.execv(sys.executable, [sys.executable, "-m", f"pdmesh_{SERVICES[command]}", *args])
