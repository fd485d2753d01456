"""`LLM.beam_search` on real models, against transformers and against every sequence there is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh import LLM, BeamSearchParams
from pdmesh.errors import InvalidRequest

NUM_TOKENS = 6


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.mark.parametrize("width", [1, 2, 5])
def test_beams_of_equal_length_are_those_of_transformers(llm: LLM, reference: Any, width: int) -> None:
    """Without an end of text both searches mean the same, whatever the penalty of length."""
    for text in ("The quick brown", "What is the capital of"):
        ids = llm.get_tokenizer().encode(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = reference.generate(
                torch.tensor([ids]),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=reference.config.vocab_size + 1,
                pad_token_id=0,
                length_penalty=0.0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        params = BeamSearchParams(beam_width=width, max_tokens=NUM_TOKENS, ignore_eos=True, length_penalty=0.0)
        [output] = llm.beam_search(text, params)
        assert [beam.tokens for beam in output.sequences] == wanted.sequences.tolist()
        if width > 1:
            scores = [beam.cum_logprob for beam in output.sequences]
            torch.testing.assert_close(torch.tensor(scores), wanted.sequences_scores, rtol=1e-4, atol=1e-4)


def test_two_steps_find_the_best_of_all_pairs(llm: LLM, reference: Any) -> None:
    prompt = [5, 60, 7, 33]
    vocab_size = reference.config.vocab_size
    with torch.inference_mode():
        first = reference(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        contexts = torch.tensor([[*prompt, token] for token in range(vocab_size)])
        second = reference(contexts).logits[:, -1].log_softmax(-1)
    best = (first[:, None] + second).flatten().topk(12)
    pairs = [[index // vocab_size, index % vocab_size] for index in best.indices.tolist()]
    params = BeamSearchParams(beam_width=100, max_tokens=2, ignore_eos=True)
    [output] = llm.beam_search([prompt], params)
    assert [beam.tokens[len(prompt) :] for beam in output.sequences[:12]] == pairs
    found = torch.tensor([beam.cum_logprob for beam in output.sequences[:12]])
    torch.testing.assert_close(found, best.values, rtol=1e-4, atol=1e-4)


def test_beams_tell_all_of_themselves(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.beam_search(["one two", {"prompt_token_ids": [9, 8, 7]}], params, concurrency_limit=1)
    assert [len(output.sequences) for output in outputs] == [3, 3]
    for output in outputs:
        scores = [beam.cum_logprob for beam in output.sequences]
        assert scores == sorted(scores, reverse=True)
        for beam in output.sequences:
            generated = beam.tokens[-NUM_TOKENS:]
            assert len(beam.logprobs) == NUM_TOKENS
            assert all(len(position) == 6 for position in beam.logprobs)
            own = [position[token].logprob for token, position in zip(generated, beam.logprobs, strict=True)]
            assert beam.cum_logprob == pytest.approx(sum(own))
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)
            assert (beam.finish_reason, beam.stop_reason) == ("length", None)
    assert outputs[0].sequences[0].text.startswith("one two")
    together = llm.beam_search(["one two", [9, 8, 7]], params)
    for one, other in zip(outputs, together, strict=True):
        assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in other.sequences]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 501}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"temperature": 5.0}, "temperature"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | fields))
    assert refused.value.param == param


def test_a_concurrency_limit_of_none_at_all_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="concurrency_limit"):
        llm.beam_search("x", BeamSearchParams(beam_width=1, max_tokens=1), concurrency_limit=0)
