"""Configuration of the kvcache service."""

from pydantic import Field

from pdmesh.config import ServiceConfig
from pdmesh.config.settings import PoolConnectors
from pdmesh.protocol.peer_bounds import MAX_TIER_KEYS


class KVCacheConfig(ServiceConfig):
    """The KV-cache tier: a host-memory arena of KV blocks with Redis or Valkey behind it."""

    port: int = Field(default=8300, ge=0, le=65535)
    """HTTP port for /health and /metrics; 0: any free one."""
    grpc_port: int = Field(default=8301, ge=0, le=65535)
    """gRPC port for engines; 0: any free one."""
    engine_id: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")
    """Name of this service in the mesh; empty: kvcache and a random suffix."""
    arena_bytes: int = Field(default=1 << 30, ge=1 << 16, le=1 << 46)
    """Host memory for KV blocks, of all layouts together; taken from the machine as blocks arrive."""
    max_layouts: int = Field(default=4, ge=1, le=64)
    """Most models or layouts that share the arena, in equal parts; one more waits until another is idle."""
    layout_idle_s: float = Field(default=600.0, gt=0, le=86400)
    """Seconds without a call after which a layout's part is given to a layout that asks for one."""
    connector: PoolConnectors = Field(default=["shm", "grpc"], min_length=1)
    """Ways to exchange KV, in order of preference, comma-separated; the first that both sides can is used."""
    kv_checksums: bool = True
    """Check a sum of each block's bytes when it arrives, keep it, and tell it to whoever fetches the block."""
    connector_options: str = ""
    """JSON with an object of options per connector, such as {"nixl": {"num_threads": 4}, "shm": {"throttle_bytes_s": "1G"}}."""
    max_keys: int = Field(default=MAX_TIER_KEYS, ge=1, le=1 << 20)
    """Most block keys in one call; engines look for that many of a prompt's first blocks, and store the rest in further calls."""
    max_open_lookups: int = Field(default=4096, ge=1, le=1 << 20)
    """Most lookups whose hits are pinned at once; one more gets no hits."""
    max_queued_stores: int = Field(default=256, ge=1, le=1 << 20)
    """Most store calls waiting to be pulled; one more is dropped and counted."""
    num_store_workers: int = Field(default=2, ge=1, le=64)
    """Stores that are pulled at the same time."""
    store_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """Longest time for one store: reaching the engine and copying its blocks."""
    valkey: str = Field(default="", repr=False)
    """URL of Redis or Valkey: redis://[user:password@]host:port/db, rediss://… or unix:///path; empty: none."""
    valkey_required: bool = True
    """Refuse to start while the server at `valkey` does not answer; one that can only be read, as with a full disk, will do.
    If not, serve from the arena until it does."""
    valkey_ttl_s: int = Field(default=86400, ge=1, le=10 * 365 * 86400)
    """Seconds after which a block in Valkey expires unless it is written or fetched again."""
    valkey_max_bytes: int = Field(default=4 << 30, ge=1 << 16, le=1 << 50)
    """Most bytes of blocks kept in Valkey; the ones used longest ago go first. Holds besides any `maxmemory` there."""
    valkey_timeout_s: float = Field(default=2.0, gt=0, le=60)
    """Longest wait for a connection or for one batch; then Valkey counts as down until it answers a ping."""
    valkey_batch_bytes: int = Field(default=8 << 20, ge=1 << 16, le=256 << 20)
    """Bytes that are fetched or written in one round trip."""
    max_queued_writes: int = Field(default=4096, ge=1, le=1 << 20)
    """Most blocks waiting to be written to Valkey; one more is dropped and counted."""
