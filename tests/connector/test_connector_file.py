"""Connector `file`: what lies on the shared file system, who removes it, and that nothing there is taken on trust."""

import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdmesh.connector.base import PeerPool, Publication, Published, Pull
from pdmesh.connector.file import FileConnector
from pdmesh.connector.file_format import OWNER_FILE, file_name
from pdmesh.connector.options import FileOptions
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.errors import ConfigError, HandshakeRefused
from pdmesh.security import MeshSecret
from support.pool_node import SECRET, make_pool, pool_node, wait_for, write_block
from support.until import until

SHAPE = PoolShape(num_blocks=8, block_bytes=16 << 10)
BLOCKS = list(range(8))


class End:
    """One engine's connector and pool."""

    def __init__(self, path: Path, peer_id: str, *, filled: bool) -> None:
        self.peer_id = peer_id
        self.directory = path / peer_id
        self.pool: KVPool = make_pool(SHAPE, filled=filled)
        self.connector = FileConnector(peer_id, MeshSecret(SECRET), FileOptions(path=str(path)))
        self.metadata = self.connector.register(self.pool)
        self.published: list[Published] = []
        self._told = threading.Semaphore(0)
        self.connector.watch_published(self._hear)

    def publish(self, offer_id: str, generations: list[int] | None = None) -> str:
        """Publish all blocks; what went wrong."""
        words = self.pool.generations_of(BLOCKS) if generations is None else generations
        self.connector.publish(Publication(offer_id=offer_id, block_ids=BLOCKS, generations=words))
        assert self._told.acquire(timeout=10)
        assert self.published[-1].offer_id == offer_id
        return self.published[-1].error

    def pull(self, owner: "End", offer_id: str, deadline_s: float = 10.0) -> str:
        """Pull all blocks and return the reason."""
        pull = Pull(
            transfer_id="t",
            peer_id=owner.peer_id,
            source_block_ids=BLOCKS,
            generations=owner.pool.generations_of(BLOCKS),
            target_block_ids=BLOCKS,
            deadline_s=deadline_s,
            offer_id=offer_id,
        )
        self.connector.start(pull)
        (result,) = wait_for(self.connector, 1, 15.0)
        return result.reason

    def close(self) -> None:
        self.connector.close()
        self.pool.close()

    def _hear(self, published: Published) -> None:
        self.published.append(published)
        self._told.release()


@contextmanager
def end(path: Path, peer_id: str, *, filled: bool = True) -> Iterator[End]:
    made = End(path, peer_id, filled=filled)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[End]:
    with end(tmp_path, "owner@1") as made:
        yield made


@pytest.fixture
def consumer(tmp_path: Path, owner: End) -> Iterator[End]:
    with end(tmp_path, "consumer@1", filled=False) as made:
        made.connector.connect(peer_pool(owner))
        yield made


def peer_pool(owner: End, metadata: bytes | None = None) -> PeerPool:
    return PeerPool(
        peer_id=owner.peer_id,
        metadata=owner.metadata if metadata is None else metadata,
        num_blocks=SHAPE.num_blocks,
        block_bytes=SHAPE.block_bytes,
    )


def test_a_retracted_offer_leaves_nothing(owner: End, consumer: End) -> None:
    assert owner.publish("o") == ""
    assert consumer.pull(owner, "o") == ""
    assert bool((consumer.pool.blocks == owner.pool.blocks).all())
    owner.connector.retract("o")
    owner.connector.retract("o")
    # In order: the next is written when the file of the one before is gone.
    assert owner.publish("next") == ""
    assert sorted(os.listdir(owner.directory)) == sorted([OWNER_FILE, file_name("next")])
    assert consumer.pull(owner, "o") == "error:the offer is not there"


def test_blocks_that_change_before_they_are_written_are_not_published(owner: End) -> None:
    before = owner.pool.generations_of(BLOCKS)
    write_block(owner.pool, 3)
    assert owner.publish("o", before) == "it was taken back"
    assert os.listdir(owner.directory) == [OWNER_FILE]


@pytest.mark.parametrize("place", [0, -1, 5 * (16 << 10)])
def test_a_byte_that_was_changed_is_found(owner: End, consumer: End, place: int) -> None:
    assert owner.publish("o") == ""
    path = owner.directory / file_name("o")
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert consumer.pull(owner, "o").startswith("error:")


def test_an_offers_file_is_no_other_offers(owner: End, consumer: End) -> None:
    assert owner.publish("o") == ""
    os.rename(owner.directory / file_name("o"), owner.directory / file_name("p"))
    assert "another offer's" in consumer.pull(owner, "p")
    (owner.directory / file_name("q")).write_bytes(b"short")
    assert "cut short" in consumer.pull(owner, "q")


def test_a_full_disk_is_told_and_leaves_no_draft(owner: End, consumer: End) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * SHAPE.block_bytes, hard))
    try:
        assert owner.publish("o") == "File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(owner.directory) == [OWNER_FILE]
    assert owner.publish("next") == ""
    assert consumer.pull(owner, "next") == ""


def test_a_file_system_that_hangs_holds_up_neither_pull_nor_close(owner: End, consumer: End) -> None:
    assert owner.publish("o") == ""
    path = owner.directory / file_name("o")
    path.unlink()
    # To open a pipe for reading waits for a writer.
    os.mkfifo(path)
    assert consumer.pull(owner, "o", deadline_s=0.2) == "timeout"
    assert owner.publish("next") == ""
    # The other thread still reads.
    assert consumer.pull(owner, "next") == ""
    os.close(os.open(path, os.O_RDWR))


def test_another_directory_than_the_owners_is_refused(owner: End, consumer: End, tmp_path: Path) -> None:
    (owner.directory / OWNER_FILE).write_bytes(b"x" * 32)
    with pytest.raises(HandshakeRefused, match="is not what owner@1 has written"):
        consumer.connector.connect(peer_pool(owner))
    (owner.directory / OWNER_FILE).unlink()
    with pytest.raises(HandshakeRefused, match="cannot be read"):
        consumer.connector.connect(peer_pool(owner))


def test_a_directory_that_is_removed_under_its_owner_is_made_anew(
    owner: End, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It never was: no offer was published any more."""
    for offer_id in ("before", "between", "after"):
        assert owner.publish(offer_id) == ""
        # What is written again comes behind what made the directory anew, and nobody is told of it.
        for written in owner.published:
            until((owner.directory / file_name(written.offer_id)).exists)
        if offer_id != "after":
            shutil.rmtree(owner.directory)
    # In order: by the next one's turn, what the owner still holds is there again.
    assert owner.publish("last") == ""
    names = {OWNER_FILE, *(file_name(name) for name in ("before", "between", "after", "last"))}
    assert set(os.listdir(owner.directory)) == names
    assert [published.num_remade for published in owner.published] == [0, 1, 1, 0]
    assert [record.message for record in caplog.records if "made anew" in record.message] == [
        f"{owner.directory} had been removed and is made anew: nothing but this engine may remove it"
    ]
    with end(tmp_path, "consumer@1", filled=False) as consumer:
        consumer.connector.connect(peer_pool(owner))
        assert consumer.pull(owner, "before") == ""
    with end(tmp_path, "owner@2") as later:
        # The lock still says that the first one lives.
        assert later.publish("o") == ""
        assert owner.directory.exists()


def test_the_end_of_an_offer_finds_out_that_the_directory_is_gone(owner: End, consumer: End) -> None:
    assert owner.publish("ending") == ""
    assert owner.publish("staying") == ""
    shutil.rmtree(owner.directory)
    owner.connector.retract("ending")
    # What the owner still holds is written again, before the next one or behind it.
    assert owner.publish("next") == ""
    until((owner.directory / file_name("staying")).exists)
    assert consumer.pull(owner, "staying") == ""


def test_a_start_removes_what_earlier_starts_of_the_same_engine_left(tmp_path: Path) -> None:
    options: dict[str, dict[str, object]] = {"file": {"path": str(tmp_path)}}
    with pool_node(["file"], SHAPE, "owner@1", options=options) as dead:
        assert dead.publish("file", "o", BLOCKS, dead.first_generations) == ""
        dead.kill()
    (tmp_path / "other@1").mkdir()
    assert file_name("o") in os.listdir(tmp_path / "owner@1")
    with pool_node(["file"], SHAPE, "owner@2", options=options), end(tmp_path, "owner@3") as living:
        # Swept before the first offer is written.
        assert living.publish("o") == ""
        assert sorted(os.listdir(tmp_path)) == ["other@1", "owner@2", "owner@3"]
    assert sorted(os.listdir(tmp_path)) == ["other@1", "owner@2"]


def test_an_owner_that_cannot_write_offers_nothing(tmp_path: Path) -> None:
    # A file where its directory should be: this must fail for root too.
    (tmp_path / "owner@1").write_text("in the way")
    with end(tmp_path, "owner@1") as owner, end(tmp_path, "consumer@1", filled=False) as consumer:
        assert "cannot be written to" in owner.publish("o")
        with pytest.raises(HandshakeRefused, match="writes no files"):
            consumer.connector.connect(peer_pool(owner))


def test_files_need_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs the mesh secret"):
        FileConnector("a@1", MeshSecret(""), FileOptions(path=str(tmp_path)))


@pytest.mark.parametrize(("path", "words"), [("", "must name its directory"), ("/no/such", "is not a directory")])
def test_the_directory_has_to_be_there(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_worker_connectors(
            ["file"], peer_id="a@1", secret=MeshSecret(SECRET), options={"file": FileOptions(path=path)}
        )
