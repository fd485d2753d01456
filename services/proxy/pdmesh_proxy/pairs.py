"""Which prefill can hand over to which decode, and how: by what both said of themselves."""

from pdmesh.errors import HandshakeRefused
from pdmesh.protocol.capabilities import handoff_obstacle
from pdmesh.protocol.exchange import Exchange, exchange
from pdmesh.protocol.layout import differences
from pdmesh_proxy.view import EngineView


def exchange_of(prefill: EngineView, decode: EngineView) -> Exchange | None:
    """How `decode` gets KV that it fetches from `prefill`, by what both said of themselves; None when it cannot."""
    if (
        prefill.peer_id == decode.peer_id
        or prefill.connectors.isdisjoint(decode.connectors)
        or max(prefill.protocol_min, decode.protocol_min) > min(prefill.protocol_max, decode.protocol_max)
        or handoff_obstacle(prefill.capabilities, decode.capabilities)
    ):
        return None
    try:
        return exchange(prefill.names, decode.names)
    except HandshakeRefused:
        return None


def compatible(prefill: EngineView, decode: EngineView) -> bool:
    """Whether `decode` can fetch KV from `prefill`, as it is or by conversion."""
    return exchange_of(prefill, decode) is not None


def incompatibility(prefill: EngineView, decode: EngineView) -> str:
    """What stands between these two that are not `compatible`."""
    found = []
    try:
        exchange(prefill.names, decode.names)
    except HandshakeRefused as exc:
        found.append(exc.message)
    if prefill.connectors.isdisjoint(decode.connectors):
        ours, theirs = (",".join(sorted(engine.connectors)) for engine in (prefill, decode))
        found.append(f"they have no connector in common ({ours} and {theirs})")
    if obstacle := handoff_obstacle(prefill.capabilities, decode.capabilities):
        found.append(obstacle)
    return "; ".join(found) or "their protocol versions differ"


def refusal(prefill: EngineView, decode: EngineView) -> str:
    """One sentence of two that are not `compatible`: their names, both sides' values and the settings to look at."""
    return f"{prefill.engine_id} cannot hand over to {decode.engine_id}: {incompatibility(prefill, decode)}"


def conversion(prefill: EngineView, decode: EngineView) -> str:
    """What of the KV of these two, who exchange it by conversion, differs, and what that does to tokens."""
    layouts = [[] if end.description is None else end.description.layouts for end in (prefill, decode)]
    told = dict.fromkeys(what for one, other in zip(*layouts, strict=False) for what in differences(one, other))
    if exchange_of(prefill, decode) is Exchange.ROUNDED:
        return f"{'; '.join(told) or 'dtype'}; numbers are rounded, so tokens may be others than those of either engine alone"
    return f"{'; '.join(told)}; tokens are the same"
