"""Native transports that write as well as read: the worker's half of pushes."""

from collections.abc import Callable

from pdmesh.connector.active import PullEnd, fault_of
from pdmesh.connector.base import Push, PushConnector
from pdmesh.connector.native import NativeConnector
from pdmesh.connector.native_messages import StartPush


class NativePushConnector(NativeConnector, PushConnector):
    """A connector whose agent is a `WritingAgent`. Who writes into this pool does it by what the helper process has registered:
    with the process that goes, and another registers anew."""

    def push(self, push: Push) -> None:
        self._pulls.add(push)
        pool, helper = self._registered()
        shape = self._peers.get(push.peer_id)
        if shape is None:
            self._pulls.finish(push.transfer_id, PullEnd.PEER_LOST)
        elif fault := fault_of(push, pool.shape, shape):
            self._pulls.finish(push.transfer_id, fault)
        elif not push.source_block_ids:
            self._pulls.finish(push.transfer_id, "")
        else:
            helper.send(
                StartPush(
                    transfer_id=push.transfer_id,
                    peer_id=push.peer_id,
                    source_block_ids=push.source_block_ids,
                    target_block_ids=push.target_block_ids,
                    deadline_s=push.deadline_s,
                )
            )

    def shut_out(self, on_done: Callable[[], None]) -> None:
        self._registered()[1].shut_out(on_done)
