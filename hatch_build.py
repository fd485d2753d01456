"""The wheel's build hook: compiles the CPU library into it, where a C++ compiler is, and tags it for this platform.

Without a compiler the wheel is one for any platform, with the sources in it. PDMESH_CPU_LIBRARY=required makes that an error on
Linux on x86-64, for images and releases that must have the library.
"""

import ctypes
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "pdmesh_kernels/cpu"


class CpuLibraryHook(BuildHookInterface[Any]):
    """Adds the library and the tag to what hatchling builds."""

    PLUGIN_NAME = "custom"
    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # An editable install runs from the sources: ./dev builds there, and elsewhere the first start does.
        if version == "editable":
            return
        builder = _builder(Path(self.root) / "kernels" / PACKAGE / "build.py")
        self._folder = tempfile.mkdtemp(prefix="pdmesh-wheel-")
        library = Path(self._folder) / builder.LIBRARY
        built = Path(self.root) / "kernels" / PACKAGE / builder.LIBRARY
        try:
            if builder.is_current(built) and builder.is_whole(built) and _loads(built):
                shutil.copyfile(built, library)
            else:
                builder.build(library)
        except builder.BuildError as exc:
            shutil.rmtree(self._folder)
            self._folder = None
            if os.environ.get("PDMESH_CPU_LIBRARY") == "required" and builder.is_supported():
                raise
            self.app.display_warning(f"a wheel without the CPU library: {exc}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{builder.platform_tag()}"
        build_data["force_include"][str(library)] = f"{PACKAGE}/{builder.LIBRARY}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder:
            shutil.rmtree(self._folder)


def _loads(library: Path) -> bool:
    """Whether it runs here: a checkout may have come from a machine with newer system libraries."""
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _builder(path: Path) -> Any:
    """Load build.py by itself: the packages around it need not be installed."""
    spec = importlib.util.spec_from_file_location("pdmesh_cpu_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
