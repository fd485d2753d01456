"""How many block keys the tier takes in one call: as many as one that nobody has configured, until it refuses and says its own.

A refused call is about that call. The tier lives, and answers the next one.
"""

import logging
from typing import Any

import grpc
import grpc.aio

from pdmesh.protocol.peer_bounds import MAX_KEYS_METADATA_KEY, MAX_TIER_KEYS

log = logging.getLogger(__name__)

_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


class TierBound:
    """The bound of one tier, as far as it is known here."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_reported = False
        self.num_keys = MAX_TIER_KEYS
        """Most keys to send in one call."""

    def forget(self) -> None:
        """Another start of the tier may have another one."""
        self.num_keys = MAX_TIER_KEYS
        self._is_reported = False

    def learn(self, error: grpc.aio.AioRpcError) -> bool:
        """Take the bound from a refusal; whether the call is to be made again with fewer keys. It shrinks each time."""
        # Other than the stubs say: pairs.
        metadata: Any = error.trailing_metadata() or ()
        told = next((value for key, value in metadata if key == MAX_KEYS_METADATA_KEY), "")
        num_keys = int(told) if isinstance(told, str) and told.isdecimal() else 0
        if not 0 < num_keys < self.num_keys:
            return False
        self.num_keys = num_keys
        log.info("kvcache %s takes %d keys in one call (its max-keys)", self._address, self.num_keys)
        return True

    def refused(self, call: str, error: grpc.aio.AioRpcError) -> bool:
        """Whether the tier would not have this call. Says so in the log once for each start of the tier."""
        if error.code() not in _REFUSALS:
            return False
        if not self._is_reported:
            log.warning(
                "kvcache %s refused a %s: %s %s", self._address, call, error.code().name.lower(), error.details()
            )
            self._is_reported = True
        return True
