"""What an engine is configured with: vLLM's names and defaults where it has the thing."""

from typing import Literal, Self

from pydantic import Field, model_validator

from pdmesh.config.contradictions import check_engine
from pdmesh.config.settings import AutoSize, ConnectorNames, HttpConfig, ServiceConfig, Size


class EngineConfig(ServiceConfig, HttpConfig):
    """An engine service (prefill, decode, or both). Names and defaults are vLLM's where it has them."""

    grpc_port: int = Field(default=8201, ge=0, le=65535)
    """gRPC port for the proxy and for peers; 0: any free one."""
    port: int = Field(default=8200, ge=0, le=65535)
    """HTTP port; 0: any free one."""
    engine_id: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")
    """Name of this engine in the mesh; empty: role and a random suffix."""
    model: str = ""
    """Hugging Face directory or id, or a GGUF file."""
    served_model_name: str = ""
    """Name in the API; empty: derived from `model`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and KV. auto: bfloat16 with the CPU library, float32 with PyTorch, which below it is not row-invariant."""
    backend: Literal["auto", "cpu", "torch"] = "auto"
    """Device code that runs the model: the CPU library, or PyTorch; auto: the CPU library where it can serve the model."""
    cpu_isa: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2"] = "auto"
    """Instruction set that the CPU library uses; auto: the fastest that the processor has."""
    quantization: Literal["none", "int8", "int8_weight_only", "int8_activations"] = "none"
    """What the CPU library makes of weights that the checkpoint has in 16 or 32 bits. int8: weights and activations;
    int8_weight_only: weights in groups; both refuse a checkpoint that is quantised already. int8_activations: activations
    where the checkpoint has weights in 4 bits; one that has none is refused."""
    kv_cache_dtype: Literal["auto", "int8_per_token_head"] = "auto"
    """auto: dtype. int8_per_token_head: half of bfloat16's bytes, a scale for each token and KV head (CPU library)."""
    cpu_threads: int = Field(default=0, ge=0, le=1024)
    """Threads for CPU compute; 0: one for each of `cpu_cores`, or for each core that this process may use."""
    cpu_cores: str = ""
    """Cores for these threads, one each, such as 0-3,8; empty: wherever the kernel puts them."""
    cpu_nice: int = Field(default=0, ge=0, le=19)
    """Added to the niceness of these threads: on the same cores, an engine with a higher one gives way to the others."""
    max_model_len: AutoSize = Field(default=0, ge=0, le=1 << 40)
    """Longest prompt plus output, tokens; 0: the model's own limit."""
    block_size: int = Field(default=0, ge=0, le=1024)
    """Tokens per KV block, a power of two; 0: the backend's (32 on CPU, 16 on GPU)."""
    performance_mode: Literal["balanced", "interactivity", "throughput"] = "balanced"
    """For those of `max_num_seqs` and `max_num_batched_tokens` that are not set: throughput doubles both; interactivity
    makes the token budget a quarter, so that a prompt's chunk holds up other requests' tokens for less."""
    max_num_seqs: int = Field(default=0, ge=0, le=65536)
    """Rows: most sequences in one step; 0: by device and use (a server on CPU: 128)."""
    max_num_batched_tokens: AutoSize = Field(default=0, ge=0, le=1 << 20)
    """Token budget of one step, at least `max_num_seqs`; longer prompts are computed in chunks. 0: by device and use (a
    server on CPU: 2048)."""
    enable_chunked_prefill: bool = True
    """Always on: prompts longer than the token budget are computed in chunks. Here for command lines that name it."""
    max_num_active_seqs: int = Field(default=0, ge=0, le=65536)
    """Most sequences admitted into the batch, at most `max_num_seqs`; 0: as many."""
    long_prefill_token_threshold: Size = Field(default=0, ge=0, le=1 << 40)
    """Most tokens one prompt gets per step while there are other requests; 0: no limit but the budget."""
    long_prefill_token_threshold_adaptive: bool = False
    """Never cut below a fair share: the budget divided by the requests that run or wait."""
    long_prefill_token_threshold_fits: bool = False
    """A threshold beyond the context becomes the context, and is no error; set by `pdmesh up` beside its own threshold."""
    max_num_partial_prefills: int = Field(default=0, ge=0, le=65536)
    """Most prompts that are computed in part at the same time; 0: no limit."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs: in order of arrival. priority: lower `priority` first, then in order of arrival."""
    priority_aging_s: float = Field(default=0.0, ge=0, le=86400)
    """With priority: seconds of waiting that outweigh one step of priority, so that nobody starves; 0: strict."""
    async_scheduling: bool = True
    """Plan the next step while one runs."""
    stream_interval: int = Field(default=1, ge=1, le=1 << 20)
    """Tokens per streamed message; the first token always goes at once."""
    enable_prefix_caching: bool = True
    """Reuse full blocks of earlier prompts."""
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = "sha256"
    """Names of blocks inside this engine and in its KV events, as vLLM makes them; xxhash is faster, but not collision-proof."""
    prefix_caching_hash_seed: str = ""
    """What vLLM takes from PYTHONHASHSEED; empty: its fixed seed, or a random one for xxhash."""
    kv_events_config: str = ""
    """vLLM's JSON, such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}: publish KV events over ZMQ."""
    logits_processors: list[str] = Field(default=[])
    """Custom logits processors, as `module:Class`, beside those that installed packages name as entry points."""
    kv_cache_memory_bytes: AutoSize = Field(default=0, ge=0, le=1 << 60)
    """Size of the KV pool; 0: `gpu_memory_utilization` of free memory, at most 2 GiB on CPU."""
    kv_staging_bytes: Size = Field(default=64 << 20, ge=0, le=1 << 40)
    """Memory in which KV of a peer with another block size, dtype or backend is converted, a quarter of it at a time; taken
    when it is first used. 0: such peers are refused."""
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)
    """Share of the device's memory for weights and KV when `kv_cache_memory_bytes` is 0; on CPU a share of free memory."""
    watermark: float = Field(default=0.0, ge=0, lt=1)
    """Share of blocks kept free when new requests are admitted."""
    max_num_queued_reqs: int = Field(default=4096, ge=1, le=1 << 31)
    """Most requests waiting, each of their choices counted; one more is a 503 with Retry-After."""
    max_num_queued_tokens: Size = Field(default=0, ge=0, le=1 << 60)
    """Most prompt tokens of requests whose prompt is not computed yet; beyond it is a 503 with Retry-After. 0: no limit."""
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    """When a pull fails: end the request with an error, or compute the prompt here."""
    preempted_fetch_min_tokens: Size = Field(default=256, ge=0, le=1 << 40)
    """A request that was preempted and lacks at least so many tokens here looks for them in kvcache, at the prefill that had
    them, or has another prefill compute them, before it computes them again. 0: it computes."""
    preempted_chunk_tokens: Size = Field(default=256, ge=0, le=1 << 40)
    """Most tokens per step that a preempted request computes again while there are other requests; 0: no limit but the
    budget."""
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    """kv_producer fetches no KV of other engines, kv_consumer offers them none. The kvcache service serves all."""
    kv_transfer_config: str = ""
    """vLLM's JSON, such as {"kv_connector": "NixlConnector", "kv_role": "kv_both"}: its keys become the settings here."""
    kv_transfer_mode: Literal["pull", "push"] = "pull"
    """push: between engines that both say so, full blocks of long prompts go into decode's prefix cache while prefill still
    computes (connector nixl; see the proxy's push_min_chunks); decode pulls what is left. pull: decode pulls all of it."""
    connector: ConnectorNames = Field(default=["shm", "grpc"])
    """Ways to exchange KV, in order of preference, comma-separated; the first that both sides can is used."""
    kv_checksums: bool = True
    """Tell peers a sum of each block's bytes, and check theirs: damaged KV then fails like any other pull that failed."""
    connector_options: str = ""
    """JSON with an object of options per connector, such as {"nixl": {"num_threads": 4}, "shm": {"throttle_bytes_s": "1G"}}."""
    kv_peers: list[str] = Field(default=[])
    """gRPC `host:port` of engines whose KV may be fetched with vLLM's kv_transfer_params; a name stands for every address it
    resolves to. On loopback this user's own engines need not be listed."""
    kv_lease_duration_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds that a stock `do_remote_decode` offer lives unless fetched. The mesh's own offers have 10 s, renewed."""
    core_timeout_s: float = Field(default=20.0, ge=0, le=3600)
    """Longest silence of the engine core while requests run; then these end with an error, that a proxy answers by going on
    elsewhere. 0: it is waited for as long as they have time."""
    kvcache: str = ""
    """gRPC `host:port` of the kvcache service; empty: no tier."""
    kvcache_spill_usage: float = Field(default=0.8, ge=0, le=1)
    """With kvcache: share of KV blocks in use from which on full blocks of running requests are stored there as well, so that
    a preempted one finds them. 1: only what is still there when one is preempted."""
    kvcache_lookup_timeout_s: float = Field(default=0.25, gt=0, le=30)
    """Longest wait for a tier lookup before the prompt is computed instead."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_engine(self)
        return self
