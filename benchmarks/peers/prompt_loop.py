"""A prompt a row by hand: requests under a semaphore, sent again after 429 and 5xx, written when all are answered."""

from __future__ import annotations

import asyncio
import os
import random
import sys

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq

url, source, target = sys.argv[1:]


async def main() -> None:
    table, semaphore = pq.read_table(source), asyncio.Semaphore(64)
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def one(text: str) -> str:
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            for tries in range(10):
                async with semaphore, session.post(f"{url}/chat/completions", json=body) as reply:
                    if reply.status == 200:
                        return str((await reply.json())["choices"][0]["message"]["content"])
                await asyncio.sleep(random.uniform(0, min(30, 0.5 * 2**tries)))
            raise RuntimeError(f"no answer to {text!r}")

        answers = await asyncio.gather(*map(one, table["text"].to_pylist()))
    os.makedirs(target)
    pq.write_table(pa.table({"id": table["id"], "answer": answers}), os.path.join(target, "out.parquet"))


asyncio.run(main())
