"""Configuration of every service: frozen pydantic models, and how they are filled. See `loading.py` for the order."""

from pdmesh.config.engine import EngineConfig
from pdmesh.config.loading import ALIASES, load_config, read_toml, unknown_variables, variable
from pdmesh.config.settings import LOOPBACK_HOSTS, HttpConfig, ServiceConfig, Settings, TlsConfig

__all__ = [
    "ALIASES",
    "LOOPBACK_HOSTS",
    "EngineConfig",
    "HttpConfig",
    "ServiceConfig",
    "Settings",
    "TlsConfig",
    "load_config",
    "read_toml",
    "unknown_variables",
    "variable",
]
