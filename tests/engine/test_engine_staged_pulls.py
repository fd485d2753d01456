"""The lanes of the staging area: given out in turn, given back whatever happens, and nobody waits for one past the deadline."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator

import numpy as np
import pytest

from pdmesh.connector.base import Pull, PullResult
from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.connector.staging import NUM_LANES, PAGE_BYTES, Lane, StagingArea
from pdmesh.engine import conversion
from pdmesh.engine.conversion import ConvertingPull, GroupPart
from pdmesh.engine.journeys import EndedPull
from pdmesh.engine.staged_pulls import MAX_PIECES_PER_PEER, MAX_PIECES_PER_PULL, StagedPulls
from pdmesh.protocol.layout import Layout


def layout(block_size: int, dtype: str = "float32") -> Layout:
    return Layout(
        layers=(0,), window=None, num_layers=1, num_kv_heads=1, head_dim=1, dtype=dtype, block_size=block_size
    )


SOURCE, TARGET = layout(4), layout(8)


class Scene:
    """Staged pulls whose pieces' pulls the test ends."""

    def __init__(self, target: Layout = TARGET) -> None:
        shape = PoolShape(64, target.block_bytes)
        fd = create_pool_file("test")
        size_pool_file(fd, shape)
        self.target = target
        self.pool = KVPool(fd, shape, writable=True)
        os.close(fd)
        self.pool.staging = StagingArea(PAGE_BYTES)
        self.pulls: list[Pull] = []
        self.cancelled: list[str] = []
        self.staged = StagedPulls(self.pool, self.pulls.append, self.cancelled.append)

    def start(self, transfer_id: str, num_tokens: int = 64, *, peer_id: str = "p@1", deadline_s: float = 30.0) -> None:
        part = GroupPart(
            group=0,
            source=SOURCE,
            target=self.target,
            tokens=range(num_tokens),
            source_block_ids=list(range(num_tokens // 4)),
            generations=[7] * (num_tokens // 4),
            target_block_ids=list(range(num_tokens // 8)),
        )
        self.staged.start(ConvertingPull(transfer_id=transfer_id, peer_id=peer_id, parts=[part], deadline_s=deadline_s))

    def fill(self, pull: Pull, value: float = 0.0) -> None:
        """Write each token's number, or `value`, where the piece's blocks belong."""
        assert pull.lane is not None
        blocks = self.pool.target(pull.lane).blocks
        for source, target in zip(pull.source_block_ids, pull.target_block_ids, strict=True):
            tokens = np.arange(source * 4, source * 4 + 4, dtype=np.float32)
            both = np.concatenate([tokens, -tokens]) if not value else np.full(8, value, np.float32)
            blocks[target] = both.view(np.uint8)

    def end(self, pull: Pull, reason: str = "") -> None:
        self.pulls.remove(pull)
        num_bytes = 0 if reason else len(pull.source_block_ids) * SOURCE.block_bytes
        result = PullResult(transfer_id=pull.transfer_id, reason=reason, num_bytes=num_bytes, duration_s=0.0)
        self.staged.piece_ended(result, "shm")

    def until_ended(self, count: int = 1) -> list[EndedPull]:
        """As the core's loop does: sleep on the descriptor, and carry out whatever pieces are asked for meanwhile."""
        ended: list[EndedPull] = []
        deadline_s = time.monotonic() + 10
        while len(ended) < count:
            readable, _, _ = select.select([self.staged.fileno()], [], [], deadline_s - time.monotonic())
            assert readable, "no pull ended"
            ended += self.staged.poll()
        return ended


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    # Two blocks of the source make one of the target, and are a piece.
    monkeypatch.setattr(conversion, "PIECE_BYTES", 2 * SOURCE.block_bytes)
    made = Scene()
    yield made
    made.staged.close()


def test_pieces_are_converted_to_where_they_belong(scene: Scene) -> None:
    scene.start("t")
    num_pieces = 0
    ended: list[EndedPull] = []
    while not ended:
        for pull in list(scene.pulls):
            assert pull.generations == [7, 7]
            scene.fill(pull)
            scene.end(pull)
            num_pieces += 1
        if not scene.pulls:
            select.select([scene.staged.fileno()], [], [], 10)
        ended = scene.staged.poll()
    assert num_pieces == 8
    assert (ended[0].result.reason, ended[0].result.num_bytes, ended[0].connector) == (
        "",
        16 * SOURCE.block_bytes,
        "shm",
    )
    keys, values = scene.pool.blocks[:8].view(np.float32).reshape(8, 2, 8).swapaxes(0, 1).reshape(2, 64)
    assert keys.tolist() == list(range(64))
    assert values.tolist() == [-token for token in range(64)]
    assert scene.staged.num_lanes_used == 0


def test_lanes_are_shared_among_pulls_and_peers(scene: Scene) -> None:
    scene.start("a", peer_id="p@1")
    assert len(scene.pulls) == MAX_PIECES_PER_PULL
    scene.start("b", peer_id="p@1")
    scene.start("c", peer_id="p@1")
    # Whatever a peer is asked for, it does not take all.
    assert len(scene.pulls) == MAX_PIECES_PER_PEER < NUM_LANES
    scene.start("d", peer_id="q@1")
    assert [pull.peer_id for pull in scene.pulls].count("q@1") == 1
    lanes = [pull.lane.index for pull in scene.pulls if pull.lane is not None]
    assert sorted(lanes) == list(range(NUM_LANES))
    # One that has none comes before those that have one.
    first = scene.pulls[0]
    scene.end(first, "stale")
    assert {pull.transfer_id.split("/")[0] for pull in scene.pulls} >= {"b", "c", "d"}


def test_a_pull_that_fails_ends_once_and_when_its_other_pieces_have(scene: Scene) -> None:
    scene.start("t")
    one, other = scene.pulls
    scene.end(one, "stale")
    assert scene.cancelled == [one.transfer_id, other.transfer_id] or scene.cancelled == [other.transfer_id]
    assert scene.staged.poll() == []
    assert scene.staged.num_lanes_used == 1
    scene.end(other, "cancelled")
    (ended,) = scene.until_ended()
    assert (ended.result.transfer_id, ended.result.reason, ended.result.num_bytes) == ("t", "stale", 0)
    assert (scene.pulls, scene.staged.num_lanes_used, len(scene.staged)) == ([], 0, 0)


def test_a_cancelled_pull_ends_when_its_pieces_have(scene: Scene) -> None:
    scene.start("t")
    scene.staged.cancel("t")
    scene.staged.cancel("unknown")
    assert scene.staged.poll() == []
    for pull in list(scene.pulls):
        # It had been carried out by then.
        scene.fill(pull)
        scene.end(pull)
    (ended,) = scene.until_ended()
    assert ended.result.reason == "cancelled"
    assert scene.staged.num_lanes_used == 0
    # Nothing was converted.
    assert not scene.pool.blocks.any()


def test_who_waits_for_a_lane_waits_until_its_deadline(scene: Scene) -> None:
    for index, peer_id in enumerate(("p@1", "p@1", "q@1", "q@1")):
        scene.start(f"held{index}", peer_id=peer_id)
    assert scene.staged.num_lanes_used == NUM_LANES
    scene.start("late", peer_id="r@1", deadline_s=0.1)
    (ended,) = scene.until_ended()
    assert (ended.result.transfer_id, ended.result.reason) == ("late", "timeout")
    assert scene.staged.num_lanes_used == NUM_LANES


def test_a_piece_has_what_is_left_of_the_deadline(scene: Scene) -> None:
    scene.start("t", deadline_s=5.0)
    assert all(0 < pull.deadline_s <= 5.0 for pull in scene.pulls)


def test_numbers_that_do_not_fit_fail_the_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(layout(8, "float16"))
    scene.start("t", 8)
    for pull in list(scene.pulls):
        scene.fill(pull, value=1e30)
        scene.end(pull)
    (ended,) = scene.until_ended()
    assert ended.result.reason.startswith("unconvertible:")
    assert "too large for float16" in ended.result.reason
    assert scene.staged.num_lanes_used == 0
    scene.staged.close()


def test_lanes_do_not_overlap() -> None:
    area = StagingArea(PAGE_BYTES + 17)
    for index in range(NUM_LANES):
        area.blocks(Lane(index, 1000))[:] = index + 1
    assert [int(area.blocks(Lane(index, 1000)).min()) for index in range(NUM_LANES)] == [1, 2, 3, 4]
    assert area.num_blocks(1000) == 4
    for wrong in (Lane(NUM_LANES, 1000), Lane(-1, 1000), Lane(0, PAGE_BYTES + 1), Lane(0, 0)):
        with pytest.raises(ValueError, match="there is no Lane"):
            area.blocks(wrong)
    with pytest.raises(ValueError, match="less than a page"):
        StagingArea(PAGE_BYTES - 1)
    area.close()


def test_of_pieces_that_fail_one_after_the_other_damage_is_what_is_told(scene: Scene) -> None:
    """The first failure was told alone, and the request went on behind a token that its owner may have drawn from damaged KV."""
    scene.start("t")
    first, second = scene.pulls
    scene.end(first, "timeout")
    scene.end(second, "corrupt")
    assert [each.result.reason for each in scene.staged.poll()] == ["corrupt"]
