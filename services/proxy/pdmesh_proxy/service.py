"""The life of the proxy process."""

import asyncio
import contextlib
import socket
import time

from prometheus_client import CollectorRegistry

from pdmesh.errors import ConfigError
from pdmesh.http_server import HttpServer, adopt, serving
from pdmesh.lifecycle import Life, check_ports, listen, run_service
from pdmesh.models.source import read_config, resolve
from pdmesh.openai.app import create_app
from pdmesh.openai.text import load_text_model
from pdmesh.security import MeshSecret
from pdmesh_proxy.cluster import Cluster
from pdmesh_proxy.config import ProxyConfig
from pdmesh_proxy.handler import MeshGenerator
from pdmesh_proxy.metrics import ProxyMetrics


def main(argv: list[str] | None = None) -> int:
    """Run the proxy until SIGTERM; returns the exit code."""
    return run_service("proxy", ProxyConfig, serve, argv, positional="model", check=check)


async def serve(config: ProxyConfig, life: Life) -> None:
    """Load the tokenizer, join the engines, answer HTTP until told to stop, then let running requests end."""
    secret = MeshSecret.load(config)
    life.progress("loading the tokenizer", 0.0)
    text = await asyncio.to_thread(load_text_model, config.model)
    registry = CollectorRegistry()
    metrics = ProxyMetrics(registry)
    async with Cluster(config, secret=secret, metrics=metrics) as cluster:
        generator = MeshGenerator(cluster, config=config, metrics=metrics)
        app = create_app(generator=generator, text=text, config=config, role="proxy", registry=registry)
        async with serving(app, _listener(config)) as http:
            life.ready(http_port=http.port)
            await life.stopped()
            await _leave(config, life, generator, http)


def _is_handed_over(config: ProxyConfig) -> bool:
    """Whether somebody else holds the listening socket too, so that who connects waits there for our successor."""
    return config.listen_fd >= 0


def _listener(config: ProxyConfig) -> socket.socket:
    if _is_handed_over(config):
        return adopt(config.listen_fd, on_loopback=config.on_loopback)
    return listen(config.host, config.port)


async def _leave(config: ProxyConfig, life: Life, generator: MeshGenerator, http: HttpServer) -> None:
    """Have new requests go elsewhere as soon as somebody can know, and end what is here."""
    generator.retire()
    http.leave()
    if not _is_handed_over(config):
        await asyncio.sleep(config.drain_grace_s)
    await http.stop_listening(is_shared=_is_handed_over(config))
    life.leaving()
    until_s = time.monotonic() + config.drain_timeout_s
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(config.drain_timeout_s):
            await http.emptied()
    await generator.drain(max(0.0, until_s - time.monotonic()))


async def check(config: ProxyConfig) -> None:
    """Raise ConfigError for what cannot work, as far as milliseconds tell."""
    if not config.model:
        raise ConfigError(
            "model is required: a Hugging Face directory or id, or a GGUF file, the same as the engines' "
            "(smollm2-135m is the demo)"
        )
    if not config.prefill and not config.decode:
        raise ConfigError("no engines: name some with --prefill and --decode (host:port or file:PATH)")
    MeshSecret.load(config)
    if _is_handed_over(config):
        adopt(config.listen_fd, on_loopback=config.on_loopback).detach()
    else:
        check_ports(config.host, port=config.port)
    # In a thread: a Hugging Face id may have to be downloaded.
    await asyncio.to_thread(lambda: read_config(resolve(config.model)))
