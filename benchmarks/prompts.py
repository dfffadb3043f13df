"""Prompts over rows against a local server that limits, delays and fails (tests/llmserver.py), beside two loops that
people write: a semaphore over all requests, and batches that are waited for.

python benchmarks/prompts.py [--rows 10000] [--rounds 3] [--only limit]
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from operator import truediv
from statistics import median
from typing import Any

import aiohttp
import pyarrow as pa

import gristmill as gm
from gristmill.models.endpoint import Endpoint

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
            api_key=KEY, **{"workers": 1, **options},
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


def in_turns(rounds: int, runs: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Seconds of each run in each round, one after the other: this machine is not the same a minute later."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            took[name].append(run())
    return took


def served(run: Callable[..., float], options: dict[str, Any], *args: Any, **more: Any) -> Callable[[], float]:
    """A run against a server of its own, which draws the same for each."""

    def once() -> float:
        with ChatServer(**options) as server:
            return run(server, *args, **more)

    return once


def throughput(rows: int, rounds: int) -> None:
    """One worker against a server that answers after 20 ms, beside a semaphore loop of one process."""
    options = {"latency": 0.02}
    took = in_turns(rounds, {
        "job": served(job, options, rows, concurrency=128), "loop": served(loop, options, rows, 128, batches=False),
    })  # fmt: skip
    for name, seconds in took.items():
        slowest, quickest = rows / max(seconds), rows / min(seconds)
        print(f"  {name}: {rows / median(seconds):,.0f} requests/s ({slowest:,.0f} to {quickest:,.0f})")
    print(f"  of the loop's rate: {median(map(truediv, took['loop'], took['job'])):.2f}")


class Sent:
    """When requests leave this process, while it is entered."""

    def __enter__(self) -> Sent:
        self.times: list[float] = []
        self._kept = real = Endpoint._sent

        async def sent(endpoint: Endpoint, *given: Any) -> Any:
            self.times.append(time.monotonic())
            return await real(endpoint, *given)

        Endpoint._sent = sent  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Endpoint._sent = self._kept  # type: ignore[method-assign]

    def most(self) -> int:
        """In any second."""
        within: deque[float] = deque()
        found = 0
        for now in self.times:
            within.append(now)
            while within[0] <= now - 1:
                within.popleft()
            found = max(found, len(within))
        return found


def limit(rows: int, rounds: int) -> None:
    """A server that refuses the 607th request of a second and takes 50 ms; the job is told 36,000 a minute."""
    for _ in range(rounds):
        with ChatServer(latency=0.05, limit=606) as server, Sent() as sent:
            took = job(server, 2 * rows, workers=0, concurrency=256, requests_per_minute=36_000)
            told = server.told()
        rate = len(sent.times) / (sent.times[-1] - sent.times[0])
        print(f"  whole run {2 * rows / took / 600:.1%} of the limit, first request to last {rate / 600:.1%}; "
              f"at most {sent.most()} left in a second; {told['statuses'].get('429', 0)} refused")  # fmt: skip


def least(rows: int, at_once: int, latency: float, slow: float, times: float, seed: int) -> float:
    """Seconds that the server's own waiting takes if each request is sent the moment that one of `at_once` is answered,
    and nobody knows which will be slow.
    """
    draw, ends = random.Random(seed), [0.0] * at_once
    for _ in range(rows):
        draw.random()  # of failures
        took = latency * (times if draw.random() < slow else 1.0)
        heapq.heappush(ends, heapq.heappop(ends) + took)
    return max(ends)


def stragglers(rows: int, rounds: int) -> None:
    """1 % of the answers take 100 times as long (50 ms), 64 at a time, beside loops of batches and with a semaphore."""
    rows //= 2
    options = {"latency": 0.05, "slow": 0.01, "seed": 5}
    bound, even = least(rows, 64, times=100, **options), rows * 0.05 * (0.99 + 0.01 * 100) / 64
    started: list[float] = []

    def run(server: ChatServer) -> float:
        with Sent() as sent:
            seconds = job(server, rows, workers=0, concurrency=64)
            started.append(time.monotonic() - sent.times[0])
        return seconds

    took = in_turns(rounds, {"job": served(run, options), "semaphore": served(loop, options, rows, 64, batches=False)})
    took["job from its first request on"] = started
    took["batches"] = [served(loop, options, rows, 64, batches=True)()]
    print(f"  {rows} rows, {bound:.1f} s if no moment is lost ({even:.1f} s if all could end together)")
    for name, seconds in took.items():
        print(f"  {name}: {median(seconds):.1f} s, {median(seconds) / bound:.2f} of that")


def failures(rows: int, rounds: int) -> None:
    """5 % are told to come again (429), 1 % fail (500): beside the same without failures, in turns."""
    options: dict[str, Any] = {"latency": 0.05}
    took = in_turns(rounds, {
        "without": served(job, options, rows, concurrency=64),
        "with": served(job, {**options, "busy": 0.05, "broken": 0.01}, rows, concurrency=64),
    })  # fmt: skip
    ratios = [b / a for a, b in zip(*took.values(), strict=True)]
    without, with_ = (median(seconds) for seconds in took.values())
    print(f"  without {without:.1f} s, with {with_:.1f} s: {median(ratios):.2f} "
          f"({min(ratios):.2f} to {max(ratios):.2f}), 1.06 of it are requests sent again; no row lost")  # fmt: skip


PARTS: dict[str, Callable[[int, int], None]] = {
    "throughput": throughput, "limit": limit, "stragglers": stragglers, "failures": failures,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS)
    given = parser.parse_args()
    for name, part in PARTS.items():
        if given.only in (None, name):
            print(f"{name}: {(part.__doc__ or '').splitlines()[0]}", flush=True)
            part(given.rows, given.rounds)


if __name__ == "__main__":
    main()
