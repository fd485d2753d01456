"""vLLM's `kv_transfer_params`, the form in which stock routers carry a handoff between two engines' HTTP ports.

A prefill leg says `do_remote_decode` and gets the parameters of its offer back; a decode leg brings them with
`do_remote_prefill`. Values come from a client, so each is checked and every complaint names its field.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from pdmesh.errors import InvalidRequest
from pdmesh.protocol.messages import GroupBlocks

FIELD = "kv_transfer_params"
# What a count of tokens can be on the wire between engines.
MAX_TOKENS = (1 << 32) - 1


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """All names that vLLM and its routers send; those without meaning here are accepted and ignored."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[list[int] | int] | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None
    remote_prefill_cached_tokens: int | None = None
    tp_size: int | None = None
    dcp_size: int | None = None
    pp_size: int | None = None
    transfer_mode: str | None = None
    transfer_id: str | None = None
    remote_blocks_expiry_time: float | None = None
    prompt_token_ids: list[int] | None = None


class RemoteKV(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode leg asks to fetch."""

    engine_id: str
    offer_id: str
    host: str
    port: int
    groups: list[GroupBlocks]
    """Block ids only; the owner knows the generations."""
    num_tokens: int | None

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(params: Mapping[str, Any]) -> TransferParams:
    """Check names and types. Raises InvalidRequest that names the field."""
    if unknown := sorted(set(params) - set(TransferParams.__struct_fields__)):
        raise _invalid(unknown[0], "is not a field that engines know")
    try:
        parsed = msgspec.convert(dict(params), TransferParams)
    except msgspec.ValidationError as exc:
        reason, _, path = str(exc).partition(" - at `$")
        field = FIELD + path.rstrip("`")
        raise InvalidRequest(f"{field}: {reason}", param=field) from None
    if parsed.do_remote_decode and parsed.do_remote_prefill:
        raise _invalid("do_remote_prefill", "and do_remote_decode exclude each other")
    for name in ("tp_size", "dcp_size", "pp_size"):
        if getattr(parsed, name) not in (None, 1):
            raise _invalid(name, "must be 1: this engine is not sharded")
    if parsed.transfer_mode not in (None, "pull"):
        raise _invalid("transfer_mode", "must be 'pull'")
    return parsed


def check_prompt(params: TransferParams, token_ids: list[int]) -> None:
    """Raise InvalidRequest when a router's idea of the prompt differs from ours: the KV would be another prompt's."""
    if params.prompt_token_ids is not None and params.prompt_token_ids != token_ids:
        raise _invalid("prompt_token_ids", "must be the tokens of this request's prompt")


def remote_kv(params: TransferParams) -> RemoteKV:
    """Take a decode leg's source. Raises InvalidRequest that names what is missing or out of range."""
    engine_id = params.remote_engine_id or _missing("remote_engine_id")
    offer_id = params.remote_request_id or _missing("remote_request_id")
    host = params.remote_host or _missing("remote_host")
    port = params.remote_port or _missing("remote_port")
    if not 0 < port < 65536:
        raise _invalid("remote_port", "must be between 1 and 65535")
    num_tokens = params.remote_num_tokens
    if num_tokens is not None and not 0 < num_tokens <= MAX_TOKENS:
        # How many it is the owner says: what routers send is not compared with that.
        raise _invalid("remote_num_tokens", f"must be between 1 and {MAX_TOKENS}")
    return RemoteKV(
        engine_id=engine_id,
        offer_id=offer_id,
        host=host,
        port=port,
        groups=_groups(params.remote_block_ids or _missing("remote_block_ids")),
        num_tokens=params.remote_num_tokens,
    )


def named_source(params: Mapping[str, Any]) -> RemoteKV | None:
    """The offer that a refused decode leg would have fetched, whatever else is wrong with its parameters; None: it names none."""
    host, port = params.get("remote_host"), params.get("remote_port")
    engine_id, offer_id = params.get("remote_engine_id"), params.get("remote_request_id")
    if not params.get("do_remote_prefill") or not all(isinstance(name, str) for name in (engine_id, offer_id, host)):
        return None
    if type(port) is not int or not 0 < port < 65536:
        return None
    return RemoteKV(engine_id=engine_id, offer_id=offer_id, host=host, port=port, groups=[], num_tokens=None)  # type: ignore[arg-type]


def offered(
    *,
    engine_id: str,
    offer_id: str,
    address: str,
    groups: list[GroupBlocks],
    num_tokens: int,
    num_cached: int,
) -> dict[str, object]:
    """Make the parameters that a prefill leg's answer carries; a router forwards them verbatim to the decode leg."""
    host, _, port = address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [group.block_ids for group in groups],
        "remote_engine_id": engine_id,
        "remote_request_id": offer_id,
        "remote_host": host.strip("[]"),
        "remote_port": int(port),
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": num_cached,
    }


def _groups(block_ids: list[list[int] | int]) -> list[GroupBlocks]:
    # A single group may come without its outer list, as vLLM had it before hybrid models.
    flat = [block for block in block_ids if isinstance(block, int)]
    lists = [flat] if flat else [ids for ids in block_ids if isinstance(ids, list)]
    groups = []
    for group, ids in enumerate(lists):
        if (flat and len(flat) < len(block_ids)) or not all(0 <= block < 1 << 32 for block in ids):
            raise _invalid("remote_block_ids", "must be lists of block numbers, one per KV group")
        groups.append(GroupBlocks(group=group, block_ids=ids, generations=[]))
    return groups


def _missing(name: str) -> Any:
    raise _invalid(name, "is needed with do_remote_prefill")


def _invalid(name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}.{name} {problem}", param=f"{FIELD}.{name}")
