"""What both ends of every gRPC connection in the mesh are told."""

from typing import Any

# One frame may carry a 1 M token prompt (4 MB as varints) or a chunk of KV blocks.
GRPC_MAX_MESSAGE_BYTES = 64 << 20
GRPC_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", GRPC_MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", GRPC_MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # For hosts that vanish while all is at rest; whoever waits for an answer has a deadline or a heartbeat of its own.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
]
