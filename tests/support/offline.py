"""What offline tests open engines with: little memory, one thread, sizes that do not depend on the machine."""

from typing import Any

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "cpu_threads": 1,
    "kv_cache_memory_bytes": 8 << 20,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 64,
    "block_size": 32,
}
