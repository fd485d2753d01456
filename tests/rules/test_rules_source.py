"""House rules that a reader would otherwise have to check by eye."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

from pdmesh.config import Settings

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = (
    "shared/pdmesh",
    "kernels/pdmesh_kernels",
    *(f"services/{s}/pdmesh_{s}" for s in ("proxy", "prefill", "decode", "kvcache")),
)
MAX_LINES = 400
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "misc"}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "jsonpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
# By the last part of the name called: argument -> the value that it must have.
NEEDED_ARGUMENTS = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
FORBIDDEN_METHODS = {"yaml.load", "yaml.full_load", "yaml.unsafe_load", "torch.save", "np.save", "numpy.save"}
CONFIG_MODULES = (
    "pdmesh.config",
    "pdmesh.supervisor.config",
    *(f"pdmesh_{service}.config" for service in ("proxy", "prefill", "decode", "kvcache")),
)


def sources() -> list[Path]:
    found = [path for folder in SOURCE_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "_pb2" not in path.name]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_module_keeps_the_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_LINES, f"split it: more than {MAX_LINES} lines"
    assert path.stem not in FORBIDDEN_NAMES, "name it after the noun it serves"
    if path.name not in ("__init__.py", "__main__.py"):
        assert ast.get_docstring(tree), "a module says what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES
        elif isinstance(node, ast.Call):
            assert not (problem := runs_what_it_reads(node)), f"line {node.lineno}: {problem}"
            is_unsafe = any(word.arg == "preexec_fn" for word in node.keywords)
            assert not is_unsafe, f"line {node.lineno}: unsafe beside threads; see pdmesh.parent"


def runs_what_it_reads(call: ast.Call) -> str:
    """Why a call may run code that comes from outside; empty when it can't."""
    if isinstance(call.func, ast.Name):
        return f"no {call.func.id}" if call.func.id in FORBIDDEN_CALLS else ""
    called = ast.unparse(call.func)
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if called in FORBIDDEN_METHODS or given.get("allow_pickle") == "True":
        return f"no {ast.unparse(call)[:60]}"
    name, value = NEEDED_ARGUMENTS.get(called.replace("numpy.", "np."), ("", None))
    return f"{called} needs {name}={value}" if name and given.get(name) != repr(value) else ""


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "exec(text)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "np.lib.format.read_array(file, allow_pickle=True)",
        "__import__(name)",
    ],
)
def test_the_rule_sees_what_runs_what_it_reads(source: str) -> None:
    statement = ast.parse(source, mode="eval").body
    assert isinstance(statement, ast.Call)
    assert runs_what_it_reads(statement)


@pytest.mark.parametrize(
    "source", ["yaml.safe_load(text)", "torch.load(path, weights_only=True)", "json.load(file)", "re.compile(text)"]
)
def test_the_rule_lets_other_readers_be(source: str) -> None:
    statement = ast.parse(source, mode="eval").body
    assert isinstance(statement, ast.Call)
    assert not runs_what_it_reads(statement)


def settings_classes() -> list[type[Settings]]:
    classes = {
        value
        for name in CONFIG_MODULES
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, type) and issubclass(value, Settings) and value is not Settings
    }
    return sorted(classes, key=lambda cls: cls.__qualname__)


@pytest.mark.parametrize("cls", settings_classes(), ids=lambda cls: cls.__name__)
def test_every_setting_is_documented(cls: type[Settings]) -> None:
    assert not [name for name, field in cls.model_fields.items() if not (field.description or "").strip()]


@pytest.mark.parametrize("cls", settings_classes(), ids=lambda cls: cls.__name__)
def test_every_setting_is_in_the_help(cls: type[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    from pdmesh.config import load_config

    with pytest.raises(SystemExit) as ended:
        load_config(cls, ["--help"], prog="pdmesh test", environ={})
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert not [name for name in cls.model_fields if "--" + name.replace("_", "-") not in shown]


def test_the_environment_is_read_in_one_place() -> None:
    """Configuration and the per-user secret read it; whoever starts processes hands it on. The CPU library's build looks for
    the variables that all compilers' and caches' users know: CXX, XDG_CACHE_HOME."""
    allowed = {
        "shared/pdmesh/config/loading.py",
        "shared/pdmesh/security.py",
        "shared/pdmesh/supervisor/main.py",
        "shared/pdmesh/connector/native_helper.py",
        "kernels/pdmesh_kernels/cpu/build.py",
        "kernels/pdmesh_kernels/cpu/library.py",
    }
    readers = {
        relative(path)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers <= allowed


def test_packages_only_re_export() -> None:
    for path in sources():
        if path.name != "__init__.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = {type(node).__name__ for node in tree.body}
        # kernels' packages check shapes and pick an implementation, as DESIGN §4 has them.
        if "pdmesh_kernels" not in str(path):
            assert not kinds & {"FunctionDef", "AsyncFunctionDef", "ClassDef"}, relative(path)


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_every_package_is_shipped() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"{folder}"' in pyproject for folder in SOURCE_FOLDERS)
    assert list(pkgutil.iter_modules([str(ROOT / "shared" / "pdmesh")]))


def test_the_scheduler_and_the_kv_manager_fit_in_one_head() -> None:
    """What decides a step and what gives out blocks; checks of requests, the table of states and remote KV are beside it."""
    names = ("scheduler", "engine_state", "progress", "waiting_queue", "kv_manager", "block_pool", "kv_groups")
    engine = ROOT / "shared/pdmesh/engine"
    assert sum(len((engine / f"{name}.py").read_text().splitlines()) for name in names) < 1500
