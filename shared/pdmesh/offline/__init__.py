"""The offline API: a model in a Python program, without a server."""

from pdmesh.offline.llm import LLM
from pdmesh.offline.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    PromptsFailed,
    RequestOutput,
)
from pdmesh.offline.prompts import TextPrompt, TokensPrompt
from pdmesh.offline.sampling_params import BeamSearchParams, RepetitionDetectionParams, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Logprob",
    "PromptsFailed",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]
