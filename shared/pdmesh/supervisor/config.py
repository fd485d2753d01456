"""Configuration of `pdmesh up`: what to start and what to hand to it."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from pdmesh.config import LOOPBACK_HOSTS, TlsConfig
from pdmesh.config.settings import AutoSize, PoolConnectors, Size
from pdmesh.models.source import DEMO_MODEL

MAX_REPLICAS = 64


class UpConfig(TlsConfig):
    """Start a whole mesh on this machine: Valkey, kvcache, prefill, decode and proxy, each a process of its own."""

    model: str = DEMO_MODEL
    """Hugging Face directory or id, GGUF file, or the name of the demo model."""
    served_model_name: str = ""
    """Name in the API; empty: derived from `model`."""
    prefill: int = Field(default=1, ge=0, le=MAX_REPLICAS)
    """Prefill engines to start; 0: no disaggregation, decode computes prompts too."""
    decode: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    """Decode engines to start."""
    aggregated: bool = False
    """One engine does prefill and decode: no disaggregation."""
    connector: PoolConnectors = Field(default=["shm", "grpc"])
    """Ways to move KV between engines, in order of preference, comma-separated; kvcache has the same. `file` is for engines
    alone and goes to them by --prefill-args and --decode-args: "--connector file,grpc --connector-options …"."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and KV; auto: bfloat16 with the CPU library, float32 with PyTorch."""
    backend: Literal["auto", "cpu", "torch"] = "auto"
    """The CPU library, or PyTorch; auto: the CPU library where it can serve the model."""
    quantization: Literal["none", "int8", "int8_weight_only", "int8_activations"] = "none"
    """What engines make of weights that the checkpoint has in 16 or 32 bits, or of activations where it has them in 4."""
    kv_cache_dtype: Literal["auto", "int8_per_token_head"] = "auto"
    """KV in `dtype`, or in 8 bits with a scale for each token and KV head."""
    host: str = "127.0.0.1"
    """Address of the proxy; all others stay on loopback. Off loopback the mesh secret or mutual TLS is required."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the proxy."""
    api_key: list[str] = Field(default=[], repr=False)
    """Keys that clients may use, comma-separated. Empty: no check."""
    max_model_len: AutoSize = Field(default=0, ge=0)
    """Longest prompt plus output, tokens; 0: the model's own limit."""
    kv_cache_memory_bytes: AutoSize = Field(default=0, ge=0, le=1 << 60)
    """Size of each engine's KV pool; 0: the engine decides."""
    cpu_threads: int = Field(default=0, ge=0, le=1024)
    """Compute threads of each engine; 0: all cores, divided by a role's engines at the start. Prefill's give way to decode's."""
    kvcache: bool = True
    """Start the KV-cache tier."""
    valkey: str = ""
    """URL of a Redis or Valkey server for the tier, redis://…; empty: an embedded Valkey is started."""
    valkey_required: bool = True
    """Refuse to start while the server at `valkey` does not answer."""
    valkey_memory_bytes: Size = Field(default=1 << 30, ge=1 << 20)
    """Most memory that the embedded Valkey takes; what was used longest ago goes first."""
    prefill_args: str = ""
    """Further flags for every prefill engine, as one string: "--max-num-batched-tokens 512"."""
    decode_args: str = ""
    """Further flags for every decode engine."""
    kvcache_args: str = ""
    """Further flags for kvcache."""
    proxy_args: str = ""
    """Further flags for the proxy."""
    secret: str = Field(default="", repr=False)
    """Mesh secret; empty: a random one for this run. Prefer PDMESH_SECRET to the flag: flags are visible to all users."""
    secret_file: str = ""
    """File with the mesh secret; wins over `secret`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that the services log."""
    log_dir: str = ""
    """Folder for the services' logs; empty: `logs` in this mesh's runtime folder."""
    startup_timeout_s: float = Field(default=900.0, gt=0, le=86400)
    """Seconds until everything must be ready; loading a large model takes most of it."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """Seconds that running requests get to finish on Ctrl-C; a second Ctrl-C ends them at once."""

    @field_validator("connector", mode="before")
    @classmethod
    def _check_file(cls, names: object) -> object:
        if isinstance(names, list | tuple) and "file" in names:
            raise ValueError(
                "file is for engines alone, not for kvcache, and needs options: give it to them by --prefill-args and "
                "--decode-args, as \"--connector file,grpc --connector-options '{...}'\""
            )
        return names

    @model_validator(mode="after")
    def _check_secret(self) -> "UpConfig":
        if self.host not in LOOPBACK_HOSTS and not (self.secret or self.secret_file or self.tls_cert):
            raise ValueError(
                f"host {self.host} is reachable from other machines, so the mesh secret is required: "
                "set --secret-file or PDMESH_SECRET (at least 16 characters), or --tls-cert, --tls-key and --tls-ca"
            )
        return self

    @model_validator(mode="after")
    def _check_aggregated(self) -> "UpConfig":
        if self.aggregated and "prefill" in self.model_fields_set and self.prefill:
            raise ValueError(
                f"aggregated means that no prefill engines are started, but --prefill is {self.prefill}: leave one out"
            )
        return self

    @property
    def num_prefill(self) -> int:
        """Prefill engines that `aggregated` leaves."""
        return 0 if self.aggregated else self.prefill
