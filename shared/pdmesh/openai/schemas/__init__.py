"""Request bodies as pydantic models, answers as msgspec structs."""

from pdmesh.openai.schemas.chat import ChatBody
from pdmesh.openai.schemas.completion import CompletionBody
from pdmesh.openai.schemas.fields import RequestBody
from pdmesh.openai.schemas.generation import GenerationBody
from pdmesh.openai.schemas.tokenize import DetokenizeBody, TokenizeBody

__all__ = ["ChatBody", "CompletionBody", "DetokenizeBody", "GenerationBody", "RequestBody", "TokenizeBody"]
