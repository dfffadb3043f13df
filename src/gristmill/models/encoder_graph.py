"""The ONNX graph of an encoder, written from its configuration and weights: what tracing the torch model gives, without
torch and in a fraction of a second.

For the families below, and only where every key of the configuration and every tensor of the weights is one whose
meaning is known here; anything else is not `known`, and is traced (export.py). Whoever uses a graph compares it with
the torch model first. Sources: transformers' modeling files (bert, roberta, camembert, xlm_roberta, distilbert, mpnet).
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gristmill.models.encoder import EncoderFiles
from gristmill.models.safetensors import read_header, read_safetensors
from gristmill.values import dataclass

OPSET = 17  # the oldest with LayerNormalization; ONNX Runtime since 1.12 runs it
DATA = ".data"  # what the file beside the graph is called after it, which holds large tensors as they are
LARGE = 1 << 16  # bytes: tensors from this size on are there, written without a copy, and mapped when they are read

# What a configuration may say without a change to the values of inference: names, training, generation, output.
_IDLE = frozenset((
    "_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "initializer_range",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "gradient_checkpointing", "use_cache",
    "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "id2label", "label2id", "problem_type",
    "num_labels", "tie_word_embeddings", "finetuning_task", "directionality", "output_past", "pooler_fc_size",
    "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "vocab_size",
    "attention_dropout", "dropout", "qa_dropout", "seq_classif_dropout", "tie_weights_", "n_ctx",
))  # fmt: skip
# What may be there with one value only, and the first of these if it is not.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", None), "is_decoder": (False,), "add_cross_attention": (False,),
    "is_encoder_decoder": (False,), "pruned_heads": ({}, None), "chunk_size_feed_forward": (0,),
    "sinusoidal_pos_embds": (False,), "output_hidden_states": (False,), "output_attentions": (False,),
    "relative_attention_num_buckets": (32,),  # mpnet's modeling code takes 32, whatever its configuration says
}  # fmt: skip
_ACTIVATIONS = ("gelu", "relu")
_BUCKETS, _FARTHEST = 32, 128  # of mpnet's relative positions


@dataclass(frozen=True)
class Family:
    """Names of an encoder's tensors, of its sizes in config.json, and how it counts positions.

    `layer`: the prefix of a layer's tensors; `parts`: names in it, of query, key, value, what follows attention, its
    norm, the two dense layers and the last norm. `head`: of a classifier, which takes the first token.
    """

    prefix: str
    layer: str
    parts: tuple[str, str, str, str, str, str, str, str]
    head: tuple[tuple[str, str], ...]
    positions: str = "first"  # "first": 0, 1, …; "padding": from the padding token's id on
    types: bool = True
    relative: bool = False
    ignored: tuple[str, ...] = ("pooler.",)
    sizes: Mapping[str, str] | None = None


_BERT_PARTS = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
)  # fmt: skip
_ROBERTA = Family(
    "roberta.", "encoder.layer.", _BERT_PARTS, (("classifier.dense", "tanh"), ("classifier.out_proj", "")), "padding"
)
FAMILIES: Mapping[str, Family] = {
    "bert": Family("bert.", "encoder.layer.", _BERT_PARTS, (("pooler.dense", "tanh"), ("classifier", ""))),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family(
        "distilbert.", "transformer.layer.",
        ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm", "ffn.lin1",
         "ffn.lin2", "output_layer_norm"),
        (("pre_classifier", "relu"), ("classifier", "")), types=False,
        sizes={"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
               "intermediate_size": "hidden_dim", "hidden_act": "activation"},
    ),
    "mpnet": Family(
        "mpnet.", "encoder.layer.",
        ("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o", "attention.LayerNorm",
         "intermediate.dense", "output.dense", "output.LayerNorm"),
        (("classifier.dense", "tanh"), ("classifier.out_proj", "")), "padding", types=False, relative=True,
    ),
}  # fmt: skip
# Heads for other tasks, which neither vectors nor labels rest on.
_OTHER_HEADS = ("cls.", "lm_head.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector.")


@dataclass(frozen=True)
class Shape:
    """What of a configuration the values rest on."""

    family: Family
    width: int
    layers: int
    heads: int
    positions: int
    activation: str
    epsilon: float
    padding: int
    labels: int


def known(files: EncoderFiles, task: str) -> Shape | None:
    """The shape of an encoder of which everything is known; None if anything is not. Reads no weights."""
    config = _config(files.folder)
    shape = None if config is None else shape_of(config)
    if shape is None or (files.folder / "adapter_config.json").exists():
        return None
    if not files.weights or any(p.suffix != ".safetensors" for p in files.weights):
        return None
    try:
        header = read_header(files.weights[0]) if len(files.weights) == 1 else _headers(files.weights)
    except (OSError, ValueError, KeyError):
        return None
    sizes = {_named(name, shape.family): tuple(entry["shape"]) for name, entry in header.items()}
    return shape if len(sizes) == len(header) and _complete(shape, task, sizes) else None


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """The shape that a configuration describes, None if any of its keys or values is unknown here."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    names = {"hidden_size": "hidden_size", "num_hidden_layers": "num_hidden_layers", "hidden_act": "hidden_act",
             "num_attention_heads": "num_attention_heads", "intermediate_size": "intermediate_size",
             **(family.sizes or {})}  # fmt: skip
    read = {*names.values(), "max_position_embeddings", "layer_norm_eps", "pad_token_id", "type_vocab_size"}
    for key, value in config.items():
        if key in _FIXED:
            if value not in _FIXED[key]:
                return None
        elif key not in _IDLE and key not in read:
            return None
    sizes = [config.get(names[k]) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads")]
    most, activation = config.get("max_position_embeddings"), config.get(names["hidden_act"])
    epsilon, padding = config.get("layer_norm_eps", 1e-12), config.get("pad_token_id")
    if family.positions == "first":
        padding = 0
    if not all(type(n) is int and n > 0 for n in (*sizes, most)) or activation not in _ACTIVATIONS:
        return None
    width, layers, heads = (int(n) for n in sizes if n is not None)
    if width % heads or type(padding) is not int or type(epsilon) is not float:
        return None
    if "layer_norm_eps" in config and family.sizes:  # distilbert has none of its own
        return None
    labels = config.get("id2label") or config.get("num_labels") or 2
    count = len(labels) if isinstance(labels, dict) else labels
    return Shape(family, width, layers, heads, int(most or 0), str(activation), epsilon, padding, int(count))


def _headers(paths: Sequence[Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in paths:
        entries = read_header(path)
        if found.keys() & entries.keys():
            raise ValueError(f"{path} has a tensor that another file has, too")
        found.update(entries)
    return found


def _named(name: str, family: Family) -> str:
    """The name of a tensor without the prefix of the encoder, and with today's names of a norm's two."""
    name = name.removeprefix(family.prefix)
    stem, _, last = name.rpartition(".")
    return f"{stem}.{ {'gamma': 'weight', 'beta': 'bias'}.get(last, last) }" if stem.endswith("LayerNorm") else name


def _complete(shape: Shape, task: str, sizes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the tensors are those of the encoder, of the sizes they must have, with none that is unknown."""
    wanted = _wanted(shape, task)
    if any(sizes.get(name) is None or not _fits(sizes[name], size) for name, size in wanted.items()):
        return False
    family = shape.family
    for name in sizes.keys() - wanted.keys():
        other = name.startswith((*family.ignored, *_OTHER_HEADS)) or name in ("embeddings.position_ids",)
        if not other and not (task != "classify" and name.startswith(tuple(part for part, _ in family.head))):
            return False
    return True


def _fits(size: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(size) == len(wanted) and all(w is None or s == w for s, w in zip(size, wanted, strict=True))


def _wanted(shape: Shape, task: str) -> dict[str, tuple[int | None, ...]]:
    """Names and sizes of all tensors that the graph is made of; None where any size will do."""
    f, n = shape.family, shape.width
    found: dict[str, tuple[int | None, ...]] = {
        "embeddings.word_embeddings.weight": (None, n), "embeddings.position_embeddings.weight": (shape.positions, n),
        "embeddings.LayerNorm.weight": (n,), "embeddings.LayerNorm.bias": (n,),
    }  # fmt: skip
    if f.types:
        found["embeddings.token_type_embeddings.weight"] = (None, n)
    if f.relative:
        found["encoder.relative_attention_bias.weight"] = (_BUCKETS, shape.heads)
    inner: tuple[tuple[int | None, ...], ...] = ((n, n),) * 4 + ((n,), (None, n), (n, None), (n,))
    for number in range(shape.layers):
        for part, size in zip(f.parts, inner, strict=True):
            found[f"{f.layer}{number}.{part}.weight"] = size
            found[f"{f.layer}{number}.{part}.bias"] = size[:1]
    if task == "classify":
        for part, last in zip((name for name, _ in f.head), (n, shape.labels), strict=True):
            found |= {f"{part}.weight": (last, n), f"{part}.bias": (last,)}
    return found


# ---------------------------------------------------------------- the graph


def write_graph(files: EncoderFiles, shape: Shape, task: str, path: Path) -> None:
    """Write the ONNX file of an encoder that is `known`: inputs input_ids and attention_mask, int64 [batch, sequence];
    output last_hidden_state [batch, sequence, width], or logits [batch, labels]. Large tensors are in a file beside it.
    """
    from onnx import TensorProto, helper

    weights: dict[str, np.ndarray] = {}
    for file in files.weights:
        weights |= {_named(name, shape.family): value for name, value in read_safetensors(file).items()}
    with path.with_name(path.name + DATA).open("wb") as data:
        g = _Graph(shape, weights, data)
        hidden = g.layers(g.embedded())
        output = g.head(hidden) if task == "classify" else g.named("Identity", [hidden], "last_hidden_state")
    axes: list[str | int | None] = ["batch", shape.labels] if task == "classify" else ["batch", "sequence", shape.width]
    given = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"])
        for name in ("input_ids", "attention_mask")
    ]
    graph = helper.make_graph(
        g.nodes, "encoder", given, [helper.make_tensor_value_info(output, TensorProto.FLOAT, axes)], g.tensors
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="gristmill")
    model.ir_version = 8  # of opset 17
    path.write_bytes(model.SerializeToString())


class _Graph:
    """Nodes and tensors of a graph in the making; methods take and give names of values."""

    def __init__(self, shape: Shape, weights: dict[str, np.ndarray], data: BinaryIO) -> None:
        self._data = data
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self._shape = shape
        self._weights = weights
        self._constants: dict[str, str] = {}
        self._count = 0

    def embedded(self) -> str:
        """Normalised sums of the tables' rows for each token."""
        s, words = self._shape, self._tensor("embeddings.word_embeddings.weight")
        table = self._weights["embeddings.position_embeddings.weight"]
        if s.family.types:  # all of type 0: added to every position beforehand
            table = table + self._weights["embeddings.token_type_embeddings.weight"][0]
        found = self.op("Gather", [words, "input_ids"])
        positions = self.constant("positions", table)
        if s.family.positions == "first":
            end = self._length()
            zero = self.constant("zero", np.array([0], np.int64))
            placed = self.op("Slice", [positions, zero, end, zero])
        else:
            placed = self.op("Gather", [positions, self._after_padding()])
        return self.norm(self.op("Add", [found, placed]), "embeddings.LayerNorm")

    def _length(self) -> str:
        one, two = (self.constant(f"of{n}", np.array([n], np.int64)) for n in (1, 2))
        return self.op("Slice", [self.op("Shape", ["input_ids"]), one, two])

    def _after_padding(self) -> str:
        """padding + 1, padding + 2, … for tokens that are not the padding token, which has padding."""
        padding = self.constant("padding", np.array(self._shape.padding, np.int64))
        real = self.op("Cast", [self.op("Not", [self.op("Equal", ["input_ids", padding])])], to=7)
        count = self.op("CumSum", [real, self.constant("axis", np.array(1, np.int64))])
        return self.op("Add", [self.op("Mul", [count, real]), padding])

    def layers(self, hidden: str) -> str:
        """Attention and the two dense layers, as often as there are layers."""
        bias = self._masked()
        for number in range(self._shape.layers):
            hidden = self._layer(hidden, bias, f"{self._shape.family.layer}{number}.")
        return hidden

    def _masked(self) -> str:
        """What is added to the scores: the lowest float where a token is padding, and what mpnet has for distances."""
        mask = self.op("Cast", ["attention_mask"], to=1)
        one, low = self.constant("one", np.float32(1)), self.constant("low", np.float32(np.finfo(np.float32).min))
        axes = self.constant("axes", np.array([1, 2], np.int64))
        bias = self.op("Unsqueeze", [self.op("Mul", [self.op("Sub", [one, mask]), low]), axes])
        if not self._shape.family.relative:
            return bias
        reach = self._shape.positions
        table = self._weights["encoder.relative_attention_bias.weight"][buckets(np.arange(1 - reach, reach))]
        scalar = self.op("Squeeze", [self._length()])
        zero, step = self.constant("start", np.array(0, np.int64)), self.constant("step", np.array(1, np.int64))
        place = self.op("Range", [zero, scalar, step])
        row, column = (self.constant(n, np.array([a], np.int64)) for n, a in (("row", 0), ("column", 1)))
        apart = self.op("Sub", [self.op("Unsqueeze", [place, row]), self.op("Unsqueeze", [place, column])])
        index = self.op("Add", [apart, self.constant("reach", np.array(reach - 1, np.int64))])
        found = self.op("Gather", [self.constant("distances", np.ascontiguousarray(table.T)), index], axis=1)
        return self.op("Add", [bias, found])

    def _layer(self, hidden: str, bias: str, prefix: str) -> str:
        query, key, value, out, first, inner, outer, last = (prefix + part for part in self._shape.family.parts)
        attended = self.dense(self._attended(hidden, bias, query, key, value), out)
        hidden = self.norm(self.op("Add", [attended, hidden]), first)
        wide = self.activated(self.dense(hidden, inner), self._shape.activation)
        return self.norm(self.op("Add", [self.dense(wide, outer), hidden]), last)

    def _attended(self, hidden: str, bias: str, query: str, key: str, value: str) -> str:
        s = self._shape
        scale = np.float32(1 / math.sqrt(s.width // s.heads))
        split = self.constant("split", np.array([0, 0, s.heads, s.width // s.heads], np.int64))
        whole = self.constant("whole", np.array([0, 0, s.width], np.int64))
        q, k, v = (
            self.op("Reshape", [self.dense(hidden, name, scale if name == query else None), split])
            for name in (query, key, value)
        )
        q, k, v = (self.op("Transpose", [x], perm=[0, 2, 1, 3]) for x in (q, k, v))
        scores = self.op("MatMul", [q, self.op("Transpose", [k], perm=[0, 1, 3, 2])])
        shares = self.op("Softmax", [self.op("Add", [scores, bias])], axis=-1)
        mixed = self.op("Transpose", [self.op("MatMul", [shares, v])], perm=[0, 2, 1, 3])
        return self.op("Reshape", [mixed, whole])

    def head(self, hidden: str) -> str:
        """The logits, by the first token."""
        found = self.op("Gather", [hidden, self.constant("start", np.array(0, np.int64))], axis=1)
        (first, activation), (last, _) = self._shape.family.head
        found = self.op({"tanh": "Tanh", "relu": "Relu"}[activation], [self.dense(found, first)])
        return self.named("Identity", [self.dense(found, last)], "logits")

    def dense(self, given: str, name: str, scale: np.float32 | None = None) -> str:
        """A linear layer, its weights transposed, and multiplied by `scale`."""
        weight, bias = self._weights[f"{name}.weight"].T, self._weights[f"{name}.bias"]
        if scale is not None:
            weight, bias = weight * scale, bias * scale
        product = self.op("MatMul", [given, self.constant(f"{name}.weight", np.ascontiguousarray(weight))])
        return self.op("Add", [product, self.constant(f"{name}.bias", bias)])

    def norm(self, given: str, name: str) -> str:
        """Layer normalisation over the last axis."""
        inputs = [given, self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias")]
        return self.op("LayerNormalization", inputs, axis=-1, epsilon=self._shape.epsilon)

    def activated(self, given: str, activation: str) -> str:
        """relu, or gelu by the error function, in the order of operations that ONNX Runtime fuses."""
        if activation == "relu":
            return self.op("Relu", [given])
        root, one, half = (
            self.constant(n, np.float32(x)) for n, x in (("root", math.sqrt(2)), ("one", 1), ("half", 0.5))
        )
        grown = self.op("Add", [self.op("Erf", [self.op("Div", [given, root])]), one])
        return self.op("Mul", [self.op("Mul", [given, grown]), half])

    def op(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        """A node with one output."""
        self._count += 1
        return self.named(kind, inputs, f"v{self._count}", **attributes)

    def named(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """The same, its output named."""
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"n{len(self.nodes)}", **attributes))
        return output

    def constant(self, name: str, value: np.ndarray | np.generic) -> str:
        """A tensor of the graph, once."""
        if name not in self._constants:
            from onnx import numpy_helper

            self._constants[name] = f"c.{name}"
            value = np.asarray(value)
            large = value.nbytes >= LARGE
            self.tensors.append(self._beside(value, name) if large else numpy_helper.from_array(value, f"c.{name}"))
        return self._constants[name]

    def _beside(self, value: np.ndarray, name: str) -> Any:
        """A float32 tensor in the file beside the graph, from the start of a page on."""
        from onnx import TensorProto

        self._data.write(bytes(-self._data.tell() % mmap.ALLOCATIONGRANULARITY))
        about = {"location": Path(self._data.name).name, "offset": self._data.tell(), "length": value.nbytes}
        self._data.write(np.ascontiguousarray(value, dtype=np.float32).data)
        tensor = TensorProto(
            name=f"c.{name}", data_type=TensorProto.FLOAT, dims=value.shape, data_location=TensorProto.EXTERNAL
        )
        for key, told in about.items():
            tensor.external_data.add(key=key, value=str(told))
        return tensor

    def _tensor(self, name: str) -> str:
        return self.constant(name, self._weights[name])


def buckets(distance: np.ndarray) -> np.ndarray:
    """The bucket of each distance (key's place less query's): int64. As MPNetEncoder.relative_position_bucket."""
    half = _BUCKETS // 2
    exact = half // 2
    n = np.abs(distance)
    with np.errstate(divide="ignore"):
        far = np.log(n.astype(np.float32) / np.float32(exact)) / np.float32(math.log(_FARTHEST / exact))
    large = exact + np.maximum(far * np.float32(half - exact), 0).astype(np.int64)
    found: np.ndarray = np.where(n < exact, n, np.minimum(large, half - 1)) + (distance > 0) * half
    return found
