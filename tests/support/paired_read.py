"""Reads of another agent's memory by the agents that a NIXL helper has; in a process of its own, as UCX reads its environment
once.

Prints how many of them have read, whether all of it has arrived each time, and whether they sleep afterwards.
"""

import os
import sys
import time

import numpy as np

from pdmesh.connector import nixl_agent
from pdmesh.connector.native_agent import AgentSettings, CopyState, Ranges
from pdmesh.connector.native_jobs import address_of, ranges

NUM_BLOCKS, BLOCK_BYTES = 9, 1 << 19
TIMEOUT_S = 30.0

readers: set[str] = set()


class ToldOf(nixl_agent.NixlAgent):
    """Is noted when it reads."""

    def read(self, local: Ranges, remote: Ranges, peer: str) -> int:
        readers.add(self._name)
        return super().read(local, remote, peer)


def main() -> None:
    nixl_agent.NixlAgent = ToldOf  # type: ignore[misc]
    source = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    target = np.zeros_like(source)
    owner = nixl_agent.nixl_agents(AgentSettings(name="owner", on_loopback=True))
    consumer = nixl_agent.nixl_agents(AgentSettings(name="consumer", on_loopback=True))
    for agent, memory in ((owner, source), (consumer, target)):
        agent.register(address_of(memory), memory.nbytes)
    peer = consumer.add_peer(owner.metadata())
    pairs = [
        ranges([address_of(memory[index]) for index in range(NUM_BLOCKS)], BLOCK_BYTES) for memory in (target, source)
    ]
    end_s, is_whole, num_shared = time.monotonic() + TIMEOUT_S, True, 0
    while num_shared < 3 and time.monotonic() < end_s:
        target[:] = 0
        handle = consumer.read(pairs[0], pairs[1], peer)
        while (state := consumer.state(handle)) is CopyState.RUNNING and time.monotonic() < end_s:
            time.sleep(0.0002)
        is_whole &= state is CopyState.DONE and np.array_equal(source, target)
        consumer.release(handle)
        num_shared += len(readers) == 2
    before_s = time.process_time()
    time.sleep(1.0)
    # A progress thread that polls takes half a core.
    is_idle = time.process_time() - before_s < 0.1
    consumer.remove_peer(peer)
    sys.stdout.write(f"{len(readers)} {'whole' if is_whole else 'damaged'} {'idle' if is_idle else 'busy'}\n")
    sys.stdout.flush()
    # Without destructors: NIXL's may wait for peers that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
