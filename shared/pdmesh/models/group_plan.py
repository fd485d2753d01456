"""Which layers share KV blocks: a pure function of each layer's sliding window."""

from collections.abc import Sequence
from dataclasses import dataclass

# Share of a block's bytes that padding may take before another size is looked for.
MAX_PADDING = 0.25
# Each group has block tables and an index of its own, so a step's and a request's bookkeeping grows with their number.
MAX_GROUPS = 16


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same rule, whose keys and values lie in the same blocks."""

    window: int | None
    """Tokens that a query sees, itself included; None: all."""
    layers: tuple[int, ...]
    """Rising. The longest of a plan says how many layers a block has room for."""


def plan_groups(layer_windows: Sequence[int | None]) -> list[LayerGroup]:
    """Part the layers into groups; full attention first, then wider windows before narrower, each in order of layers.

    All groups share one size, so that a block of any takes the same bytes; a group with fewer layers is padded. The size is
    the count of the rarest kind, when that pads little and gives few groups; else that of least padding within MAX_GROUPS,
    of these the largest. Layers that are all alike are one group. Needs one layer at least.
    """
    kinds = {window: [i for i, each in enumerate(layer_windows) if each == window] for window in set(layer_windows)}
    counts = [len(layers) for layers in kinds.values()]
    size = _group_size(counts)
    groups = []
    for window in sorted(kinds, key=lambda window: (window is not None, -(window or 0))):
        layers = kinds[window]
        groups += [LayerGroup(window, tuple(layers[at : at + size])) for at in range(0, len(layers), size)]
    return groups


def _group_size(counts: list[int]) -> int:
    smallest, largest = min(counts), max(counts)
    if _padding(counts, smallest) <= MAX_PADDING and _num_groups(counts, smallest) <= MAX_GROUPS:
        return smallest
    sizes = [size for size in range(1, largest + 1) if _num_groups(counts, size) <= MAX_GROUPS]
    # More kinds than MAX_GROUPS leave only the largest size, one group per kind.
    return min(sizes or [largest], key=lambda size: (_padding(counts, size), -size))


def _num_groups(counts: list[int], size: int) -> int:
    return sum(-(-count // size) for count in counts)


def _padding(counts: list[int], size: int) -> float:
    return 1 - sum(counts) / (size * _num_groups(counts, size))
