"""Whole programs of the CPU library: threads, batches and chunks change no bit, and every instruction set computes the model."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from pdmesh_kernels.cpu.abi import Format, Isa
from pdmesh_kernels.cpu.library import Library, LibraryError, Pool
from support.cpu_decoder import BLOCK, NUM_BLOCKS, VOCABULARY, WINDOWS, Chunk, Decoder, Weights

FORMATS = [Format.F32, Format.BF16]
# Relative to the size of the logits: f32 differs by the order of sums; bf16 by what activations are rounded to.
TOLERANCE = {Format.F32: 1e-5, Format.BF16: 8e-3}
LENGTHS = (3, 70, 300)
THREADS = (1, 2, 3, 5)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture
def pool(library: Library) -> Iterator[Pool]:
    with closing(Pool(library, 1)) as made:
        yield made


def tables() -> list[tuple[list[int], list[int]]]:
    """Of each prompt and group: blocks in no order, each in one table."""
    blocks = [np.random.default_rng(group).permutation(NUM_BLOCKS).tolist() for group in range(len(WINDOWS))]
    dealt = []
    for length in LENGTHS:
        count = -(-length // BLOCK)
        dealt.append((blocks[0][:count], blocks[1][:count]))
        blocks = [rest[count:] for rest in blocks]
    return dealt


def in_one_step(decoder: Decoder, pool: Pool, prompts: list[list[int]]) -> list[np.ndarray]:
    places = tables()
    logits, best = decoder.step(pool, [Chunk(ids, 0, place) for ids, place in zip(prompts, places, strict=True)])
    np.testing.assert_array_equal(best, logits.argmax(axis=1))
    return np.split(logits, np.cumsum(LENGTHS)[:-1])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_instruction_set_computes_the_model(
    library: Library, isa: Isa, pool: Pool, weights: Weights, prompts: list[list[int]], format: Format
) -> None:
    with closing(Decoder(library, isa, weights, format)) as decoder:
        found = in_one_step(decoder, pool, prompts)
    for logits, prompt in zip(found, prompts, strict=True):
        wanted = weights.logits(prompt).numpy()
        error = np.linalg.norm(logits - wanted) / np.linalg.norm(wanted)
        assert error < TOLERANCE[format]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_any_number_of_threads_gives_the_same_bits(
    library: Library, isa: Isa, weights: Weights, prompts: list[list[int]], format: Format
) -> None:
    results = []
    for num_threads in THREADS:
        with closing(Decoder(library, isa, weights, format)) as decoder, closing(Pool(library, num_threads)) as pool:
            logits = np.concatenate(in_one_step(decoder, pool, prompts))
            kept = np.concatenate(decoder.pools)
        results.append((logits, kept))
    for logits, kept in results[1:]:
        np.testing.assert_array_equal(logits.view(np.uint32), results[0][0].view(np.uint32))
        np.testing.assert_array_equal(kept, results[0][1])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_chunks_and_decode_steps_give_the_bits_of_one_step(
    library: Library, isa: Isa, pool: Pool, weights: Weights, prompts: list[list[int]], format: Format
) -> None:
    """Row invariance: a token's logits depend on nothing but the tokens before it."""
    with closing(Decoder(library, isa, weights, format)) as decoder:
        wanted = in_one_step(decoder, pool, prompts)
    places, sizes = tables(), (1, 19, 113)
    found: list[list[np.ndarray]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    with closing(Decoder(library, isa, weights, format)) as decoder, closing(Pool(library, 2)) as two:
        while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
            # The longest decodes its last tokens one by one while nobody else is there.
            rows = [row for row, prompt in enumerate(prompts) if done[row] < len(prompt)]
            chunks = []
            for row in rows:
                end = done[row] + sizes[row] if done[row] < 290 else done[row] + 1
                chunks.append(Chunk(prompts[row][done[row] : end], done[row], places[row]))
            logits, _ = decoder.step(two, chunks)
            starts = np.cumsum([len(chunk.token_ids) for chunk in chunks])[:-1]
            for row, chunk, part in zip(rows, chunks, np.split(logits, starts), strict=True):
                found[row].append(part)
                done[row] += len(chunk.token_ids)
    for parts, whole in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts).view(np.uint32), whole.view(np.uint32))


def test_a_refused_step_changes_nothing_and_says_why(library: Library, pool: Pool, weights: Weights) -> None:
    with closing(Decoder(library, library.isas[0], weights, Format.BF16)) as decoder:
        before = np.concatenate(decoder.pools)
        for chunk, words in [
            (Chunk([1, 2], 0, ([NUM_BLOCKS], [0])), "not of the pool"),
            (Chunk([1, 2], 0, ([-1], [0])), "not of the pool"),
            (Chunk([1] * 40, 0, ([3], [4])), "too narrow"),
            (Chunk([1, VOCABULARY], 0, ([3], [4])), "token_ids"),
            (Chunk([1], 1 << 40, ([3], [4])), "context_len"),
        ]:
            with pytest.raises(LibraryError, match=words):
                decoder.step(pool, [chunk])
        np.testing.assert_array_equal(np.concatenate(decoder.pools), before)
