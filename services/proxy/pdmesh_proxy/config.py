"""Settings of the proxy service."""

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from pdmesh.config import HttpConfig, ServiceConfig
from pdmesh.protocol.offers import OFFER_LEASE_S
from pdmesh_proxy.targets import parse_target

FINGERPRINT_CHARS = 32
FINGERPRINT = re.compile(rf"[0-9a-fA-F]{{8,{FINGERPRINT_CHARS}}}")


class ProxyConfig(ServiceConfig, HttpConfig):
    """The proxy: the only door for clients."""

    port: int = Field(default=8000, ge=0, le=65535)
    """HTTP port; 0: any free one."""
    listen_fd: int = Field(default=-1, ge=-1)
    """Inherited listening TCP socket to take clients from, instead of `host` and `port`: systemd's first is 3, and `pdmesh up`
    passes one. Whoever holds it may start a successor at once; who connects meanwhile waits for that one."""
    drain_grace_s: float = Field(default=0.0, ge=0, le=3600)
    """Seconds after SIGTERM for which the port stays open and new requests are served while /health says 503, so that load
    balancers look elsewhere first; then the port is free for a successor. With `listen_fd` there is no need."""
    model: str = ""
    """Where the tokenizer and the chat template come from: the same value as the engines' `model`."""
    served_model_name: str = ""
    """Name in the API; empty: the engines'."""
    model_fingerprint: str = ""
    """Serve this model only: its fingerprint, or at least the first 8 hex digits of it, as `pdmesh status` and the log show it of
    each engine. Engines with another are not used, and without one of it requests are a 503. Empty: the model with which most
    engines can be used; of several the one that more engines decode, then the least fingerprint."""
    prefill: list[str] = Field(default=["127.0.0.1:8101"])
    """Prefill engines, comma-separated: gRPC `host:port` (every address of the host is an engine) or `file:PATH` with one
    `host:port` per line. Both are looked at again every `resolve_interval_s`, at rest every `resolve_rest_interval_s`."""
    decode: list[str] = Field(default=["127.0.0.1:8201"])
    """Decode engines, as `prefill`."""
    resolve_interval_s: float = Field(default=2.0, gt=0, le=3600)
    """Seconds between looks at host names and endpoint files."""
    resolve_rest_interval_s: float = Field(default=10.0, gt=0, le=3600)
    """The same while no request comes and every engine is connected; the next request has them looked at at once."""
    pd_min_prompt_tokens: int = Field(default=32, ge=0)
    """A request goes to decode alone when decode would have to compute fewer prompt tokens than this itself; 0: never."""
    early_decode: bool = True
    """Choose decode together with prefill and tell it at once, so that it goes on by prefill's own word: the handoff is some
    milliseconds shorter. False: decode is chosen when prefill is done, by what the engines do then."""
    push_min_chunks: int = Field(default=2, ge=1, le=1 << 20)
    """Between engines with kv_transfer_mode push: a prompt is pushed while it is computed when that takes at least this many
    steps of prefill (its max_num_batched_tokens each); shorter ones are pulled."""
    max_concurrent_requests: int = Field(default=1024, ge=1, le=1 << 20)
    """Most requests in flight; one more is a 503 with Retry-After. A batch of prompts counts once per prompt."""
    request_buffer_tokens: int = Field(default=4096, ge=16, le=1 << 20)
    """Tokens, beside four for each choice, kept for a client that reads more slowly than the engine generates; beyond it
    that request is aborted."""
    max_retries: int = Field(default=3, ge=0, le=100)
    """How often one request may go on elsewhere after an engine failed it, before it has moved on by 32 tokens: then it may as
    often again, and engines that failed it are asked again. Its deadline holds all the same. 0: failures reach the client."""
    engine_wait_timeout_s: float = Field(default=10.0, ge=0, le=3600)
    """Longest wait for an engine when none can serve; the request's own deadline may end it earlier."""
    connect_timeout_s: float = Field(default=3.0, gt=0, le=60)
    """Longest wait for an engine to answer when a session is opened."""
    heartbeat_interval_s: float = Field(default=2.0, gt=0, le=60)
    """Seconds between pings of an engine that works for us (five times that at rest); held offers (lease 10 s) are renewed
    with each."""
    heartbeat_timeout_s: float = Field(default=6.0, gt=0, le=300)
    """Silence after which an engine is taken for dead and its requests go on elsewhere; more than the interval, less than an
    offer's lease."""
    keep_offers_s: float = Field(default=30.0, ge=0, le=3600)
    """Seconds that a prefill keeps a prompt's KV once decode has it, for as long as the request runs: one that is preempted, or
    whose decode dies, fetches it again. Only while the prefill uses less than half of its KV blocks. 0: not kept."""
    prefix_index_entries: int = Field(default=1 << 16, ge=0, le=1 << 24)
    """Most prompt chunks (64 tokens each) whose last engine is remembered; 0: no prefix affinity."""

    @model_validator(mode="after")
    def _check_heartbeat(self) -> Self:
        interval_s, timeout_s = self.heartbeat_interval_s, self.heartbeat_timeout_s
        if timeout_s <= interval_s:
            raise ValueError(
                f"heartbeat-timeout-s {timeout_s:g} is not more than heartbeat-interval-s {interval_s:g}: every engine would be "
                "taken for dead between two pings"
            )
        if 2 * interval_s > OFFER_LEASE_S:
            raise ValueError(
                f"heartbeat-interval-s {interval_s:g} is more than half an offer's lease of {OFFER_LEASE_S:g} s, which pings "
                "renew: one that is late would end it under its request"
            )
        if timeout_s >= OFFER_LEASE_S:
            raise ValueError(
                f"heartbeat-timeout-s {timeout_s:g} must be less than an offer's lease of {OFFER_LEASE_S:g} s: a decode that "
                "stands still has to be found while its ticket is worth something to another"
            )
        return self

    @field_validator("model_fingerprint")
    @classmethod
    def _check_fingerprint(cls, fingerprint: str) -> str:
        if fingerprint and not FINGERPRINT.fullmatch(fingerprint):
            raise ValueError(
                f"{fingerprint!r} must be 8 to {FINGERPRINT_CHARS} hex digits, the beginning of a model's fingerprint, or empty"
            )
        return fingerprint.lower()

    @field_validator("prefill", "decode")
    @classmethod
    def _check_targets(cls, targets: list[str]) -> list[str]:
        for target in targets:
            parse_target(target)
        return targets
