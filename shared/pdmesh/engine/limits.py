"""What the scheduler must keep to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the scheduler must keep to; resolved from configuration, model and pool."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_num_active_seqs: int = 0
    """0: as many as `max_num_seqs`."""
    long_prefill_token_threshold: int = 0
    """0 is off."""
    is_threshold_adaptive: bool = False
    max_num_partial_prefills: int = 0
    """0 is off."""
    by_priority: bool = False
    priority_aging_s: float = 0.0
    """0: strict."""
    watermark_blocks: int = 0
    max_num_queued_reqs: int = 4096
    """Requests, each choice counted."""
    max_num_queued_tokens: int = 0
    """Prompt tokens of requests whose prompt is not computed; 0: no limit."""
    refetch_min_tokens: int = 0
    """Least tokens missing after a preemption for which the server is asked for a source; 0: never."""
    preempted_chunk_tokens: int = 0
    """Most tokens per step that a preempted sequence computes again beside others; 0 is off."""
    spill_usage: float = 1.0
    """Share of blocks in use from which on full blocks are named to the tier as they come; 1: at preemption only."""
    stream_interval: int = 1
