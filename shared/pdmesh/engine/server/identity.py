"""Who this engine is: the names and facts that its handshakes, tickets, load reports and metrics carry."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from pdmesh import __version__
from pdmesh.config import EngineConfig
from pdmesh.engine.messages import CoreReady
from pdmesh.errors import ConfigError
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.capabilities import FIRST, OWN, Capabilities, capabilities_to_pb
from pdmesh.protocol.exchange import description_to_pb
from pdmesh.protocol.version import PROTOCOL_MIN, PROTOCOL_VERSION

Role = Literal["prefill", "decode", "both"]


@dataclass(slots=True, kw_only=True)
class Identity:
    """One start of one engine. A restart has the same engine_id at most, never the same epoch."""

    engine_id: str
    role: Role
    model_name: str
    """Name in the API and in metric labels."""
    epoch: int = field(default_factory=time.time_ns)
    address: str = ""
    """`host:port` of the gRPC server as peers reach it; known once it listens."""

    @property
    def peer_id(self) -> str:
        return f"{self.engine_id}@{self.epoch}"


def identify(config: EngineConfig, role: Role, model_name: str) -> Identity:
    """Name this start of the engine; without a configured id, role and a random suffix. Raises ConfigError."""
    role = narrowed_role(role, config.kv_role)
    return Identity(
        engine_id=config.engine_id or f"{role}-{secrets.token_hex(3)}",
        role=role,
        model_name=config.served_model_name or model_name,
    )


def narrowed_role(role: Role, kv_role: str) -> Role:
    """What an engine is to proxies when it may be `role` and `kv-role` says which ends of a handoff it takes.

    Raises ConfigError when nothing of the role is left.
    """
    if kv_role == "kv_both":
        return role
    only: Role = "prefill" if kv_role == "kv_producer" else "decode"
    if role not in (only, "both"):
        does, fits = ("offers", "kv_producer") if role == "prefill" else ("fetches", "kv_consumer")
        raise ConfigError(
            f"kv-role {kv_role}: a {role} service {does} KV, which this role refuses; it must be {fits} or kv_both"
        )
    return only


def describe(identity: Identity, ready: CoreReady, config: EngineConfig) -> pb.EngineInfo:
    """Say what proxies must know to route to this engine."""
    return pb.EngineInfo(
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        role=identity.role,
        model=identity.model_name,
        model_fingerprint=ready.model_fingerprint,
        layout_fingerprints=ready.layout_fingerprints,
        block_size=ready.block_size,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        connectors=[name for name in config.connector if name in ready.connectors],
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_VERSION,
        capabilities=capabilities_to_pb(capabilities(ready, config)),
        kv=description_to_pb(ready.description),
        version=__version__,
        num_blocks=ready.num_blocks,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        max_num_seqs=ready.max_num_seqs,
    )


def capabilities(ready: CoreReady, config: EngineConfig) -> Capabilities:
    """Say what this engine can as it is configured."""
    return msgspec.structs.replace(OWN, push=FIRST) if pushes(ready, config) else OWN


def pushes(ready: CoreReady, config: EngineConfig) -> bool:
    """Whether it takes part in pushes. Blocks of a sliding window are let go while a prompt is still computed."""
    return config.kv_transfer_mode == "push" and bool(ready.push_connectors) and ready.keeps_history


def engine_id_of(peer_id: str) -> str:
    """The part of `engine_id@epoch` that survives a restart."""
    return peer_id.rpartition("@")[0]
