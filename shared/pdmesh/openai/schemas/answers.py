"""Answers and stream chunks, field by field as vLLM 0.32 sends them; UNSET fields are left out of the JSON."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Four lists, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | None = None


class Completion(msgspec.Struct, kw_only=True):
    """Both the answer and a chunk: OpenAI's completions have one shape for the two."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ContentLogprob]


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: dict[str, Any] | None


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_text: str | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdmesh"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[None] = []


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's prompt is for the engine; of vLLM's longer answer, what routers that follow KV events read."""

    request_id: str
    model: str
    token_ids: list[int]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: int


class ErrorEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail
