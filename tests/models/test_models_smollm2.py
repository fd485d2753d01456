"""The demo model, from its quantised GGUF file, against transformers on the same file: greedy tokens in float32."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from pdmesh.models.source import DEMO_MODEL, resolve
from support.sequences import LoadedBackend, Sequence

# transformers takes a quarter of a minute to load the model: too long for --quick.
pytestmark = pytest.mark.services

# Below this gap between the two best logits rounding may choose, and the prompt proves nothing (DESIGN, promise 1).
MIN_TOP2_GAP = 1e-3
# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
CHAT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


class Reference:
    def __init__(self) -> None:
        path = resolve(DEMO_MODEL).path
        with warnings.catch_warnings():
            # transformers and what it imports warn of their own deprecated calls while they load.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            from transformers import AutoModelForCausalLM

            self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Continue, and stop before the first choice that is too close."""
        found: list[int] = []
        result = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        while True:
            best, second = result.logits[0, -1].topk(2).values.tolist()
            if best - second < MIN_TOP2_GAP:
                return found
            found.append(int(result.logits[0, -1].argmax()))
            if len(found) == num_tokens:
                return found
            result = self.model(torch.tensor([found[-1:]]), past_key_values=result.past_key_values, use_cache=True)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedBackend]:
    backend = LoadedBackend(DEMO_MODEL, block_size=32, num_blocks=100)
    yield backend
    backend.close()


def test_chat_prompt(reference: Reference, loaded: LoadedBackend) -> None:
    wanted = reference.greedy(CHAT, 10)
    assert len(wanted) == 10
    assert loaded.greedy(CHAT, 10) == wanted


def test_prompt_in_chunks_over_block_ends(reference: Reference, loaded: LoadedBackend) -> None:
    prompt = random_prompt(70)
    with torch.inference_mode():
        wanted = reference.model(torch.tensor([prompt])).logits[0]
    sequence = Sequence(prompt)
    found = torch.cat([loaded.step([(sequence, count)]) for count in (31, 1, 33, 5)])
    loaded.free(sequence)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 257, 2000])
def test_prompts_of_every_length(reference: Reference, loaded: LoadedBackend, length: int) -> None:
    prompt = (CHAT * 130)[:length]
    wanted = reference.greedy(prompt, 24)
    assert wanted
    assert loaded.greedy(prompt, len(wanted)) == wanted


def random_prompt(length: int) -> list[int]:
    return torch.randint(0, 49152, (length,), generator=torch.Generator().manual_seed(length)).tolist()
