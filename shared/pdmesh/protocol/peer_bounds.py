"""What is taken from a peer at most: a faulty one is told the field and its limit, and costs nothing that stays.

Ids are remembered after a transfer's end and stand in errors and logs, so that none may be of any length.
"""

from collections.abc import Sized

from pdmesh.errors import InvalidRequest
from pdmesh.protocol import mesh_pb2 as pb

MAX_ID_CHARS = 256
MAX_REASON_CHARS = 1024
MAX_DIGEST_BYTES = 64
MAX_GROUPS = 256
"""Of KV groups in one message; models have a handful."""
MAX_CAPABILITIES = 256
MAX_LAYERS = 1 << 14
"""Of one KV group; the deepest models have some hundred."""
MAX_METADATA_BYTES = 1 << 20
"""That a connector's worker half says of a pool; NIXL's has some hundred bytes for each network device."""
MAX_TRANSFERS = 1 << 16
"""That run at one owner, and that one call may renew."""
MAX_TIER_KEYS = 1 << 16
"""Block keys that the tier takes in one call, unless its configuration says otherwise."""
MAX_KEYS_METADATA_KEY = "pdmesh-max-keys"
"""Trailing metadata of a call that the tier refused for its number of keys: how many it takes."""


def check_handshake(request: pb.HandshakeRequest) -> None:
    """Raise InvalidRequest that names the field."""
    _check_text("peer_id", request.peer_id, MAX_ID_CHARS)
    check_names(request)
    _check_count("block_bytes", request.block_bytes, MAX_GROUPS)


def check_names(message: pb.EngineInfo | pb.HandshakeRequest | pb.HandshakeReply) -> None:
    """Raise InvalidRequest that names the field, for what an engine tells of its KV: it is compared, and remembered."""
    _check_text("model_fingerprint", message.model_fingerprint, MAX_ID_CHARS)
    _check_count("layout_fingerprints", message.layout_fingerprints, MAX_GROUPS)
    for fingerprint in message.layout_fingerprints:
        _check_text("layout_fingerprints", fingerprint, MAX_ID_CHARS)
    _check_count("capabilities", message.capabilities, MAX_CAPABILITIES)
    _check_text("kv.weights_fingerprint", message.kv.weights_fingerprint, MAX_ID_CHARS)
    _check_count("kv.layouts", message.kv.layouts, MAX_GROUPS)
    for layout in message.kv.layouts:
        _check_count("kv.layouts.layers", layout.layers, MAX_LAYERS)
        _check_text("kv.layouts.dtype", layout.dtype, MAX_ID_CHARS)
        _check_text("kv.layouts.packing", layout.packing, MAX_ID_CHARS)


def check_begin(request: pb.BeginTransferRequest, num_blocks: int) -> None:
    """Raise InvalidRequest that names the field; `num_blocks` is the pool's."""
    _check_id("transfer_id", request.transfer_id)
    _check_id("consumer_id", request.consumer_id)
    _check_id("offer_id", request.offer_id)
    _check_digest("digest", request.digest)
    _check_count("groups", request.groups, MAX_GROUPS)
    for group in request.groups:
        _check_count("groups.block_ids", group.block_ids, num_blocks)
        if group.generations and len(group.generations) != len(group.block_ids):
            raise InvalidRequest(
                f"groups.generations: {len(group.generations)} given for {len(group.block_ids)} blocks; one each, or none",
                param="groups.generations",
            )


def check_push(request: pb.PushRequest) -> None:
    """Raise InvalidRequest that names the field."""
    check_begin(request.begin, 0)
    _check_count("targets", request.targets, MAX_GROUPS)
    for target in request.targets:
        _check_count("targets.block_ids", target.block_ids, request.num_blocks)
    _check_text("pool.connector", request.pool.connector, MAX_ID_CHARS)
    if len(request.pool.metadata) > MAX_METADATA_BYTES:
        raise _too_long("pool.metadata", len(request.pool.metadata), f"{MAX_METADATA_BYTES} bytes")


def check_renew(request: pb.RenewTransfersRequest) -> None:
    """Raise InvalidRequest that names the field."""
    _check_count("transfer_ids", request.transfer_ids, MAX_TRANSFERS)
    for each in request.transfer_ids:
        _check_id("transfer_ids", each)


def check_end(request: pb.EndTransferRequest) -> None:
    """Raise InvalidRequest that names the field."""
    _check_id("transfer_id", request.transfer_id)
    _check_text("peer_id", request.peer_id, MAX_ID_CHARS)
    _check_text("reason", request.reason, MAX_REASON_CHARS)
    _check_text("release_offer", request.release_offer, MAX_ID_CHARS)
    _check_text("release_offer_of", request.release_offer_of, MAX_ID_CHARS)
    _check_digest("release_digest", request.release_digest)
    if request.release_offer_of and (request.release_offer or not request.release_digest):
        raise InvalidRequest("release_offer_of needs release_digest, and no release_offer", param="release_offer_of")


def check_read(request: pb.ReadBlocksRequest) -> None:
    """Raise InvalidRequest that names the field; which blocks there are the pool knows."""
    _check_text("peer_id", request.peer_id, MAX_ID_CHARS)


def _check_id(field: str, value: str) -> None:
    if not 0 < len(value) <= MAX_ID_CHARS:
        raise InvalidRequest(f"{field} must have 1 to {MAX_ID_CHARS} characters, got {len(value)}", param=field)


def _check_digest(name: str, digest: bytes) -> None:
    if len(digest) > MAX_DIGEST_BYTES:
        raise _too_long(name, len(digest), f"{MAX_DIGEST_BYTES} bytes")


def _check_text(field: str, value: str, most: int) -> None:
    if len(value) > most:
        raise _too_long(field, len(value), f"{most} characters")


def _check_count(field: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise _too_long(field, len(values), str(most))


def _too_long(field: str, given: int, most: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {given} given, at most {most} are taken", param=field)
