"""`pdmesh up`: every service of a mesh as a child process, watched, restarted, scaled and drained."""

from pdmesh.supervisor.config import UpConfig
from pdmesh.supervisor.control import scale
from pdmesh.supervisor.main import run_up

__all__ = ["UpConfig", "run_up", "scale"]
