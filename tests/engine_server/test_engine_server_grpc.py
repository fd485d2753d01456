"""What a proxy sees of an engine: description, tokens, tickets, aborts, load, and what is left behind: nothing."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from pdmesh.errors import DeadlineExceeded, Forbidden, InvalidRequest, TransferFailed
from pdmesh.grpc_options import GRPC_OPTIONS
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.mesh_pb2_grpc import EngineStub
from pdmesh.protocol.messages import ChoiceDelta, GenerateRequest
from pdmesh.protocol.ticket import seal, unseal
from pdmesh.security import MeshSecret
from support.engines import SECRET, ProxySession, proxy_session, request, tokens_of


def _idle(load: pb.LoadReport) -> bool:
    return not (load.num_running or load.num_waiting or load.num_offers or load.kv_usage)


async def _alone(address: str, made: GenerateRequest) -> list[int]:
    async with proxy_session(address, "alone") as session:
        return tokens_of(await session.run(made), made.choices[0])


async def _prefilled(session: ProxySession, made: GenerateRequest) -> tuple[list[ChoiceDelta], bytes]:
    """Run the prefill leg; returns its deltas and the ticket of the last."""
    deltas = await session.run(
        request(
            made.request_id,
            token_ids=made.token_ids,
            prefill_only=True,
            choices=made.choices,
            sampling={"n": len(made.choices), "max_tokens": 8},
        )
    )
    assert not any(delta.ticket for delta in deltas[:-1])
    return deltas, deltas[-1].ticket


async def _release(session: ProxySession, ticket: bytes) -> None:
    """Let the ticket's offer go, and see that nothing stays behind."""
    await session.tell(release_offers=[unseal(ticket, MeshSecret(SECRET)).offer_id])
    await session.load(until=_idle)


def test_describe_tells_model_layout_and_limits(pair: Any) -> None:
    async def body() -> pb.EngineInfo:
        async with proxy_session(pair.prefill.grpc) as session:
            return await session.stub.Describe(pb.DescribeRequest(), metadata=session.metadata, timeout=5)

    info = pair.loop.run(body())
    assert info.engine_id == pair.prefill.engine_id
    assert info.role == "prefill"
    assert info.block_size == 16
    assert info.max_num_batched_tokens == 256
    assert info.layout_fingerprints
    assert info.model_fingerprint
    assert list(info.connectors) == ["shm", "grpc"]


def test_a_call_without_the_secret_is_refused(pair: Any) -> None:
    async def body() -> None:
        async with grpc.aio.insecure_channel(pair.prefill.grpc, options=GRPC_OPTIONS) as channel:
            stub = EngineStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Describe(pb.DescribeRequest(), timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            foreign = ProxySession(channel, "foreign", secret="another-secret-of-tests")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await foreign.data.read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await foreign.break_off()

    pair.loop.run(body())


def test_requests_of_one_session_share_frames(pair: Any) -> None:
    async def body() -> None:
        async with proxy_session(pair.decode.grpc) as session:
            made = [request(f"r{i}", num_prompt=20 + i, max_tokens=12) for i in range(4)]
            answers = await asyncio.gather(*(session.run(each) for each in made))
            assert [len(tokens_of(answer)) for answer in answers] == [12] * 4
            assert all(answer[-1].finish_reason == "length" for answer in answers)
            # Alone each would need 12 frames; steps carry several requests' tokens.
            assert session.num_frames < 40

    pair.loop.run(body())


@pytest.mark.parametrize("num_prompt", [1, 16, 40, 300])
def test_ticket_flow_gives_the_tokens_of_one_engine(pair: Any, num_prompt: int) -> None:
    async def body() -> None:
        whole = request(f"whole-{num_prompt}", num_prompt=num_prompt)
        expected = await _alone(pair.decode.grpc, request("base", num_prompt=num_prompt, cache_salt="elsewhere"))
        async with proxy_session(pair.prefill.grpc) as prefill, proxy_session(pair.decode.grpc) as decode:
            deltas, ticket = await _prefilled(prefill, whole)
            first = tokens_of(deltas)
            assert first == expected[:1]
            assert ticket
            answer = await decode.run(
                request(whole.request_id, token_ids=whole.token_ids, ticket=ticket, emitted=[first])
            )
            assert first + tokens_of(answer) == expected
            assert [delta.kv_committed for delta in answer].count(True) == 1
            told = next(delta for delta in answer if delta.token_ids)
            assert told.kv_source == "shm"
            assert told.kv_bytes > 0
            assert told.cached_tokens == num_prompt
            await _release(prefill, ticket)
            await decode.load(until=_idle)

    pair.loop.run(body())


def test_two_choices_share_one_ticket(pair: Any) -> None:
    async def body() -> None:
        sampled = {"n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 6}
        made = request("two", num_prompt=50, choices=[0, 1], sampling=sampled)
        async with proxy_session(pair.decode.grpc) as session:
            whole = await session.run(made)
        expected = [tokens_of(whole, choice) for choice in (0, 1)]
        async with proxy_session(pair.prefill.grpc) as prefill, proxy_session(pair.decode.grpc) as decode:
            leg = request("two", token_ids=made.token_ids, choices=[0, 1], prefill_only=True, sampling=sampled)
            deltas = await prefill.run(leg)
            firsts = [tokens_of(deltas, choice) for choice in (0, 1)]
            assert [delta.ticket != b"" for delta in deltas] == [False, True]
            rest = await decode.run(
                request(
                    "two",
                    token_ids=made.token_ids,
                    choices=[0, 1],
                    emitted=firsts,
                    sampling=sampled,
                    ticket=deltas[-1].ticket,
                )
            )
            assert [firsts[c] + tokens_of(rest, c) for c in (0, 1)] == expected
            await _release(prefill, deltas[-1].ticket)

    pair.loop.run(body())


def test_a_first_token_that_ends_the_request_leaves_no_offer(pair: Any) -> None:
    async def body() -> None:
        async with proxy_session(pair.prefill.grpc) as session:
            deltas = await session.run(request("one", prefill_only=True, max_tokens=1))
            assert deltas[-1].finish_reason == "length"
            assert deltas[-1].ticket == b""
            await session.load(until=_idle)

    pair.loop.run(body())


def test_a_prefill_serves_whole_requests_and_a_decode_prompts(pair: Any) -> None:
    async def body() -> None:
        made = request("whole", num_prompt=33)
        expected = await _alone(pair.decode.grpc, made)
        assert await _alone(pair.prefill.grpc, made) == expected
        async with proxy_session(pair.decode.grpc) as session:
            deltas, ticket = await _prefilled(session, made)
            assert tokens_of(deltas) == expected[:1]
            await _release(session, ticket)

    pair.loop.run(body())


def test_a_forged_ticket_is_forbidden(pair: Any) -> None:
    async def body() -> None:
        made = request("forged", num_prompt=40)
        async with proxy_session(pair.prefill.grpc) as prefill, proxy_session(pair.decode.grpc) as decode:
            _, ticket = await _prefilled(prefill, made)
            broken = ticket[:-1] + bytes([ticket[-1] ^ 1])
            foreign = seal(unseal(ticket, MeshSecret(SECRET)), MeshSecret("another-secret-of-tests"))
            for number, forged in enumerate((broken, foreign)):
                with pytest.raises(Forbidden):
                    await decode.run(
                        request(f"forged-{number}", token_ids=made.token_ids, ticket=forged, emitted=[[5]])
                    )
            await decode.load(until=_idle)
            await _release(prefill, ticket)

    pair.loop.run(body())


def test_a_ticket_for_another_prompt_or_an_ended_offer_fails(pair: Any) -> None:
    async def body() -> None:
        made = request("mine", num_prompt=40)
        async with proxy_session(pair.prefill.grpc) as prefill, proxy_session(pair.decode.grpc) as decode:
            deltas, ticket = await _prefilled(prefill, made)
            first = tokens_of(deltas)
            with pytest.raises(TransferFailed, match="another request"):
                await decode.run(request("other", num_prompt=41, ticket=ticket, emitted=[first]))
            await _release(prefill, ticket)
            with pytest.raises(TransferFailed, match="released"):
                await decode.run(request("late", token_ids=made.token_ids, ticket=ticket, emitted=[first]))
            await decode.load(until=_idle)

    pair.loop.run(body())


def test_renewing_an_ended_offer_says_so(pair: Any) -> None:
    async def body() -> None:
        async with proxy_session(pair.prefill.grpc) as session:
            await session.tell(renew_offers=["never-was"], ping=7)
            while True:
                message = await asyncio.wait_for(session.control.read(), 5)
                if message.pong:
                    break
            assert message.pong == 7
            assert list(message.ended_offers) == ["never-was"]

    pair.loop.run(body())


def test_a_broken_session_frees_everything(pair: Any) -> None:
    async def body() -> None:
        async with proxy_session(pair.prefill.grpc, "dying") as dying:
            long = request("long", num_prompt=30, max_tokens=900, deadline_s=60)
            await dying.submit(long)
            await dying.next_delta("long")
            await dying.submit(request("offered", num_prompt=700, prefill_only=True))
        async with proxy_session(pair.prefill.grpc, "watching") as watching:
            await watching.load(until=_idle)

    pair.loop.run(body())


def test_aborts_end_a_choice_or_a_request(pair: Any) -> None:
    async def body() -> None:
        async with proxy_session(pair.decode.grpc) as session:
            sampled = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 200}
            await session.submit(request("a", choices=[0, 1], sampling=sampled))
            await session.next_delta("a")
            await session.tell(aborts=[pb.AbortChoice(request_id="a", choice=0)])
            seen: list[ChoiceDelta] = []
            while not any(delta.finish_reason for delta in seen):
                seen.append(await session.next_delta("a"))
            assert seen[-1].choice == 1
            await session.submit(request("b", max_tokens=900))
            await session.next_delta("b")
            await session.tell(aborts=[pb.AbortChoice(request_id="b", choice=-1)])
            await session.load(until=_idle)

    pair.loop.run(body())


def test_a_deadline_ends_a_request_with_an_error(pair: Any) -> None:
    async def body() -> None:
        async with proxy_session(pair.decode.grpc) as session:
            with pytest.raises(DeadlineExceeded):
                await session.run(request("slow", max_tokens=900, deadline_s=0.15))
            await session.load(until=_idle)

    pair.loop.run(body())


def test_bad_requests_end_with_an_error_that_names_the_field(pair: Any) -> None:
    async def body() -> None:
        async with proxy_session(pair.decode.grpc) as session:
            for number, (made, param) in enumerate(
                (
                    (request("bad", token_ids=[]), "prompt"),
                    (request("bad", token_ids=[1 << 31]), "prompt"),
                    (request("bad", num_prompt=1024), "prompt"),
                    (request("bad", choices=[0, 0]), "n"),
                )
            ):
                assert number >= 0
                with pytest.raises(InvalidRequest) as refused:
                    await session.run(made)
                assert refused.value.param == param
            await session.load(until=_idle)

    pair.loop.run(body())
