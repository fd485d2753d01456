"""Puts the same seeded load on one or more OpenAI endpoints in one run and prints them side by side.

    python benchmarks/serve.py mesh=http://127.0.0.1:8000 peer=http://127.0.0.1:9000 --concurrency 8 --output-len 64

Prompts are random token ids from a seed, so every server computes the same; each round has prompts of its own, so that no
prefix cache answers for the last round. Servers take turns within a round and the first one changes, so that a machine
that slows down or warms up treats all alike. Numbers of a round are percentiles; the table has their medians over rounds.
"""

import argparse
import asyncio
import json
import statistics
import sys
from dataclasses import asdict
from typing import Any

import httpx

from load import COLUMNS, Load, Round, Server, run_round


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
    parser.add_argument("--long-every", type=int, default=0, help="every so-many-th prompt is a long one; 0: none")
    parser.add_argument("--long-len", type=int, default=3000, help="tokens of a long prompt")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=40000, help="token ids are drawn below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    if not 0 <= options.prefix_len <= options.input_len:
        parser.error("--prefix-len must be between 0 and --input-len")
    if options.long_every < 0 or options.long_len < options.prefix_len:
        parser.error("--long-every must be 0 or more, --long-len no less than --prefix-len")
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
        long_every=options.long_every,
        long_len=options.long_len,
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
