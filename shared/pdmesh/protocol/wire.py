"""Between the structs of `messages.py` and protobuf: what one service says and another hears, field by field.

Deadlines cross as remaining whole milliseconds. "Not set" and "zero" stay apart wherever the structs keep them apart.
"""

import msgspec

from pdmesh.errors import InvalidRequest, MeshError, from_code
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.messages import (
    AwaitedOffer,
    ChoiceDelta,
    ExtraArgs,
    GenerateRequest,
    GroupBlocks,
    RepetitionDetection,
    SamplingParams,
    ThinkingBudget,
    TokenLogprobs,
)

MAX_EXTRA_ARGS_BYTES = 1 << 14
"""Of one request's extra arguments, encoded; they go along with each of its choices."""
encode_extra_args = msgspec.msgpack.Encoder().encode
"""`SamplingParams.extra_args` as the wire has them: integers keep their 64 bits, which JSON's readers and `Struct` lose."""
_decode_extra_args = msgspec.msgpack.Decoder(ExtraArgs).decode


def request_to_pb(request: GenerateRequest) -> pb.GenerateRequest:
    """Encode a request."""
    message = pb.GenerateRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        sampling=_sampling_to_pb(request.sampling),
        choices=request.choices,
        emitted=[pb.TokenIds(ids=ids) for ids in request.emitted],
        prefill_only=request.prefill_only,
        ticket=request.ticket,
        cache_salt=request.cache_salt,
        priority=request.priority,
        remaining_ms=to_ms(request.deadline_s),
        hand_back=request.hand_back,
        offer_id=request.offer_id,
    )
    if (awaits := request.awaits) is not None:
        message.awaits.CopyFrom(
            pb.AwaitedOffer(offer_id=awaits.offer_id, owner_id=awaits.owner_id, owner_address=awaits.owner_address)
        )
    return message


def request_from_pb(message: pb.GenerateRequest) -> GenerateRequest:
    """Decode a request."""
    awaits = None
    if message.HasField("awaits"):
        awaits = AwaitedOffer(
            offer_id=message.awaits.offer_id,
            owner_id=message.awaits.owner_id,
            owner_address=message.awaits.owner_address,
        )
    return GenerateRequest(
        request_id=message.request_id,
        token_ids=list(message.token_ids),
        sampling=_sampling_from_pb(message.sampling),
        choices=list(message.choices),
        emitted=[list(tokens.ids) for tokens in message.emitted],
        prefill_only=message.prefill_only,
        ticket=message.ticket,
        awaits=awaits,
        cache_salt=message.cache_salt,
        priority=message.priority,
        deadline_s=message.remaining_ms / 1000,
        hand_back=message.hand_back,
        offer_id=message.offer_id,
    )


def delta_to_pb(delta: ChoiceDelta) -> pb.ChoiceDelta:
    """Encode a delta."""
    message = pb.ChoiceDelta(
        request_id=delta.request_id,
        choice=delta.choice,
        token_ids=delta.token_ids,
        logprobs=[_logprobs_to_pb(entry) for entry in delta.logprobs],
        finish_reason=delta.finish_reason,
        stop_token_id=delta.stop_token_id,
        ticket=delta.ticket,
        cached_tokens=delta.cached_tokens,
        kv_bytes=delta.kv_bytes,
        kv_source=delta.kv_source,
        kv_committed=delta.kv_committed,
        queued_s=delta.queued_s,
    )
    if delta.prompt_logprobs is not None:
        positions = [pb.Logprobs() if entry is None else _logprobs_to_pb(entry) for entry in delta.prompt_logprobs]
        message.prompt_logprobs.CopyFrom(pb.PromptLogprobs(positions=positions))
    if delta.error_code:
        error = pb.ErrorInfo(code=delta.error_code, message=delta.error_message, param=delta.error_param)
        message.error.CopyFrom(error)
    return message


def delta_from_pb(message: pb.ChoiceDelta) -> ChoiceDelta:
    """Decode a delta."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    if message.HasField("prompt_logprobs"):
        prompt_logprobs = [
            _logprobs_from_pb(entry) if entry.token_ids else None for entry in message.prompt_logprobs.positions
        ]
    return ChoiceDelta(
        request_id=message.request_id,
        choice=message.choice,
        token_ids=list(message.token_ids),
        logprobs=[_logprobs_from_pb(entry) for entry in message.logprobs],
        prompt_logprobs=prompt_logprobs,
        finish_reason=message.finish_reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        ticket=message.ticket,
        cached_tokens=message.cached_tokens,
        kv_bytes=message.kv_bytes,
        kv_source=message.kv_source,
        kv_committed=message.kv_committed,
        queued_s=message.queued_s,
        error_code=message.error.code,
        error_message=message.error.message,
        error_param=message.error.param,
    )


def blocks_to_pb(blocks: GroupBlocks) -> pb.BlockList:
    """Encode one group's blocks."""
    return pb.BlockList(
        group=blocks.group,
        block_ids=blocks.block_ids,
        generations=blocks.generations,
        first_block=blocks.first_block,
        checksums=blocks.checksums,
    )


def blocks_from_pb(message: pb.BlockList) -> GroupBlocks:
    """Decode one group's blocks."""
    return GroupBlocks(
        group=message.group,
        block_ids=list(message.block_ids),
        generations=list(message.generations),
        first_block=message.first_block,
        checksums=list(message.checksums),
    )


def error_to_pb(error: MeshError) -> pb.ErrorInfo:
    """Encode an error by its class name."""
    return pb.ErrorInfo(code=error.code, message=error.message, param=error.param or "")


def error_from_pb(message: pb.ErrorInfo, request_id: str | None = None) -> MeshError:
    """Rebuild an error; one of an unknown class becomes InternalError."""
    return from_code(message.code, message.message, message.param or None, request_id)


def to_ms(seconds: float) -> int:
    """Remaining time as the wire has it; what is overdue is 0."""
    return max(0, round(seconds * 1000))


def _sampling_to_pb(sampling: SamplingParams) -> pb.Sampling:
    allowed = sampling.allowed_token_ids
    return pb.Sampling(
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=None if allowed is None else pb.TokenIds(ids=allowed),
        bad_words=[pb.TokenIds(ids=ids) for ids in sampling.bad_words_token_ids],
        repetition_detection=_repetition_to_pb(sampling.repetition_detection),
        thinking=_thinking_to_pb(sampling.thinking),
        extra_args=encode_extra_args(sampling.extra_args) if sampling.extra_args else b"",
    )


def _sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        n=message.n,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=list(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=list(message.allowed_token_ids.ids) if message.HasField("allowed_token_ids") else None,
        bad_words_token_ids=[list(tokens.ids) for tokens in message.bad_words],
        repetition_detection=_repetition_from_pb(message) if message.HasField("repetition_detection") else None,
        thinking=_thinking_from_pb(message) if message.HasField("thinking") else None,
        extra_args=_extra_args_from_pb(message.extra_args) if message.extra_args else {},
    )


def _repetition_to_pb(detection: RepetitionDetection | None) -> pb.RepetitionDetection | None:
    if detection is None:
        return None
    return pb.RepetitionDetection(
        max_pattern_size=detection.max_pattern_size,
        min_pattern_size=detection.min_pattern_size,
        min_count=detection.min_count,
    )


def _repetition_from_pb(message: pb.Sampling) -> RepetitionDetection:
    detection = message.repetition_detection
    return RepetitionDetection(
        max_pattern_size=detection.max_pattern_size,
        min_pattern_size=detection.min_pattern_size,
        min_count=detection.min_count,
    )


def _thinking_to_pb(thinking: ThinkingBudget | None) -> pb.ThinkingBudget | None:
    if thinking is None:
        return None
    return pb.ThinkingBudget(
        budget=thinking.budget, start_token_ids=thinking.start_token_ids, end_token_ids=thinking.end_token_ids
    )


def _thinking_from_pb(message: pb.Sampling) -> ThinkingBudget:
    thinking = message.thinking
    return ThinkingBudget(
        budget=thinking.budget,
        start_token_ids=list(thinking.start_token_ids),
        end_token_ids=list(thinking.end_token_ids),
    )


def _extra_args_from_pb(data: bytes) -> ExtraArgs:
    if len(data) > MAX_EXTRA_ARGS_BYTES:
        raise InvalidRequest(
            f"vllm_xargs must take at most {MAX_EXTRA_ARGS_BYTES} bytes as MessagePack, got {len(data)}",
            param="vllm_xargs",
        )
    try:
        return _decode_extra_args(data)
    except msgspec.MsgspecError as exc:
        raise InvalidRequest(f"vllm_xargs cannot be read: {exc}", param="vllm_xargs") from exc


def _logprobs_to_pb(entry: TokenLogprobs) -> pb.Logprobs:
    return pb.Logprobs(token_ids=entry.token_ids, logprobs=entry.logprobs, rank=entry.rank)


def _logprobs_from_pb(message: pb.Logprobs) -> TokenLogprobs:
    return TokenLogprobs(token_ids=list(message.token_ids), logprobs=list(message.logprobs), rank=message.rank)
