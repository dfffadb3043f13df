"""Functions of one row, as workers import them."""

import asyncio
import collections
import json
import os
import sys
import threading
import time
import types
from pathlib import Path


class Beside:
    """Counts how many calls go on at once, in all workers: a file a call in `folder` while it lasts."""

    def __init__(self, folder):
        self.folder, self.most = Path(folder), 0

    async def __call__(self, row):
        mine = self.folder / f"on-{row['x']}"
        mine.touch()
        found = len(list(self.folder.glob("on-*")))
        with (self.folder / f"most-{os.getpid()}").open("a") as file:
            file.write(f"{found}\n")
        await asyncio.sleep(0.01)
        mine.unlink()
        return row["x"] * 2

    async def aclose(self):
        await asyncio.sleep(0)
        (self.folder / f"closed-{os.getpid()}").touch()


async def odd(row):
    """Slow for some, wrong for others, and each answer of a form of its own."""
    x = row["x"]
    await asyncio.sleep(0.3 if x % 100 == 3 else 0.001 * (x % 7))
    if x % 50 == 11:
        raise ValueError(f"not {x}")
    if x % 97 == 5:
        raise SystemExit(3)
    if x % 89 == 6:
        raise asyncio.CancelledError
    return {"y": x * 2, "said": f"row {x}"}


def in_threads(row):
    time.sleep(0.002)
    if row["x"] == 13:
        raise KeyboardInterrupt
    return {"y": row["x"] * 2, "thread": threading.current_thread().name}


async def stuck(row):
    if row["x"] == 7:
        await asyncio.sleep(3600)
    return row["x"]


async def fails(row):
    raise ConnectionError("refused")


async def deadly(row):
    await asyncio.sleep(0.001)
    if row["x"] == 301:
        os._exit(9)
    return row["x"] + 1


async def slow(row):
    await asyncio.sleep(30)
    return row["x"]


async def asked(row, file):
    """Notes each row that it is asked for."""
    with open(file, "a") as out:
        out.write(json.dumps(row["x"]) + "\n")
    return {"n": row["x"], "twice": 2 * row["x"]}


async def at_first(row, folder):
    """Answers 900 rows, and the others once there is a file `again`."""
    await asyncio.sleep(0.001)
    calls = Path(folder) / "calls"
    with calls.open("a") as file:
        file.write("x")
    if calls.stat().st_size > 900 and not (Path(folder) / "again").exists():
        raise ConnectionError("refused")
    return row["x"] * 3


class Closing:
    """Ends badly."""

    def __init__(self, how):
        self.how = how

    async def __call__(self, row):
        return row["x"] * 2

    async def aclose(self):
        if self.how == "exits":
            sys.exit(5)
        if self.how == "raises":
            raise OSError("no")
        task = asyncio.create_task(asyncio.sleep(1000))
        task.cancel()
        await task


class BatchClosing:
    """Ends badly, and takes batches."""

    def __call__(self, batch):
        return batch["x"] * 2

    def close(self):
        sys.exit(0)


class Reuses:
    """Gives the same object each time, with another answer in it."""

    def __init__(self):
        self.answer = {"y": [0, 0]}

    async def __call__(self, row):
        self.answer["y"][:] = [row["x"] * 2] * 2
        return self.answer


class ReusesInThreads(Reuses):
    def __init__(self):
        super().__init__()
        self.lock = threading.local()

    def __call__(self, row):
        self.lock.answer = getattr(self.lock, "answer", None) or {"y": [0, 0]}
        self.lock.answer["y"][:] = [row["x"] * 2] * 2
        return self.lock.answer


class ReusesBehindAView(Reuses):
    """Gives a view of the same object each time, which is no dict itself."""

    async def __call__(self, row):
        return types.MappingProxyType(await super().__call__(row))


class ReusesAWrapper:
    def __init__(self):
        self.answer = collections.UserDict(y=[0, 0])

    async def __call__(self, row):
        self.answer["y"][:] = [row["x"] * 2] * 2
        return self.answer


async def answers_whatever_happens(row):
    """Gives an answer of a kind when it is cancelled."""
    try:
        await asyncio.sleep(3600 if row["x"] >= 100 and "SLOW" in os.environ else 0.01)
        return {"y": row["x"] * 2}
    except BaseException:
        return {"y": -1}


class Weighted:
    """Reads its weights again for each row, from a file that an argument names."""

    def __init__(self, weights):
        self.weights = weights

    async def __call__(self, row):
        await asyncio.sleep(0.005)
        while row["x"] >= 100 and "SLOW" in os.environ and Path(self.weights).read_text() == "A":
            await asyncio.sleep(0.01)
        return {"y": f"{Path(self.weights).read_text()}{row['x']}"}


async def forgets(row):
    row["x"] * 2


async def batchwise(batch):
    return {"y": batch["x"]}


def batchwise_too(batch):
    return {"y": batch["x"]}


UNWELL = {
    200: {"y": "an error"},
    400: {"y": 800, "z": 1},
    700: {"y": "smile \ud83d"},
    900: {"y": [1800]},
    1100: {"y": {"a": 1}},
}


async def unwell(row):
    """A few answers of other forms, unless WELL; with STOPS the process ends after a while."""
    await asyncio.sleep(0.002)
    with open(os.environ["ASKED"], "a") as out:
        out.write(f"{row['x']}\n")
    if row["x"] >= 600 and "STOPS" in os.environ:
        await asyncio.sleep(0.2 if row["x"] == 600 else 20)  # on a busy machine the others would all have ended by then
        os.kill(os.getppid(), 9)
    return {"y": row["x"] * 2} if "WELL" in os.environ or row["x"] not in UNWELL else UNWELL[row["x"]]


def loads(row):
    return json.loads(row["j"])


def _refuses(x, file, below):
    with open(file, "a") as out:
        out.write(f"{x}\n")
    if x < below:
        raise ValueError(f"not {x}")
    return {"y": 2 * x}


async def refuses(row, file, below):
    return _refuses(row["x"], file, below)


def refuses_in_threads(row, file, below):
    return _refuses(row["x"], file, below)


def refuses_batches(batch, file, below):
    """All rows of a batch, if one of them is below."""
    if file:
        with open(file, "a") as out:
            out.writelines(f"{x}\n" for x in batch["x"])
    if (batch["x"] < below).any():
        raise ValueError(f"not {batch['x'][0]}")
    return {"y": batch["x"] * 2}
