"""What `pdmesh up` finds out before it starts a process that would have to be stopped again."""

import asyncio

from pdmesh.config import EngineConfig
from pdmesh.engine.model_check import check_model
from pdmesh.errors import ConfigError, InternalError
from pdmesh.models.source import ModelSource
from pdmesh.supervisor.config import UpConfig
from pdmesh.supervisor.plan import ChildSpec

CHECK_TIMEOUT_S = 60.0
CONFIG_ERROR_CODE = 2


def check_shared(config: UpConfig) -> ModelSource:
    """Check what all services get alike: secret, certificates, model, context, KV memory. Blocks; raises ConfigError."""
    common = EngineConfig(
        model=config.model,
        dtype=config.dtype,
        backend=config.backend,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        max_model_len=config.max_model_len,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        host=config.host,
        secret=config.secret,
        secret_file=config.secret_file,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        tls_ca=config.tls_ca,
        tls_server_name=config.tls_server_name,
    )
    if config.secret or config.secret_file or config.tls_cert or config.valkey:
        # It brings gRPC along, a tenth of a second that a mesh with a secret of our own making does not need.
        from pdmesh.security import MeshSecret

        MeshSecret.load(common)
    if not set(config.connector) <= {"shm", "grpc"}:
        from pdmesh.connector.registry import check_installed

        check_installed(config.connector)
    return check_model(common)


async def check_children(specs: list[ChildSpec]) -> None:
    """Have services check their own configuration, side by side. Raises ConfigError with the first one's complaint.

    Takes as long as their imports, so it is for those that were given more than what we make up ourselves.
    """
    await asyncio.gather(*(_check_child(spec) for spec in specs))


async def _check_child(spec: ChildSpec) -> None:
    process = await asyncio.create_subprocess_exec(
        *spec.argv,
        "--check-config",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=dict(spec.env),
    )
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError:
        raise InternalError(f"{spec.name} did not check its configuration in {CHECK_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = (errors.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        message = f"{spec.name}: {last.removeprefix(f'pdmesh {spec.role}: ')}"
        raise ConfigError(message) if process.returncode == CONFIG_ERROR_CODE else InternalError(message)
