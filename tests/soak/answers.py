"""Reads one answer of the mesh as a client does, and judges it: right, wrong, an explicit error, or none of these."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from soak.shapes import Choice, Shape


class Verdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    """Tokens, text, finish reason or usage are not the single engine's."""
    ERROR = "error"
    """The mesh said that it failed, with a status and a code."""
    LOST = "lost"
    """The connection broke while the proxy itself was killed: nobody was left to say anything."""
    TRUNCATED = "truncated"
    """It ended early and nothing said so."""
    HUNG = "hung"
    """It had not ended when its deadline had long passed."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What became of one request."""

    verdict: Verdict
    detail: str = ""
    """Of an error its status and type; of a wrong answer what differs."""
    route: str = ""


@dataclass(slots=True)
class _Growing:
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Answer:
    """An answer, whole or as its events come."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._choices = [_Growing() for _ in shape.choices]
        self._usage: dict[str, Any] | None = None
        self._error: str = ""
        self._strange: str = ""
        self.ended = False
        """The whole body came, or a stream's terminator."""
        self.route = ""

    def take(self, part: dict[str, Any]) -> None:
        """Take a whole answer or a chunk of a stream."""
        if "error" in part:
            self._error = f"{part['error'].get('code')} {part['error'].get('type')}: {part['error'].get('message')}"
            return
        for piece in part.get("choices", []):
            if not 0 <= piece["index"] < len(self._choices):
                self._strange = f"choice {piece['index']} was not asked for"
                continue
            self._add(self._choices[piece["index"]], piece)
        self._usage = part.get("usage") or self._usage

    def _add(self, growing: _Growing, piece: dict[str, Any]) -> None:
        if growing.finish_reason is not None and (piece.get("token_ids") or piece.get("finish_reason")):
            self._strange = f"choice {piece['index']} goes on after its end"
        message = piece.get("delta") or piece.get("message") or {}
        growing.token_ids += piece.get("token_ids") or []
        growing.text.append(piece.get("text") or message.get("content") or "")
        growing.finish_reason = growing.finish_reason or piece.get("finish_reason")
        growing.stop_reason = piece.get("stop_reason") if growing.stop_reason is None else growing.stop_reason

    async def take_stream(self, lines: AsyncIterator[str]) -> None:
        """Take server-sent events until they end."""
        async for line in lines:
            if line == "data: [DONE]":
                self.ended = True
            elif line.startswith("data: "):
                self.take(json.loads(line[6:]))
            elif line.startswith(": pdmesh "):
                self.route = line.removeprefix(": pdmesh ")

    def judge(self) -> Judged:
        """Say what it is; an error is explicit only when what came before it is right."""
        if difference := self._strange or self._difference(whole=self.ended and not self._error):
            return Judged(verdict=Verdict.WRONG, detail=difference, route=self.route)
        if self._error:
            return Judged(verdict=Verdict.ERROR, detail=self._error, route=self.route)
        if not self.ended:
            return Judged(verdict=Verdict.TRUNCATED, route=self.route)
        return Judged(verdict=Verdict.RIGHT, route=self.route)

    def _difference(self, *, whole: bool) -> str:
        for index, (got, wanted) in enumerate(zip(self._choices, self._shape.choices, strict=True)):
            if difference := _differs(got, wanted, whole=whole):
                return f"choice {index}: {difference}"
        if not whole:
            return ""
        usage = self._usage or {}
        numbers = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        wanted_numbers = (self._shape.num_prompt_tokens, self._shape.num_completion_tokens)
        return "" if numbers == wanted_numbers else f"usage {numbers}, not {wanted_numbers}"


def _differs(got: _Growing, wanted: Choice, *, whole: bool) -> str:
    ids, text = tuple(got.token_ids), "".join(got.text)
    if whole:
        same = (ids, text, got.finish_reason, got.stop_reason) == (
            wanted.token_ids,
            wanted.text,
            wanted.finish_reason,
            wanted.stop_reason,
        )
    else:
        same = wanted.token_ids[: len(ids)] == ids and wanted.text.startswith(text)
    if same:
        return ""
    return (
        f"got {list(ids)} {text!r} {got.finish_reason} {got.stop_reason!r}, "
        f"not {list(wanted.token_ids)} {wanted.text!r} {wanted.finish_reason} {wanted.stop_reason!r}"
    )
