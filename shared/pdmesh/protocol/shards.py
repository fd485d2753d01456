"""Which KV heads move between which ranks when prefill and decode are split over different numbers of ranks.

For engines that are tensor-parallel: each destination rank asks here what to read from whom, before it begins its transfers, and
a router asks before it pairs the two. Like vLLM, ranks share the KV heads out in order, and where ranks outnumber heads,
neighbours hold the same one.
"""

from dataclasses import dataclass

from pdmesh.errors import HandshakeRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPiece:
    """Neighbouring KV heads that one rank reads from another. Heads are counted within the rank's own."""

    source_rank: int
    source_head: int
    """The first."""
    destination_rank: int
    destination_head: int
    """The first."""
    num_heads: int


def map_heads(source_size: int, destination_size: int, num_kv_heads: int) -> tuple[HeadPiece, ...]:
    """Return what each rank of `destination_size` reads from the ranks of `source_size`, in its order of ranks and heads.

    Every head of every destination rank is in one piece, from a rank that holds it. Of the source ranks that hold the same head,
    each serves as many destination ranks as the others, or one more.

    Raises HandshakeRefused for a size over which the model's `num_kv_heads` cannot be shared out.
    """
    _check(source_size, num_kv_heads, "source")
    _check(destination_size, num_kv_heads, "destination")
    pieces = []
    for rank in range(destination_size):
        own = heads_of(rank, destination_size, num_kv_heads)
        sources = [_source(head, rank, source_size, destination_size, num_kv_heads) for head in own]
        start = 0
        for end in range(1, len(own) + 1):
            if end < len(own) and sources[end] == sources[start]:
                continue
            pieces.append(
                HeadPiece(
                    source_rank=sources[start],
                    source_head=own[start] - heads_of(sources[start], source_size, num_kv_heads).start,
                    destination_rank=rank,
                    destination_head=start,
                    num_heads=end - start,
                )
            )
            start = end
    return tuple(pieces)


def heads_of(rank: int, size: int, num_kv_heads: int) -> range:
    """Return which of the model's KV heads `rank` of `size` holds. Raises HandshakeRefused as `map_heads` does."""
    _check(size, num_kv_heads, "")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank}: not one of 0 ... {size - 1}")
    if size > num_kv_heads:
        head = rank // (size // num_kv_heads)
        return range(head, head + 1)
    each = num_kv_heads // size
    return range(rank * each, (rank + 1) * each)


def _source(head: int, rank: int, source_size: int, destination_size: int, num_kv_heads: int) -> int:
    """Choose, for a rank of the destination that holds `head`, one of the source's that do."""
    if source_size <= num_kv_heads:
        return head // (num_kv_heads // source_size)
    num_holders = source_size // num_kv_heads
    num_readers = max(1, destination_size // num_kv_heads)
    return head * num_holders + rank % num_readers * num_holders // num_readers


def _check(size: int, num_kv_heads: int, end: str) -> None:
    name = f"{end} tensor-parallel size {size}".strip()
    if size < 1 or num_kv_heads < 1:
        raise HandshakeRefused(f"{name} and {num_kv_heads} KV heads: both must be at least 1")
    if num_kv_heads % size and size % num_kv_heads:
        raise HandshakeRefused(f"{name}: neither divides the model's {num_kv_heads} KV heads nor is a multiple of them")
