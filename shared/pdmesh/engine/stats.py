"""What a core counts and tells beside each step."""

import msgspec


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gauges and cumulative counters of the core, sent with each step output and when it falls idle."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_waiting_remote: int = 0
    num_blocks_used: int = 0
    """Blocks referenced by requests or offers."""
    num_blocks: int = 0
    num_offers_held: int = 0
    num_lanes_used: int = 0
    """Of the staging area."""
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    """Tokens."""
    external_queries: int = 0
    external_hits: int = 0
    steps: int = 0
    step_tokens: int = 0
    """Tokens scheduled by the latest step."""
    max_step_tokens: int = 0
    nan_requests: int = 0
    illegal_events: int = 0
    """Requests that met a bug of the engine's states."""
    pushed_tokens: int = 0
    """Prompt tokens that requests found because they had been pushed here."""
    num_blocks_quarantined: int = 0
    """Blocks that nobody wants and a peer may still write."""
    told_ahead: int = 0
    """Requests that went on by a notice of their owner's core."""
    undecodable_messages: int = 0
    """Dropped between server and core, in both directions; the server adds its own."""
