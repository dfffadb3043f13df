"""What runs a transformer fastest on this machine's cores: a process a core with one thread each, the same batches.

    python benchmarks/runtimes.py [--rounds 3] [--texts 400] [--without torch.compile]

MiniLM under ONNX Runtime (on the traced graph, and on the one written from the weights), torch, torch.compile and
OpenVINO, in float32 and bfloat16: tokens a second of all processes together, padding left out, with batches of about
1,024 padded tokens; and tokens a second of processor time, which other work on the machine changes less. The time until
the first batches of each width are through is told apart: there torch.compile compiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
TOKENS = 1024


def batches(texts: list[str], tokenizer: Path) -> dict[str, np.ndarray]:
    """Token ids and masks by batch, longest first, each [rows, tokens] int64, as an archive's arrays."""
    import tokenizers

    from gristmill.worker.batches import Budget, cut

    encoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    encoder.no_padding()
    encoder.enable_truncation(256)
    ids = [e.ids for e in encoder.encode_batch(texts)]
    lengths = np.array([len(i) for i in ids])
    out = {}
    for number, rows in enumerate(cut(lengths, np.arange(len(ids)), Budget(TOKENS, 4096))):
        width = int(lengths[rows].max())
        for name, value in (("ids", lambda row: ids[row]), ("mask", lambda row: [1] * len(ids[row]))):
            out[f"{name}{number}"] = np.array([value(r) + [0] * (width - len(ids[r])) for r in rows], dtype=np.int64)
    return out


# ---------------------------------------------------------------- in a process of its own


def onnx(folder: Path, graph: str) -> Callable[[np.ndarray, np.ndarray], Any]:
    """ONNX Runtime, with the options that workers give it."""
    from gristmill.models.contract import Place
    from gristmill.models.onnx import open_session

    session = open_session(Path(graph), Place(backend="onnx"), folder.name)
    names = [i.name for i in session.get_inputs()]
    return lambda ids, mask: session.run(None, named(names, ids, mask))


def written(folder: Path, graph: str) -> Callable[[np.ndarray, np.ndarray], Any]:
    """ONNX Runtime on the graph that is written without tracing."""
    from gristmill.models import encoder, encoder_graph

    files = encoder.find_encoder(folder, folder, None, "onnx", "float32", "cpu", folder.name)
    shape = encoder_graph.known(files, "embed")
    assert shape is not None
    with tempfile.TemporaryDirectory() as scratch:
        encoder_graph.write_graph(files, shape, "embed", Path(scratch, "model.onnx"))
        return onnx(folder, f"{scratch}/model.onnx")


def openvino(folder: Path, graph: str, precision: str = "f32") -> Callable[[np.ndarray, np.ndarray], Any]:
    """OpenVINO on the traced graph, computing in `precision`."""
    import openvino as ov

    core = ov.Core()
    settings = {
        "INFERENCE_NUM_THREADS": 1,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": precision,
        "ENABLE_CPU_PINNING": False,  # else all processes are on core 0, as in models/openvino.py
    }
    model = core.compile_model(core.read_model(graph), "CPU", settings)
    request, names = model.create_infer_request(), [i.any_name for i in model.inputs]
    return lambda ids, mask: request.infer(named(names, ids, mask))


def eager(folder: Path, graph: str, dtype: str = "float32") -> Callable[[np.ndarray, np.ndarray], Any]:
    """torch with scaled dot product attention."""
    import torch
    import transformers

    torch.set_num_threads(1)
    return called(transformers.AutoModel.from_pretrained(str(folder), dtype=getattr(torch, dtype)).eval())


def compiled(folder: Path, graph: str) -> Callable[[np.ndarray, np.ndarray], Any]:
    """torch.compile with shapes that may change."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    return called(torch.compile(model, dynamic=True))


def called(model: Any) -> Callable[[np.ndarray, np.ndarray], Any]:
    """A torch module on numpy arrays."""
    import torch

    def run(ids: np.ndarray, mask: np.ndarray) -> Any:
        with torch.inference_mode():
            return model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))[0].float().numpy()

    return run


def named(names: list[str], ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs that a graph has."""
    have = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {name: have[name] for name in names}


RUNTIMES = {
    "onnxruntime": onnx,
    "the same, written": written,
    "torch": eager,
    "torch.compile": compiled,
    "openvino": openvino,
    "torch bfloat16": partial(eager, dtype="bfloat16"),
    "openvino bfloat16": partial(openvino, precision="bf16"),
}


def child(runtime: str, archive: str, folder: str, graph: str) -> None:
    """Print seconds of warming up, and useful tokens a second, of the clock and of processor time, after it."""
    with np.load(archive) as file:
        held = [(file[f"ids{n}"], file[f"mask{n}"]) for n in range(len(file.files) // 2)]
    run = RUNTIMES[runtime](Path(folder), graph)
    begun = time.perf_counter()
    for ids, mask in held[::25]:
        run(ids, mask)
    warm, begun, used = time.perf_counter() - begun, time.perf_counter(), time.process_time()
    for ids, mask in held:
        run(ids, mask)
    tokens = sum(int(mask.sum()) for _, mask in held)
    print(warm, tokens / (time.perf_counter() - begun), tokens / (time.process_time() - used))


# ---------------------------------------------------------------- all of them in turns


def once(runtime: str, arguments: list[str]) -> tuple[float, float, float]:
    """Seconds until warm (the slowest process), tokens a second of all processes, one a core, together, and of the
    processor time of one.
    """
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, __file__, "--child", runtime, *arguments]
    started = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **one}
        )
        for _ in range(len(os.sched_getaffinity(0)))
    ]
    told = [process.communicate()[0].split() for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{runtime} failed: {' '.join(command)}")
    warm, rate, used = zip(*((float(x) for x in t) for t in told), strict=True)
    return max(warm), sum(rate), statistics.mean(used)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--without", nargs="*", default=[], help="runtimes to leave out")
    given = parser.parse_args()
    sys.path.insert(0, str(HERE.parent / "tests"))
    import kit

    folder, graph = kit.minilm(), next(Path(kit.minilm_onnx()).rglob("*.onnx"))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in RUNTIMES if name not in given.without}
    with tempfile.TemporaryDirectory(prefix="runtimes-") as scratch:
        archive = f"{scratch}/batches.npz"
        np.savez(archive, **batches(kit.docstrings(given.texts), folder / "tokenizer.json"))
        for _ in range(given.rounds):
            for name, runs in found.items():
                runs.append(once(name, [archive, str(folder), str(graph)]))
    base = found["onnxruntime"]
    for name, runs in found.items():
        warm, rate, used = (statistics.median(column) for column in zip(*runs, strict=True))
        times, part = (statistics.median(a[n] / b[n] for a, b in zip(runs, base, strict=True)) for n in (1, 2))
        print(
            f"{name:18} {rate:8,.0f} tokens/s, {times:.2f} of onnxruntime   {used:8,.0f} a second of processor time, "
            f"{part:.2f}   warm after {warm:.1f} s"
        )


if __name__ == "__main__":
    main()
