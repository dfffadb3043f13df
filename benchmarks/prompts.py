"""Prompts over rows against a local server that limits, delays and fails (tests/llmserver.py), beside two loops that
people write: a semaphore over all requests, and batches that are waited for.

python benchmarks/prompts.py [--rows 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pyarrow as pa

import gristmill as gm

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests"))
from llmserver import KEY, ChatServer


def table(rows: int) -> pa.Table:
    """Short texts."""
    return pa.table({"id": range(rows), "text": [f"row {n} is here" for n in range(rows)]})


def job(server: ChatServer, rows: int, **options: Any) -> float:
    """Wall seconds of a whole run, which must answer every row."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        report = gm.prompt(
            table(rows), os.path.join(folder, "out"), prompt="{{ text }}", model="m", base_url=server.url, keep=["id"],
            api_key=KEY, workers=1, **options,
        )  # fmt: skip
        took = time.perf_counter() - begun
        assert report.rows_ok == rows and report.read().to_table()["id"].to_pylist() == list(range(rows))
    return took


async def _asked(session: aiohttp.ClientSession, server: ChatServer, text: str) -> str:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
    while True:
        async with session.post(
            f"{server.url}/chat/completions", data=body, headers={"authorization": f"Bearer {KEY}"}
        ) as reply:
            if reply.status == 200:
                return str(json.loads(await reply.read())["choices"][0]["message"]["content"])
        await asyncio.sleep(0.5)


def loop(server: ChatServer, rows: int, at_once: int, batches: bool) -> float:
    """Wall seconds of a loop by hand: `at_once` requests under a semaphore, or in batches of so many."""

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            texts = table(rows)["text"].to_pylist()
            if batches:
                for start in range(0, rows, at_once):
                    await asyncio.gather(*(_asked(session, server, text) for text in texts[start : start + at_once]))
                return
            semaphore = asyncio.Semaphore(at_once)

            async def one(text: str) -> str:
                async with semaphore:
                    return await _asked(session, server, text)

            await asyncio.gather(*map(one, texts))

    begun = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - begun


def throughput(rows: int) -> None:
    """One worker against a server that answers at once after 20 ms."""
    for name, took in (("job", job), ("semaphore loop", _of_loop)):
        with ChatServer(latency=0.02) as server:
            print(f"  {name}: {rows / took(server, rows, concurrency=128):,.0f} requests/s")


def _of_loop(server: ChatServer, rows: int, concurrency: int) -> float:
    return loop(server, rows, concurrency, batches=False)


def limit(rows: int) -> None:
    """A server that refuses the 601st request of a second and takes 50 ms; the job is told 36,000 a minute."""
    with ChatServer(latency=0.05, limit=606) as server:
        took = job(server, rows, concurrency=64, requests_per_minute=36_000)
        told = server.told()
        share = rows / took / 600
        print(f"  {rows / took:,.0f} requests/s, {share:.0%} of the limit; at most {told['rate']} in a second, "
              f"{told['statuses'].get('429', 0)} refused")  # fmt: skip


def stragglers(rows: int) -> None:
    """1 % of the answers take 100 times as long (50 ms): the lower bound is all time asked for, by 64 at once."""
    rows //= 2
    options = {"latency": 0.05, "slow": 0.01, "seed": 5}
    bound = rows * 0.05 * (0.99 + 0.01 * 100) / 64
    for name, run in (
        ("job", lambda server: job(server, rows, concurrency=64)),
        ("batches of 64", lambda server: loop(server, rows, 64, batches=True)),
    ):
        with ChatServer(**options) as server:
            took = run(server)
            print(f"  {name}: {took:.1f} s, {took / bound:.2f} of the lower bound of {bound:.1f} s")


def failures(rows: int) -> None:
    """5 % are told to come again (429), 1 % fail (500): beside the same without failures, in turns."""
    took = {}
    for name, options in (("without", {}), ("with", {"busy": 0.05, "broken": 0.01})):
        with ChatServer(latency=0.05, **options) as server:
            took[name] = job(server, rows, concurrency=64)
            statuses = server.told()["statuses"]
    print(f"  {took['without']:.1f} s without, {took['with']:.1f} s with: {took['with'] / took['without'] - 1:+.1%} "
          f"({statuses})")  # fmt: skip


PARTS: dict[str, Callable[[int], None]] = {
    "throughput": throughput, "limit": limit, "stragglers": stragglers, "failures": failures,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--only", choices=PARTS)
    given = parser.parse_args()
    for name, part in PARTS.items():
        if given.only in (None, name):
            print(f"{name}: {(part.__doc__ or '').splitlines()[0]}", flush=True)
            part(given.rows)


if __name__ == "__main__":
    main()
