"""What a benchmark puts on an OpenAI endpoint, and what one round of it measured.

Prompts are random token ids from a seed, so every server computes the same; each round has prompts of its own, so that no
prefix cache answers for the last round.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field

from sse_client import EventStream, StreamFailed

LOWEST_TOKEN_ID = 100
# (key, heading, digits, whether more is better)
COLUMNS: list[tuple[str, str, int, bool]] = [
    ("output_tokens_per_s", "output tok/s", 1, True),
    ("requests_per_s", "requests/s", 2, True),
    ("ttft_p50_ms", "TTFT p50 ms", 1, False),
    ("ttft_p95_ms", "TTFT p95 ms", 1, False),
    ("ttft_p99_ms", "TTFT p99 ms", 1, False),
    ("itl_p50_ms", "ITL p50 ms", 2, False),
    ("itl_p95_ms", "ITL p95 ms", 2, False),
    ("itl_p99_ms", "ITL p99 ms", 2, False),
    ("e2e_p50_ms", "end to end p50 ms", 1, False),
]


@dataclass(frozen=True, kw_only=True)
class Server:
    """One endpoint under test."""

    name: str
    url: str
    model: str


@dataclass(frozen=True, kw_only=True)
class Load:
    """What every server gets in each round."""

    num_requests: int
    concurrency: int
    """Requests in flight; with a rate this is only an upper bound."""
    rate_per_s: float
    """Poisson arrivals; 0: as fast as `concurrency` allows."""
    input_len: int
    prefix_len: int
    """Tokens at the start that all prompts of a round share."""
    output_len: int
    vocab_size: int
    """Token ids are drawn below this."""
    seed: int
    timeout_s: float
    """For one request."""
    long_every: int = 0
    """Every so-many-th prompt, the first of them included, has `long_len` tokens instead; 0: none."""
    long_len: int = 0


@dataclass(kw_only=True)
class Round:
    """What one server did in one round."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    took_s: float = 0.0

    def summary(self) -> dict[str, float]:
        """Rates, and percentiles in ms; a key is missing where nothing was measured."""
        numbers = {
            "output_tokens_per_s": self.output_tokens / self.took_s,
            "requests_per_s": len(self.e2e_s) / self.took_s,
        }
        for name, samples in (("ttft", self.ttft_s), ("itl", self.itl_s), ("e2e", self.e2e_s)):
            for percent in (50, 95, 99) if samples else ():
                numbers[f"{name}_p{percent}_ms"] = percentile(samples, percent) * 1e3
        return numbers


def percentile(samples: list[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def make_prompts(load: Load, round_number: int) -> list[list[int]]:
    """The prompts of one round, the same for every server."""
    source = random.Random(f"{load.seed}-{round_number}")

    def draw(count: int) -> list[int]:
        return [source.randrange(LOWEST_TOKEN_ID, load.vocab_size) for _ in range(count)]

    prefix = draw(load.prefix_len)
    is_long = [load.long_every > 0 and index % load.long_every == 0 for index in range(load.num_requests)]
    return [prefix + draw((load.long_len if long else load.input_len) - load.prefix_len) for long in is_long]


async def run_round(server: Server, load: Load, round_number: int, api_key: str = "") -> Round:
    """Put one round on one server."""
    result = Round()
    slots = asyncio.Semaphore(load.concurrency)
    arrivals = random.Random(f"{load.seed}-{round_number}-arrivals")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def send(prompt: list[int]) -> None:
        async with slots:
            try:
                async with asyncio.timeout(load.timeout_s):
                    await _request(server, load, prompt, headers, result)
            except TimeoutError:
                result.errors.append(f"no end within {load.timeout_s:g} s")
            except StreamFailed as exc:
                result.errors.append(str(exc))

    prompts = make_prompts(load, round_number)
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as requests:
        for prompt in prompts:
            requests.create_task(send(prompt))
            if load.rate_per_s:
                await asyncio.sleep(arrivals.expovariate(load.rate_per_s))
    result.took_s = time.perf_counter() - began_s
    return result


async def _request(server: Server, load: Load, prompt: list[int], headers: dict[str, str], result: Round) -> None:
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": load.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = time.perf_counter()
    last_s = 0.0
    tokens = 0
    stream = await EventStream.post(f"{server.url}/completions", body, headers)
    try:
        if stream.status != 200:
            result.errors.append(f"{stream.status}: {(await stream.text())[:200]}")
            return
        while events := await stream.events():
            now_s = time.perf_counter()
            for event in events:
                if "error" in event:
                    result.errors.append(str(event["error"])[:200])
                    return
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                if event.get("choices"):
                    if last_s:
                        result.itl_s.append(now_s - last_s)
                    else:
                        result.ttft_s.append(now_s - began_s)
                    last_s = now_s
    finally:
        stream.close()
    result.output_tokens += tokens
    result.e2e_s.append(time.perf_counter() - began_s)
    if tokens != load.output_len:
        result.errors.append(f"{tokens} tokens instead of {load.output_len}")
