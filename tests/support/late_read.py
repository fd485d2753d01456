"""A helper over real NIXL whose peer is given up in the middle of a pull; in a process of its own, as UCX reads its environment
once.

Prints whether the read ran when it was given up, and how many blocks were overwritten after the pull was said to have ended.
"""

import os
import sys
import time

from pdmesh.connector.native_agent import AgentSettings, CopyState
from pdmesh.connector.native_jobs import Memory
from pdmesh.connector.native_messages import ConnectAgent, DisconnectAgent, FromHelper, PullEnded, StartPull
from pdmesh.connector.native_process import Helper
from pdmesh.connector.nixl_agent import NixlAgent
from pdmesh.connector.pool import PoolShape, create_pool_file, size_pool_file
from pdmesh.connector.throttle import Throttle

# One piece, of which the loopback device makes some tenths of a second.
SHAPE = PoolShape(num_blocks=64, block_bytes=1 << 20)
BLOCKS = list(range(SHAPE.num_blocks))
SENT, OTHERS = 7, 9
TIMEOUT_S = 30.0
LATE_S = 0.6


class End:
    """An agent, what it has registered, and the helper around it."""

    def __init__(self, name: str) -> None:
        fd = create_pool_file(name)
        size_pool_file(fd, SHAPE)
        self.memory = Memory(fd, SHAPE)
        self.agent = NixlAgent(AgentSettings(name=name, on_loopback=True))
        self.agent.register(self.memory.base, SHAPE.total_bytes)
        self.agent.register(self.memory.scratch_address, self.memory.scratch_bytes)
        self.helper = Helper(self.agent, self.memory, Throttle(0))

    def wait(self, answers: list[FromHelper]) -> FromHelper:
        end_s = time.monotonic() + TIMEOUT_S
        while not answers:
            assert time.monotonic() < end_s, "the helper says nothing"
            answers = self.helper.poll()
            time.sleep(0.0002)
        return answers[0]


def main(how: str) -> None:
    owner, consumer = End("owner"), End("consumer")
    owner.memory.pool.blocks[:] = SENT
    order = ConnectAgent(
        peer_id="owner@1",
        agent=owner.agent.metadata(),
        base=owner.memory.base,
        header_bytes=SHAPE.header_bytes,
        proof_address=owner.memory.proof_address(-1),
        proof=owner.memory.own_proof,
    )
    consumer.wait(consumer.helper.handle(order))
    pull = StartPull(
        transfer_id="t",
        peer_id="owner@1",
        source_block_ids=BLOCKS,
        generations=owner.memory.pool.generations_of(BLOCKS),
        target_block_ids=BLOCKS,
        deadline_s=TIMEOUT_S,
        checksums=[],
    )
    consumer.helper.handle(pull)
    [job] = consumer.helper._jobs
    assert job.handle is not None
    is_running = consumer.agent.state(job.handle) is CopyState.RUNNING
    if how == "release":
        while True:
            try:
                consumer.agent.release(job.handle)
            except RuntimeError:
                time.sleep(0.0002)
                continue
            break
    else:
        answers = consumer.helper.handle(DisconnectAgent(peer_id="owner@1") if how == "disconnect" else order)
        while not isinstance(consumer.wait(answers), PullEnded):
            answers = []
    blocks = consumer.memory.pool.blocks
    blocks[:] = OTHERS
    time.sleep(LATE_S)
    sys.stdout.write(f"{int(is_running)} {(blocks != OTHERS).any(axis=1).sum()}\n")
    sys.stdout.flush()
    # Without NIXL's destructors.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
