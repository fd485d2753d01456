"""Names of the way that KV took when it was not the one that was tried first, for counters and people: `grpc:after:nixl`."""

AFTER = ":after:"


def way_of(connector: str, instead_of: str) -> str:
    """Name a connector that was used because another one had failed; by itself where none had."""
    return f"{connector}{AFTER}{instead_of}" if instead_of else connector


def parts_of(way: str) -> tuple[str, str]:
    """Return the connector that was used, and the one that had failed or nothing."""
    connector, _, instead_of = way.partition(AFTER)
    return connector, instead_of
