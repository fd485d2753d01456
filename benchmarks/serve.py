"""Puts the same seeded load on one or more OpenAI endpoints in one run and prints them side by side.

    python benchmarks/serve.py mesh=http://127.0.0.1:8000 peer=http://127.0.0.1:9000 --concurrency 8 --output-len 64

Prompts are random token ids from a seed, so every server computes the same; each round has prompts of its own, so that no
prefix cache answers for the last round. Servers take turns within a round and the first one changes, so that a machine
that slows down or warms up treats all alike. Numbers of a round are percentiles; the table has their medians over rounds.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

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
    seed: int
    timeout_s: float


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
    return [prefix + draw(load.input_len - load.prefix_len) for _ in range(load.num_requests)]


async def run_round(server: Server, load: Load, round_number: int, api_key: str) -> Round:
    """Put one round on one server."""
    result = Round()
    slots = asyncio.Semaphore(load.concurrency)
    arrivals = random.Random(f"{load.seed}-{round_number}-arrivals")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=load.timeout_s) as client:

        async def send(prompt: list[int]) -> None:
            async with slots:
                await _request(client, server, load, prompt, result)

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as requests:
            for prompt in make_prompts(load, round_number):
                requests.create_task(send(prompt))
                if load.rate_per_s:
                    await asyncio.sleep(arrivals.expovariate(load.rate_per_s))
        result.took_s = time.perf_counter() - began_s
    return result


async def _request(client: httpx.AsyncClient, server: Server, load: Load, prompt: list[int], result: Round) -> None:
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
    try:
        async with client.stream("POST", f"{server.url}/completions", json=body) as response:
            if response.status_code != 200:
                result.errors.append(
                    f"{response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
                )
                return
            async for line in response.aiter_lines():
                if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    result.errors.append(str(event["error"])[:200])
                    return
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                if event.get("choices"):
                    now_s = time.perf_counter()
                    if last_s:
                        result.itl_s.append(now_s - last_s)
                    else:
                        result.ttft_s.append(now_s - began_s)
                    last_s = now_s
    except httpx.HTTPError as exc:
        result.errors.append(f"{type(exc).__name__}: {exc}")
        return
    result.output_tokens += tokens
    result.e2e_s.append(time.perf_counter() - began_s)
    if tokens != load.output_len:
        result.errors.append(f"{tokens} tokens instead of {load.output_len}")


async def run(servers: list[Server], load: Load, rounds: int, api_key: str) -> dict[str, list[Round]]:
    """All rounds; a warm-up of one small round per server comes first and is not counted."""
    warm_up = Load(**{**asdict(load), "num_requests": min(load.num_requests, load.concurrency), "rate_per_s": 0.0})
    for server in servers:
        await run_round(server, warm_up, -1, api_key)
    results: dict[str, list[Round]] = {server.name: [] for server in servers}
    for number in range(rounds):
        turn = number % len(servers)
        for server in servers[turn:] + servers[:turn]:
            done = await run_round(server, load, number, api_key)
            results[server.name].append(done)
            print(
                f"round {number + 1}/{rounds} {server.name}: {done.output_tokens / done.took_s:.1f} tok/s, "
                f"{len(done.errors)} errors",
                file=sys.stderr,
            )
    return results


def summarise(results: dict[str, list[Round]]) -> dict[str, dict[str, Any]]:
    """Medians over rounds for each server."""
    summary: dict[str, dict[str, Any]] = {}
    for name, rounds in results.items():
        numbers = [one.summary() for one in rounds]
        medians: dict[str, Any] = {
            key: statistics.median(values)
            for key, *_ in COLUMNS
            if (values := [each[key] for each in numbers if key in each])
        }
        errors = [error for one in rounds for error in one.errors]
        summary[name] = medians | {"errors": len(errors), "first_error": errors[0] if errors else ""}
    return summary


def format_table(summary: dict[str, dict[str, Any]]) -> str:
    """One line per number, one column per server, then each other server relative to the first; over 1 is better."""
    names = list(summary)
    first = summary[names[0]]
    heads = ["", *names, *(f"{name} / {names[0]}" for name in names[1:])]
    rows = [heads]
    for key, heading, digits, more_is_better in COLUMNS:
        cells = [f"{summary[name][key]:.{digits}f}" if key in summary[name] else "-" for name in names]
        for name in names[1:]:
            ratio = _ratio(summary[name].get(key), first.get(key), more_is_better)
            cells.append(f"{ratio:.2f}×" if ratio else "-")
        rows.append([heading, *cells])
    rows.append(["errors", *(str(summary[name]["errors"]) for name in names), *("" for _ in names[1:])])
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = [
        "  ".join(cell.ljust(width) if index == 0 else cell.rjust(width) for index, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    lines += [f"{name}: first error: {summary[name]['first_error']}" for name in names if summary[name]["first_error"]]
    return "\n".join(lines)


def _ratio(value: float | None, base: float | None, more_is_better: bool) -> float | None:
    """How many times better than the base."""
    if not value or not base:
        return None
    return value / base if more_is_better else base / value


def parse_server(text: str, model: str, api_key: str) -> Server:
    """`name=URL` or `URL`, with or without /v1; asks the server for its model when none is given."""
    name, separator, url = text.partition("=")
    if not separator or "://" in name:
        name, url = text.split("://")[-1].split("/")[0], text
    url = url.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    if not model:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            model = httpx.get(f"{url}/models", headers=headers, timeout=10).raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise SystemExit(f"{name}: {url}/models: {exc}") from None
    return Server(name=name, url=url, model=model)


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; exit code 1 when any request failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("servers", nargs="+", metavar="[NAME=]URL", help="base URLs of OpenAI-compatible servers")
    parser.add_argument("--model", default="", help="model name; default: the first that each server lists")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=32, help="requests per server and round")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.0, help="Poisson arrivals per second; 0: closed loop")
    parser.add_argument("--input-len", type=int, default=256, help="prompt tokens")
    parser.add_argument("--prefix-len", type=int, default=0, help="of them, tokens that all prompts of a round share")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=40000, help="token ids are drawn below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    if not 0 <= options.prefix_len <= options.input_len:
        parser.error("--prefix-len must be between 0 and --input-len")
    servers = [parse_server(text, options.model, options.api_key) for text in options.servers]
    if len({server.name for server in servers}) < len(servers):
        parser.error("two servers have the same name")
    load = Load(
        num_requests=options.num_requests,
        concurrency=options.concurrency,
        rate_per_s=options.rate,
        input_len=options.input_len,
        prefix_len=options.prefix_len,
        output_len=options.output_len,
        vocab_size=options.vocab,
        seed=options.seed,
        timeout_s=options.timeout,
    )
    results = asyncio.run(run(servers, load, options.rounds, options.api_key))
    summary = summarise(results)
    if options.json:
        rounds = {name: [one.summary() for one in done] for name, done in results.items()}
        print(json.dumps({"load": asdict(load), "rounds": rounds, "summary": summary}))
    else:
        print(format_table(summary))
    return 1 if any(one["errors"] for one in summary.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
