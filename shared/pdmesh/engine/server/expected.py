"""One push that this engine expects, as its server keeps it, and why nobody waits for one any more."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from pdmesh.engine.push_messages import PRESSURE, PushExpected
from pdmesh.engine.server.requests import RunningRequest, Sink
from pdmesh.protocol.pushes import Expectation


class Over(StrEnum):
    """Why nobody waits for a push any more."""

    CLAIMED = "claimed"
    WITHDRAWN = "withdrawn"
    TIMEOUT = "timeout"
    SESSION = "session"
    FAILED = "failed"
    """It came to less than its owner's word that all is written."""
    PRESSURE = PRESSURE


@dataclass(slots=True, kw_only=True, eq=False)
class Expected:
    """One expectation, until it is over and its writer has stopped."""

    expectation: Expectation
    sink: Sink
    transfer_id: str
    plan: "asyncio.Future[PushExpected]"
    deadline_s: float
    """Of the request that it is for, on the monotonic clock."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing more arrives."""
    receiving: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    has_landing: bool = False
    """The core may hold blocks for it."""
    has_ordered: bool = False
    """The owner may have been asked to write."""
    num_shut_out: int = 0
    """How often writers had been shut out when it was."""
    has_ended: bool = False
    """Its owner has said that it writes no more."""
    is_stopped: bool = False
    is_over: bool = False
    num_blocks: int = 0
    """Written, of each group."""
    failure: str = ""
    running: RunningRequest | None = None
    """The request that has come for it."""
