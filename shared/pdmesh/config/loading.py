"""How a service's configuration is filled: from flags, environment, TOML and defaults, in that order.

`load_config(DecodeConfig, argv)` reads `--config FILE` (or `PDMESH_CONFIG`), then `PDMESH_<FIELD>` variables, then flags.
A bad value ends in a ConfigError that names field, value and limit; unknown keys and flags are errors. No setting is read
from the environment anywhere else; what is not a setting is: `security` and the supervisor ask XDG_STATE_HOME where this
user's files go, and who starts a process (the supervisor, the NIXL connector's helper) hands its own environment on.
"""

import argparse
import difflib
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from pdmesh.config.settings import Settings
from pdmesh.config.vllm_flags import explain_foreign
from pdmesh.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=Settings)

ENV_PREFIX = "PDMESH_"
# Other spellings of a flag: the setting's name less its unit, and vLLM's name for the same.
ALIASES: dict[str, tuple[str, ...]] = {"drain_timeout_s": ("--drain-timeout", "--shutdown-timeout")}
# How alike an unknown name and a known one must be for the one to be a misspelling of the other.
NAME_CUTOFF = 0.8
_POSITIONAL = "positional argument"


def load_config(
    cls: type[ConfigT],
    argv: list[str],
    *,
    prog: str,
    environ: dict[str, str] | None = None,
    positional: str | None = None,
) -> ConfigT:
    """Build a `cls` from `argv`, `environ` (default os.environ) and the TOML file they name.

    `positional` names a field that may also be given without its flag. Raises ConfigError; `--help` exits as usual.
    """
    env = dict(os.environ) if environ is None else environ
    spellings = [alias.removeprefix("--") for name in cls.model_fields for alias in ALIASES.get(name, ())]
    if foreign := explain_foreign(argv, [*cls.model_fields, *spellings]):
        raise ConfigError(f"{prog}: {foreign}")
    parser = _parser(cls, prog, positional)
    try:
        flags = vars(parser.parse_args(argv))
    except argparse.ArgumentError as exc:
        message = str(exc).replace("ignored explicit argument", "these take no value; got")
        raise ConfigError(f"{prog}: {message}") from exc
    given = flags.pop(_POSITIONAL, None)
    if positional and given is not None:
        flags[positional] = flags[positional] or given
    path = flags.pop("config") or env.get("PDMESH_CONFIG", "")
    values = _from_toml(cls, path) if path else {}
    values |= {
        name: _split(cls, name, env[variable(name)]) for name in cls.model_fields if env.get(variable(name), "") != ""
    }
    values |= {name: _split(cls, name, value) for name, value in flags.items() if value is not None}
    try:
        return cls(**values)
    except ValidationError as exc:
        raise ConfigError(f"{prog}: {_one_line(exc)}") from exc


def variable(name: str) -> str:
    """Name of a setting's environment variable."""
    return ENV_PREFIX + name.upper()


def unknown_variables(cls: type[Settings], environ: Iterable[str] | None = None) -> list[str]:
    """One line for each PDMESH_ variable of `environ` (default os.environ) that looks like a misspelt setting of `cls`, or
    is a setting of vLLM's that is not here.

    Others are left alone: they may belong to another service that is started from the same environment.
    """
    given = os.environ if environ is None else environ
    known = ["CONFIG", *map(str.upper, cls.model_fields)]
    lines = []
    for name in sorted(name.removeprefix(ENV_PREFIX) for name in given if name.startswith(ENV_PREFIX)):
        if foreign := explain_foreign([f"--{name.lower()}"], cls.model_fields):
            lines.append(f"environment variable {ENV_PREFIX}{name} means nothing here: {foreign}")
            continue
        near = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=NAME_CUTOFF)
        if near:
            lines.append(f"environment variable {ENV_PREFIX}{name} means nothing here; is it {ENV_PREFIX}{near[0]}?")
    return lines


def _parser(cls: type[Settings], prog: str, positional: str | None) -> argparse.ArgumentParser:
    usage = "%(prog)s [options]" + (f" [{positional.upper()}]" if positional else "")
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=cls.__doc__,
        epilog=f"Each --some-setting is also the environment variable {variable('some_setting')} and the key some_setting "
        "of the TOML file; a flag wins over the environment, the environment over the file.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.error = _raise_config_error(prog)  # type: ignore[method-assign]
    parser.add_argument("--config", default="", metavar="FILE", help="TOML file with any of the settings below")
    for name, field in cls.model_fields.items():
        flag = "--" + name.replace("_", "-")
        text = (field.description or "").replace("%", "%%")
        default = ",".join(map(str, field.default)) if isinstance(field.default, list) else field.default
        text += "" if default in ("", None) else f" (default: {default})"
        if name == positional:
            # Under a name of its own: argparse writes the default of an absent positional over the flag's value.
            parser.add_argument(_POSITIONAL, metavar=name.upper(), nargs="?", default=None, help=text)
            parser.add_argument(flag, default=None, help=argparse.SUPPRESS)
        elif field.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(
                flag, *ALIASES.get(name, ()), dest=name, default=None, metavar=_metavar(field.annotation), help=text
            )
    return parser


def _metavar(annotation: Any) -> str:
    """The allowed values where they are few, else VALUE."""
    if get_origin(annotation) is list:
        item = _metavar(get_args(annotation)[0])
        return item if item == "VALUE" else f"{item},..."
    return "|".join(map(str, get_args(annotation))) if get_origin(annotation) is Literal else "VALUE"


def _raise_config_error(prog: str) -> Any:
    def error(message: str) -> None:
        raise ConfigError(f"{prog}: {message}; see {prog} --help")

    return error


def read_toml(path: str) -> dict[str, Any]:
    """Return what a config file says, right or not. Raises ConfigError when it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"config file {path} cannot be read: {exc}") from exc


def _from_toml(cls: type[Settings], path: str) -> dict[str, Any]:
    values = read_toml(path)
    unknown = sorted(set(values) - set(cls.model_fields))
    if foreign := explain_foreign([f"--{name}" for name in unknown], cls.model_fields):
        raise ConfigError(f"config file {path}: {foreign}")
    if unknown:
        raise ConfigError(
            f"config file {path}: unknown key {unknown[0]!r}; known keys: {', '.join(sorted(cls.model_fields))}"
        )
    return values


def _split(cls: type[Settings], name: str, value: Any) -> Any:
    """Turn "a,b" into ["a", "b"] for list fields; other values are left to pydantic."""
    is_list = getattr(cls.model_fields[name].annotation, "__origin__", None) is list
    return [part.strip() for part in value.split(",") if part.strip()] if is_list and isinstance(value, str) else value


def _one_line(exc: ValidationError) -> str:
    first = exc.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        # A check over several fields: its input is all of them, secrets included.
        return message
    shown = "" if field in ("secret", "api_key") else f" (got {first['input']!r})"
    return f"{field.replace('_', '-')}: {message}{shown}"
