"""A language model on this machine's CPU (SmolLM2-135M, Q4_1, through OpenVINO GenAI): prompts that ask for 8 to 128
tokens, as a whole run, beside the same scheduler driven by hand, transformers in batches as the rows come, and vLLM's
`run-batch` (its CPU build, bf16). Useful tokens a second, in turns; loading is not timed, starting of the run and
writing is. (Of `run-batch`, what a run of one token takes is left out.)

python benchmarks/generate.py [--rows 256] [--rounds 2] [--only "by hand" job] [--transformers-rows 32]
                              [--vllm .venv-vllm/bin/python --vllm-model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

import gristmill as gm
from gristmill.process import machine

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests"))
import kit

HERE = Path(__file__).parent
AT_ONCE = 256
BATCH = 16  # of transformers, which pads each to its longest prompt and computes until its longest answer


def rows(count: int) -> pa.Table:
    """Prompts of 5 to 60 words, and how many tokens each asks for."""
    draw = random.Random(4)
    texts = [" ".join(text.split()[: draw.randrange(5, 61)]) for text in kit.reviews()["text"].to_pylist()[:count]]
    return pa.table({"id": range(count), "text": texts, "most": [draw.randrange(8, 129) for _ in texts]})


def prompts(table: pa.Table) -> list[str]:
    return [f"Write about this review: {text}" for text in table["text"].to_pylist()]


class Lengths:
    """Makes all requests of this process as long as their rows ask for, whatever the model would rather say: a job has
    one `max_tokens`, and a model ends where it likes.
    """

    def __init__(self, table: pa.Table) -> None:
        self.most = dict(zip(prompts(table), table["most"].to_pylist(), strict=True))

    def __enter__(self) -> Lengths:
        from gristmill.models.generator import Generator

        self._kept = real = Generator._config

        def config(generator: Generator, body: dict, text: str, count: int) -> object:  # type: ignore[type-arg]
            found = real(generator, body, text, count)
            if body.get("messages"):
                found.max_new_tokens, found.ignore_eos = self.most[body["messages"][-1]["content"]], True
            return found

        Generator._config = config  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        from gristmill.models.generator import Generator

        Generator._config = self._kept  # type: ignore[method-assign]


def job(table: pa.Table) -> float:
    """A run in this process, so that all requests can be given their lengths."""
    from gristmill.models.generator import Generator

    loading = 0.0
    real = Generator._opened

    def opened(self: Generator, *given: object) -> object:
        nonlocal loading
        begun = time.perf_counter()
        try:
            return real(self, *given)  # type: ignore[arg-type]
        finally:
            loading += time.perf_counter() - begun

    Generator._opened = opened  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as folder, Lengths(table):
        begun = time.perf_counter()
        report = gm.prompt(
            table, os.path.join(folder, "out"), prompt="Write about this review: {{ text }}", model=str(kit.smollm()),
            keep=["id"], workers=0, concurrency=AT_ONCE, keep_usage=True, max_tokens=128,
        )  # fmt: skip
        took = time.perf_counter() - begun - loading
        made = report.read().to_table()["answer_completion_tokens"].to_pylist()
    Generator._opened = real  # type: ignore[method-assign]
    assert made == table["most"].to_pylist()
    return sum(made) / took


def by_hand(table: pa.Table) -> float:
    """All prompts handed to GenAI's `generate` at once."""
    import openvino_genai as genai

    config = genai.SchedulerConfig()
    config.enable_prefix_caching, config.cache_size, config.max_num_seqs = True, 2, AT_ONCE
    threads = {"INFERENCE_NUM_THREADS": machine.cores()}
    pipe = genai.ContinuousBatchingPipeline(str(kit.smollm()), config, "CPU", threads)
    most = table["most"].to_pylist()
    wanted = []
    for count in most:
        one = pipe.get_config()
        one.max_new_tokens, one.ignore_eos, one.apply_chat_template = count, True, True
        wanted.append(one)
    begun = time.perf_counter()
    found = pipe.generate(prompts(table), wanted)
    took = time.perf_counter() - begun
    assert len(found) == len(most)
    return sum(most) / took


def transformers(table: pa.Table) -> float:
    """`generate` of transformers, float32, greedy, in batches of 16 as the rows come, each until its longest answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(machine.cores())
    path = kit.smollm()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts, most = prompts(table), table["most"].to_pylist()
    begun = time.perf_counter()
    for start in range(0, len(texts), BATCH):
        talks = [[{"role": "user", "content": text}] for text in texts[start : start + BATCH]]
        said = [tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False) for talk in talks]
        given = tokenizer(said, return_tensors="pt", padding=True, add_special_tokens=False)
        longest = max(most[start : start + BATCH])
        with torch.inference_mode():
            model.generate(**given, max_new_tokens=longest, min_new_tokens=longest, do_sample=False)
    return sum(most) / (time.perf_counter() - begun)


def run_batch(python: str, model: str, table: pa.Table) -> float:
    """vLLM's command, by its module (the command looks for a package named vllm, which the CPU build is not), with the
    flags that a CPU of two cores needs.
    """
    lines = [
        json.dumps({
            "custom_id": str(n), "method": "POST", "url": "/v1/chat/completions",
            "body": {
                "model": model, "messages": [{"role": "user", "content": text}], "max_tokens": most, "ignore_eos": True,
            },
        })
        for n, (text, most) in enumerate(zip(prompts(table), table["most"].to_pylist(), strict=True))
    ]  # fmt: skip
    one = json.loads(lines[0])
    one["body"]["max_tokens"] = 1
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(machine.cores()),
           "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}  # fmt: skip
    env.pop("PYTHONPATH", None)

    def took(lines: list[str]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            given, made = os.path.join(folder, "in.jsonl"), os.path.join(folder, "out.jsonl")
            with open(given, "w") as out:
                out.write("\n".join(lines) + "\n")
            flags = ["--kv-cache-memory-bytes", str(1 << 30), "--enforce-eager"]
            begun = time.perf_counter()
            command = [python, "-m", "vllm.entrypoints.openai.run_batch", "-i", given, "-o", made]
            subprocess.run([*command, "--model", model, *flags], env=env, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - begun
            with open(made) as found:
                answers = [json.loads(line) for line in found]
            assert all(answer["response"]["status_code"] == 200 for answer in answers) and len(answers) == len(lines)
        return seconds

    return sum(table["most"].to_pylist()) / (took(lines) - took([json.dumps(one)]))


PARTS: dict[str, Callable[[pa.Table], float]] = {"by hand": by_hand, "job": job, "transformers": transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--transformers-rows", type=int, default=2 * BATCH, help="a sample, in whole batches")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=[*PARTS, "run-batch"])
    parser.add_argument("--vllm", default=str(HERE.parent / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--vllm-model", help="SmolLM2-135M as a folder for transformers")
    given = parser.parse_args()
    parts = dict(PARTS)
    if given.vllm_model:
        parts["run-batch"] = partial(run_batch, given.vllm, given.vllm_model)
    for _ in range(given.rounds):
        for name, part in parts.items():
            if not given.only or name in given.only:
                count = given.transformers_rows if part is transformers else given.rows
                print(f"{name}: {part(rows(count)):,.0f} useful tokens/s ({count} prompts)", flush=True)


if __name__ == "__main__":
    main()
