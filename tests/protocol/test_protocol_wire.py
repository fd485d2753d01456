"""Structs survive the wire: every field, every value, also through bytes; and the generated code is that of the proto."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.errors import BY_CODE, ConfigError, InternalError, InvalidRequest, MeshError, TransferFailed
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import transfers, wire
from pdmesh.protocol.messages import (
    AwaitedOffer,
    ChoiceDelta,
    GenerateRequest,
    GroupBlocks,
    RepetitionDetection,
    SamplingParams,
    ThinkingBudget,
    TokenLogprobs,
)
from pdmesh.protocol.states import TransferState
from pdmesh.protocol.version import HISTORY, PROTOCOL_MIN, PROTOCOL_VERSION, agree

SHARED = Path(__file__).parents[2] / "shared"

token = st.integers(0, (1 << 32) - 1)
tokens = st.lists(token, max_size=5)
count = st.integers(0, (1 << 31) - 1)
number = st.floats(allow_nan=False)
# The wire carries log-probabilities as float32.
logprob = st.floats(allow_nan=False, width=32, max_value=0.0)
text = st.text(max_size=10)
scalar = st.integers(-(1 << 63), (1 << 64) - 1) | number | text
logprobs = st.builds(
    TokenLogprobs, token_ids=st.lists(token, min_size=1, max_size=3), logprobs=st.lists(logprob, max_size=3), rank=count
)
sampling = st.builds(
    SamplingParams,
    n=count,
    temperature=number,
    top_p=number,
    top_k=st.integers(-1, 1 << 20),
    min_p=number,
    presence_penalty=number,
    frequency_penalty=number,
    repetition_penalty=number,
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    max_tokens=count,
    min_tokens=count,
    ignore_eos=st.booleans(),
    stop_token_ids=tokens,
    logprobs=st.none() | st.integers(-1, 1000),
    prompt_logprobs=st.none() | st.integers(-1, 1000),
    logit_bias=st.dictionaries(token, number, max_size=3),
    allowed_token_ids=st.none() | tokens,
    bad_words_token_ids=st.lists(tokens, max_size=3),
    repetition_detection=st.none()
    | st.builds(RepetitionDetection, max_pattern_size=count, min_pattern_size=count, min_count=count),
    thinking=st.none() | st.builds(ThinkingBudget, budget=count, start_token_ids=tokens, end_token_ids=tokens),
    extra_args=st.dictionaries(text, st.booleans() | scalar | st.lists(scalar, max_size=3), max_size=3),
)
requests = st.builds(
    GenerateRequest,
    request_id=text,
    token_ids=tokens,
    sampling=sampling,
    choices=st.lists(count, max_size=4),
    emitted=st.lists(tokens, max_size=3),
    prefill_only=st.booleans(),
    ticket=st.binary(max_size=8),
    awaits=st.none() | st.builds(AwaitedOffer, offer_id=text, owner_id=text, owner_address=text),
    cache_salt=text,
    priority=st.integers(-(1 << 63), (1 << 63) - 1),
    deadline_s=st.integers(0, 10**9).map(lambda ms: ms / 1000),
    hand_back=st.booleans(),
    offer_id=text,
)
error_code = st.sampled_from(["", *BY_CODE])
deltas = st.builds(
    ChoiceDelta,
    request_id=text,
    choice=count,
    token_ids=tokens,
    logprobs=st.lists(logprobs, max_size=3),
    prompt_logprobs=st.none() | st.lists(st.none() | logprobs, max_size=3),
    finish_reason=st.sampled_from(["", "stop", "length", "repetition", "abort", "error"]),
    stop_token_id=st.none() | token,
    ticket=st.binary(max_size=8),
    cached_tokens=count,
    kv_bytes=st.integers(0, 1 << 50),
    kv_source=text,
    kv_committed=st.booleans(),
    queued_s=st.floats(0, 1e6),
    error_code=error_code,
    error_message=text,
    error_param=text,
).map(lambda delta: delta if delta.error_code else msgspec.structs.replace(delta, error_message="", error_param=""))


@given(requests)
def test_requests_survive(request: GenerateRequest) -> None:
    sent = wire.request_to_pb(request).SerializeToString()
    assert wire.request_from_pb(pb.GenerateRequest.FromString(sent)) == request


@given(deltas)
def test_deltas_survive(delta: ChoiceDelta) -> None:
    sent = wire.delta_to_pb(delta).SerializeToString()
    assert wire.delta_from_pb(pb.ChoiceDelta.FromString(sent)) == delta


blocks_of_groups = st.builds(
    GroupBlocks,
    group=count,
    block_ids=tokens,
    generations=st.lists(st.integers(0, (1 << 64) - 1)),
    first_block=count,
    checksums=st.lists(st.integers(0, (1 << 64) - 1)),
)


@given(blocks_of_groups)
def test_blocks_survive(blocks: GroupBlocks) -> None:
    assert wire.blocks_from_pb(pb.BlockList.FromString(wire.blocks_to_pb(blocks).SerializeToString())) == blocks


groups = st.lists(blocks_of_groups, max_size=2)
begins = st.builds(
    transfers.Begin,
    transfer_id=text,
    consumer_id=text,
    offer_id=text,
    digest=st.binary(max_size=32),
    groups=groups,
    remaining_s=st.integers(0, 10**9).map(lambda ms: ms / 1000),
)
views = st.builds(transfers.OfferView, groups=groups, num_tokens=count)
ends = st.builds(
    transfers.End,
    transfer_id=text,
    committed=st.booleans(),
    reason=text,
    peer_id=text,
    release_offer=text,
    release_digest=st.binary(max_size=32),
)
endeds = st.builds(
    transfers.Ended,
    known=st.booleans(),
    outcome=st.none() | st.sampled_from(TransferState),
    writing=st.booleans(),
    stopping=st.booleans(),
    peer_id=text,
)


def test_an_owner_that_compares_no_requests_is_told_of_no_offer_that_would_need_it() -> None:
    end = transfers.End(transfer_id="t", committed=False, release_offer="o", release_digest=b"d")
    assert not transfers.end_to_pb(end).release_offer
    assert transfers.end_to_pb(dataclasses.replace(end, release_digest=b"")).release_offer == "o"


@given(begins, views, ends, endeds)
def test_what_is_said_of_transfers_survives(
    begin: transfers.Begin, view: transfers.OfferView, end: transfers.End, ended: transfers.Ended
) -> None:
    sent = transfers.begin_to_pb(begin).SerializeToString()
    assert transfers.begin_from_pb(pb.BeginTransferRequest.FromString(sent)) == begin
    begun = transfers.Begun(peer_id="p@1", view=view)
    sent = transfers.begun_to_pb(begun).SerializeToString()
    assert transfers.begun_from_pb(pb.BeginTransferReply.FromString(sent)) == begun
    sent = transfers.end_to_pb(end).SerializeToString()
    assert transfers.end_from_pb(pb.EndTransferRequest.FromString(sent)) == end
    sent = transfers.ended_to_pb(ended).SerializeToString()
    assert transfers.ended_from_pb(pb.EndTransferReply.FromString(sent)) == ended


def test_an_outcome_of_a_later_release_is_none() -> None:
    assert transfers.ended_from_pb(pb.EndTransferReply(outcome="evaporated")) == transfers.Ended(known=False)


def test_a_refused_begin_survives() -> None:
    refused = transfers.Begun(peer_id="p@1", error=TransferFailed("stale: newer content"))
    sent = transfers.begun_to_pb(refused).SerializeToString()
    begun = transfers.begun_from_pb(pb.BeginTransferReply.FromString(sent))
    assert (begun.peer_id, begun.view) == ("p@1", None)
    assert type(begun.error) is TransferFailed
    assert begun.error.message == "stale: newer content"


@pytest.mark.parametrize("kind", BY_CODE.values())
def test_errors_survive(kind: type[MeshError]) -> None:
    error = wire.error_from_pb(wire.error_to_pb(kind("what happened", param="field")), "req-1")
    assert type(error) is kind
    assert (error.message, error.param, error.request_id) == ("what happened", "field", "req-1")


def test_an_unknown_error_is_ours() -> None:
    assert type(wire.error_from_pb(pb.ErrorInfo(code="FromTheFuture", message="x"))) is InternalError
    assert wire.error_from_pb(wire.error_to_pb(InvalidRequest("x"))).param is None
    assert wire.error_from_pb(wire.error_to_pb(ConfigError("x"))).message == "x"


def test_no_field_of_the_structs_is_forgotten_by_the_tests() -> None:
    """A field that someone adds to a struct must be added to the wire, and so to the strategies above."""
    for kind, number in (
        (SamplingParams, 21),
        (RepetitionDetection, 3),
        (ThinkingBudget, 3),
        (GenerateRequest, 13),
        (ChoiceDelta, 16),
        (TokenLogprobs, 3),
        (GroupBlocks, 5),
    ):
        assert len(kind.__struct_fields__) == number, f"{kind.__name__} has changed: extend wire.py and this test"


@pytest.mark.parametrize("data", [b"\xff", b"\xc1", b"\x01", wire.encode_extra_args({"x": {"nested": 1}})])
def test_extra_arguments_that_are_none_are_the_clients_fault(data: bytes) -> None:
    message = wire.request_to_pb(GenerateRequest(request_id="r", token_ids=[1], sampling=SamplingParams()))
    message.sampling.extra_args = data
    with pytest.raises(InvalidRequest, match="vllm_xargs cannot be read") as caught:
        wire.request_from_pb(message)
    assert caught.value.param == "vllm_xargs"


def test_what_is_overdue_has_no_time_left() -> None:
    assert wire.to_ms(-3.0) == 0
    assert wire.to_ms(0.0015) == 2
    assert math.isclose(wire.to_ms(600.0), 600_000)


def test_versions_meet_where_their_ranges_do() -> None:
    assert agree(PROTOCOL_MIN, PROTOCOL_VERSION) == PROTOCOL_VERSION == max(HISTORY)
    assert list(HISTORY) == list(range(1, PROTOCOL_VERSION + 1))
    assert agree(1, 9, own_min=2, own_max=4) == 4
    assert agree(3, 3, own_min=2, own_max=4) == 3
    for low, high in ((5, 9), (0, 1)):
        with pytest.raises(MeshError, match=rf"{low} to {high}.*2 to 4"):
            agree(low, high, own_min=2, own_max=4)


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, "pdmesh/protocol/mesh.proto"],
        cwd=SHARED,
        check=True,
        env={"PATH": str(Path(sys.executable).parent)},
        capture_output=True,
    )
    made = sorted((tmp_path / "pdmesh/protocol").iterdir())
    assert len(made) == 4
    for path in made:
        committed = SHARED / "pdmesh/protocol" / path.name
        assert path.read_text() == committed.read_text(), f"{path.name} is not that of mesh.proto: ./dev proto"
