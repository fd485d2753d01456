"""What a service can, as ranges of versions, so that two releases work together wherever their ranges meet.

The protocol's own version (`version.py`) says what is said on the wire. What is not said there has versions of its own: how a
ticket is written, how a pool lies in memory. A range that a peer does not tell is that of protocol version 1; names that are
not known here are a later release's and are ignored.

How a new version of something comes: one release reads it and still writes the old one, the next writes it, the one after no
longer reads the old one. So any two releases that follow each other work together.
"""

from collections.abc import Iterable

import msgspec

from pdmesh.protocol import mesh_pb2 as pb


class Versions(msgspec.Struct, frozen=True, array_like=True):
    """A range, both ends included."""

    oldest: int
    newest: int

    def meet(self, other: "Versions") -> int | None:
        """The newest version in both; None when there is none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None

    def covers(self, other: "Versions") -> bool:
        """Whether all of the other are in this one."""
        return self.oldest <= other.oldest and other.newest <= self.newest

    def __str__(self) -> str:
        return f"{self.oldest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


FIRST = Versions(1, 1)
NONE = Versions(0, 0)
"""Of what a peer of protocol version 1 does not have."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Each default is what a peer of protocol version 1 has."""

    ticket_write: Versions = FIRST
    """The version in which it writes tickets: one, as a ticket is written before anyone knows who will read it. Where a peer
    tells several, any of them may come."""
    ticket_read: Versions = FIRST
    """Versions that it can read."""
    pool: Versions = FIRST
    """Layouts of a pool's memory (generation words, then blocks) that it has or can read."""
    kv_convert: Versions = NONE
    """Tables of packings and dtypes (`layout.DTYPES`) from which and to which it converts what it reads."""
    push: Versions = NONE
    """Of writing KV into a peer's pool, and of having it written, while the prompt is still computed."""
    await_offer: Versions = NONE
    """Of beginning a transfer, and of having it begun, before the offer is sealed: decode hears of it from prefill itself."""


UNTOLD = Capabilities()
"""Of a peer that tells nothing."""
OWN = Capabilities(kv_convert=Versions(1, 1), await_offer=Versions(1, 1))
"""What this release can."""


def capabilities_to_pb(capabilities: Capabilities) -> list[pb.Capability]:
    """Encode."""
    ranges = ((name, getattr(capabilities, name)) for name in Capabilities.__struct_fields__)
    return [pb.Capability(name=name, oldest=versions.oldest, newest=versions.newest) for name, versions in ranges]


def capabilities_from_pb(messages: Iterable[pb.Capability]) -> Capabilities:
    """Decode; of a name that comes twice the last counts."""
    told = {each.name: Versions(each.oldest, each.newest) for each in messages}
    return Capabilities(**{name: told[name] for name in Capabilities.__struct_fields__ if name in told})


def pool_obstacle(owner: Capabilities, reader: Capabilities) -> str:
    """Why `reader` cannot read the memory of `owner`'s pool; empty when it can."""
    if owner.pool.meet(reader.pool) is None:
        return f"the pool's memory has layout version {owner.pool}, the reader knows {reader.pool}"
    return ""


def handoff_obstacle(prefill: Capabilities, decode: Capabilities) -> str:
    """Why `decode` cannot go on where `prefill` ended; empty when it can."""
    if not decode.ticket_read.covers(prefill.ticket_write):
        return f"tickets are written in version {prefill.ticket_write} and read in {decode.ticket_read}"
    return pool_obstacle(prefill, decode)


def can_push(prefill: Capabilities, decode: Capabilities) -> bool:
    """Whether `prefill` may write KV into `decode`'s pool."""
    return (prefill.push.meet(decode.push) or 0) > 0


def can_await(prefill: Capabilities, decode: Capabilities) -> bool:
    """Whether `decode` may ask `prefill` for an offer that is still computed."""
    return (prefill.await_offer.meet(decode.await_offer) or 0) > 0
