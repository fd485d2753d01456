"""Greedy continuations by Hugging Face transformers in float32: the truth that every mesh is held against."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pdmesh.models.source import DEMO_MODEL, resolve

# Below this gap between the two best logits, rounding may choose; such prompts prove nothing (DESIGN, promise 1).
MIN_TOP2_GAP = 1e-3


@dataclass(frozen=True)
class Continuation:
    prompt_ids: list[int]
    output_ids: list[int]


class HFReference:
    """SmolLM2 loaded from the same GGUF file by transformers."""

    def __init__(self, model: str = DEMO_MODEL) -> None:
        path = resolve(model).path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import AutoModelForCausalLM, AutoTokenizer

            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(Path(path).parent), gguf_file=Path(path).name)
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                str(Path(path).parent), gguf_file=Path(path).name, dtype=torch.float32
            )
        self.model.eval()

    def chat_ids(self, text: str) -> list[int]:
        """A one-turn conversation, rendered and tokenised by transformers."""
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    def raw_ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    @torch.inference_mode()
    def greedy(self, prompt_ids: list[int], num_tokens: int) -> Continuation:
        """Continue by at most `num_tokens`, stopping before the first choice whose top-2 gap is too small."""
        past = None
        step = torch.tensor([prompt_ids])
        output: list[int] = []
        for _ in range(num_tokens):
            result = self.model(step, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = result.past_key_values
            top = result.logits[0, -1].topk(2)
            if float(top.values[0] - top.values[1]) <= MIN_TOP2_GAP:
                break
            output.append(int(top.indices[0]))
            step = top.indices[:1].reshape(1, 1)
        return Continuation(prompt_ids, output)


TEXTS = [
    "The capital of France is",
    "Die Hauptstadt von Deutschland ist",
    "La capitale de l'Italie est",
    "日本の首都は",
    "中国的首都是",
    "Столица России —",
    "عاصمة مصر هي",
    "def fibonacci(n):\n    ",
    "SELECT name, count(*) FROM",
    "1, 2, 3, 4, 5,",
    "Once upon a time, in a village by the sea, there lived",
    "{\"name\": \"Ada\", \"born\":",
]  # fmt: skip
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "¿Cuál es la capital de España?",
    "List three prime numbers.",
    "Explain photosynthesis in one sentence.",
    "Translate 'good morning' to German.",
    "日本の首都はどこですか？",
]
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 64, 65, 257, 2000]
"""Prompt lengths around block and chunk borders; the ids are cut from one long repeated text."""


def prompts(reference: HFReference, *, full: bool) -> list[list[int]]:
    """30 prompts: raw text in several languages, chats, and lengths around block borders; six of them unless full."""
    long_ids = reference.raw_ids(" ".join(f"Item {i}: the value is {i * i % 97}." for i in range(400)))
    raw = [reference.raw_ids(text) for text in TEXTS]
    chat = [reference.chat_ids(text) for text in CHATS]
    cut = [long_ids[3 : 3 + length] for length in LENGTHS]
    if full:
        return raw + chat + cut
    return [raw[3], chat[0], *(cut[LENGTHS.index(n)] for n in (1, 32, 33, 257))]
