"""Batches of features: whatever their rank and dtype, a caller's outputs are those of its own call alone."""

from __future__ import annotations

import asyncio
import functools
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from callers import at_once
from gristmill import aio, inference
from gristmill.dynamic.padding import pad
from gristmill.errors import WrongOutput

pytestmark = pytest.mark.timeout(60)

Model = Callable[[dict[str, Any]], Any]


def masked_sum(features: Mapping[str, Any]) -> Any:
    """A model of ids [rows, places] that honours its mask, as a transformer does."""
    return (features["input_ids"] * features["attention_mask"]).sum(1)


def sync(model: Model, **told: Any) -> Callable[..., Any]:
    return inference.dynamically(**told)(model)


def on_a_loop(model: Model, **told: Any) -> Callable[..., Any]:
    async def later(features: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return model(features)

    batched = aio.inference.dynamically(**told)(later)
    return lambda *args, **more: asyncio.run(batched(*args, **more))


drivers = pytest.mark.parametrize("driver", [sync, on_a_loop])

DTYPES = [
    "int8",
    "uint16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "bool",
    "<U3",
    "S2",
    "M8[s]",
]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), rank=st.integers(1, 4), side=st.sampled_from(["left", "right"]))
def test_padding_keeps_every_value_in_its_place(data: st.DataObject, dtype: str, rank: int, side: Any) -> None:
    """Any rank and dtype: each row can be read back, the rest is the pad value, and nothing is converted."""
    elements = {"elements": st.text("ab", max_size=3)} if dtype == "<U3" else {}
    rows = [
        data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=rank, max_dims=rank, max_side=3), **elements))
        for _ in range(3)
    ]
    batch = pad(rows, 0, side)
    assert batch.dtype == dtype
    filler = np.zeros((), dtype)
    for row, padded in zip(rows, batch, strict=True):
        spans = zip(row.shape, padded.shape, strict=True)
        own = tuple(slice(0, n) if side == "right" else slice(m - n, m) for n, m in spans)
        np.testing.assert_array_equal(padded[own], row)
        rest = np.ones(padded.shape, bool)
        rest[own] = False
        assert (padded[rest] == filler).all()


def test_padding_of_tensors() -> None:
    """dtype and device stay those of the tensors, gradients flow, and the values are in their places."""
    torch = pytest.importorskip("torch")
    for dtype in (torch.int32, torch.float16, torch.bfloat16, torch.bool, torch.complex64):
        rows = [torch.ones(2, 3, dtype=dtype), torch.ones(4, 1, dtype=dtype)]
        left = pad(rows, 0, "left")
        assert (left.dtype, tuple(left.shape)) == (dtype, (2, 4, 3))
        assert left[0, 2:, :].all() and not left[0, :2].any() and left[1, :, 2:].all() and not left[1, :, :2].any()
    row = torch.ones(1, requires_grad=True)
    pad([row, torch.ones(2)], 0, "right").sum().backward()
    assert row.grad is not None


@pytest.mark.parametrize(("token", "dtype"), [(300, "int8"), (0.5, "int64"), (float("nan"), "int32"), ("x", "float32")])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_pad_token_that_the_dtype_cannot_hold(token: Any, dtype: str, library: str) -> None:
    """Is an error that names the feature; nothing is truncated."""
    rows = [np.ones(1, dtype), np.ones(2, dtype)]
    if library == "torch":
        torch = pytest.importorskip("torch")
        rows = [torch.tensor(row) for row in rows]
    with pytest.raises(ValueError, match="pad token of 'input_ids'"):
        pad(rows, token, "right", "input_ids")


@drivers
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_masked_model_gives_each_caller_its_own_results(driver: Any, side: str, library: str) -> None:
    """Rows of many lengths, arrays and lists, some with masks of their own: equal to calling the model alone."""
    made: Callable[[Any], Any] = np.asarray
    if library == "torch":
        made = pytest.importorskip("torch").tensor
    seen: list[dict[str, Any]] = []

    def model(features: dict[str, Any]) -> Any:
        seen.append(features)
        return masked_sum(features)

    function = driver(model, timeout_ms=60, pad_tokens={"input_ids": 99}, padding_side=side, attention_mask=True)
    chance = np.random.default_rng(0)
    rows = [made(chance.integers(1, 9, size=length).tolist()) for length in (3, 1, 7, 7, 2)]
    together = function({"input_ids": rows})
    assert type(together) is type(rows[0])
    assert together.tolist() == [int(row.sum()) for row in rows]
    (batch,) = seen
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (5, 7)
    assert str(batch["attention_mask"].dtype).endswith("int64")
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 99).all()
    ends = batch["attention_mask"][:, -1 if side == "left" else 0]
    assert ends.tolist() == [1] * 5
    if driver is sync:
        calls = [functools.partial(function, {"input_ids": row[None]}) for row in rows]
        assert [out.tolist() for out in at_once(calls)] == [[int(row.sum())] for row in rows]


def test_callers_masks_are_kept() -> None:
    """A mask that comes with the features is padded like them, not made anew."""
    function = inference.dynamically(attention_mask=True, timeout_ms=50)(masked_sum)
    calls = [
        lambda: function(input_ids=np.array([[1, 2, 3]]), attention_mask=np.array([[0, 1, 1]])),
        lambda: function(input_ids=np.array([[5]]), attention_mask=np.array([[1]])),
        lambda: function(input_ids=np.array([[7, 7]])),
    ]
    assert [out.tolist() for out in at_once(calls)] == [[5], [5], [14]]


@drivers
def test_features_of_any_rank_and_dtype_at_once(driver: Any) -> None:
    """Scalars, vectors, images and texts in one call, each with its dtype."""
    seen: list[dict[str, Any]] = []

    def model(features: dict[str, Any]) -> np.ndarray:
        seen.append(features)
        return features["weight"] * features["image"].sum((1, 2))

    images = [np.full((2, 3), 1.5, np.float32), np.full((4, 1), 2.0, np.float32)]
    out = driver(model)(image=images, weight=np.array([2.0, 3.0]), name=np.array(["a", "long"]), flags=[[True], []])
    assert out.tolist() == [18.0, 24.0]
    (batch,) = seen
    shapes = {name: (value.shape, value.dtype.str) for name, value in batch.items()}
    assert shapes == {
        "image": ((2, 4, 3), "<f4"),
        "weight": ((2,), "<f8"),
        "name": ((2,), "<U4"),
        "flags": ((2, 1), "|b1"),
    }


def test_lists_of_numbers_have_one_dtype() -> None:
    """Empty lists and whole numbers among fractions, as a tokenizer or JSON gives them."""
    seen: list[Any] = []
    function = inference.dynamically(timeout_ms=20)(lambda features: seen.append(features["x"]) or features["x"].sum(1))
    assert function(x=[[1, 2], [], [3]]).tolist() == [3, 0, 3]
    assert function(x=[[1, 2], [], [0.5]]).tolist() == [3, 0, 0.5]
    assert [(batch.dtype.kind, batch.shape) for batch in seen] == [("i", (3, 2)), ("f", (3, 2))]


def test_floats_stay_floats() -> None:
    """What the original library truncated to int64."""
    function = inference.dynamically(timeout_ms=20)(lambda features: features["x"].sum(1))
    assert function({"x": [np.array([0.5, 0.25], np.float32), np.array([0.125], np.float32)]}).tolist() == [0.75, 0.125]


def test_rows_that_cannot_share_an_array_go_apart() -> None:
    """Other names, dtypes, ranks or libraries: two calls of the function, and nobody is disturbed."""
    torch = pytest.importorskip("torch")
    seen: list[Any] = []

    def model(features: dict[str, Any]) -> Any:
        seen.append(features["x"])
        return features["x"] * 2

    function = inference.dynamically(timeout_ms=100, batch_size=5)(model)
    xs = [
        np.ones((1, 2), "f4"),
        np.ones((1, 2), "f8"),
        np.ones((1, 2, 1), "f4"),
        torch.ones(1, 2),
        np.ones((1, 2), "f4"),
    ]
    outs = at_once([functools.partial(function, {"x": x}) for x in xs])
    for x, out in zip(xs, outs, strict=True):
        assert (type(out), out.dtype, out.shape) == (type(x), x.dtype, x.shape)
        assert (out == 2).all()
    assert sorted(len(x) for x in seen) == [1, 1, 1, 2]


@drivers
def test_outputs_of_every_kind(driver: Any) -> None:
    """An array, a list, tuple or dict of them, nested, or plain values: the same kind, with the caller's rows."""

    def answer(kind: str, x: np.ndarray) -> Any:
        kinds: dict[str, Any] = {
            "array": x * 2,
            "vector": x[:, 0],
            "list": [x, x[:, 0]],
            "tuple": (x, x + 1),
            "dict": {"logits": x, "loss": None, "past": ((x, x), (x, x))},
            "labels": ["even" if row[0] % 2 == 0 else "odd" for row in x],
            "spans": [[int(row[0])] * int(row[0]) for row in x],
            "generator": (row for row in x),
        }
        return kinds[kind]

    for kind in ("array", "vector", "list", "tuple", "dict", "labels", "spans", "generator"):
        function = driver(lambda features, kind=kind: answer(kind, features["x"]), batch_size=2, timeout_ms=1)
        x = np.array([[3, 1], [2, 5], [4, 9]])
        _same(function({"x": x}), x if kind == "generator" else answer(kind, x))


def _same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            _same(left, right)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


@drivers
@pytest.mark.parametrize("side", ["left", "right"])
def test_per_token_outputs_are_cut_back(driver: Any, side: str) -> None:
    """To each row's own length: lists for lists, an array for an array, others as they are."""

    def model(features: dict[str, Any]) -> dict[str, Any]:
        ids = features["input_ids"]
        return {"hidden": np.stack([ids, -ids], axis=2), "pooled": ids.max(1)}

    rows = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])]
    function = driver(model, padding_side=side, unpad_outputs=["hidden"], timeout_ms=20)
    out = function(input_ids=rows)
    assert [hidden[:, 0].tolist() for hidden in out["hidden"]] == [row.tolist() for row in rows]
    assert out["pooled"].tolist() == [3, 4, 6]
    if driver is sync:
        short, long = at_once(
            [lambda: function(input_ids=np.array([[7, 8]])), lambda: function(input_ids=np.arange(6)[None])]
        )
        assert (short["hidden"].shape, long["hidden"].shape) == ((1, 2, 2), (1, 6, 2))
    whole = driver(lambda features: features["input_ids"] * 2, unpad_outputs=True, batch_size=2, timeout_ms=1)
    assert [row.tolist() for row in whole(input_ids=rows)] == [[2, 4, 6], [8], [10, 12]]


def test_the_length_of_a_row_is_that_of_the_feature_named() -> None:
    """Images beside texts: the mask and the cut follow the texts."""
    function = inference.dynamically(
        sequence_feature="ids", attention_mask="mask", unpad_outputs="tokens", spread_kwargs=True, timeout_ms=20
    )(lambda image, ids, mask: {"tokens": ids * mask, "bright": image.sum((1, 2))})
    out = function(image=np.ones((2, 5, 5)), ids=[np.array([1, 1, 1]), np.array([2])])
    assert [tokens.tolist() for tokens in out["tokens"]] == [[1, 1, 1], [2]]
    assert out["bright"].tolist() == [25, 25]
    with pytest.raises(ValueError, match="sequence_feature is 'ids': this call has image"):
        function(image=np.ones((2, 5, 5)))


@drivers
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: x[:1], r"has shape \(1, 2\): its first axis must be the 3 rows"),
        (lambda x: x.sum(), "single number for 3 rows"),
        (lambda x: None, "NoneType"),
        (lambda x: {"a": x, "b": x[:2]}, "output 'b' has shape"),
        (list, "output 0 has shape"),
        (lambda x: {}, "no output"),
        (lambda x: ["only one"], "1 or more rows for 3"),
        (lambda x: 3, "returned 3"),
    ],
)
def test_outputs_that_are_not_one_row_an_item(driver: Any, answer: Any, said: str) -> None:
    """Are errors that name the output and its shape."""
    with pytest.raises(WrongOutput, match=said):
        driver(lambda features: answer(features["x"]))({"x": np.ones((3, 2))})


def test_outputs_that_are_not_per_token() -> None:
    """unpad_outputs=True on an output without such an axis says so; unequal widths without it name the option."""
    rows = [np.ones(3), np.ones(1)]
    with pytest.raises(WrongOutput, match="Name the per-token outputs in unpad_outputs"):
        inference.dynamically(unpad_outputs=True)(lambda features: features["x"].sum(1))({"x": rows})
    with pytest.raises(ValueError, match="unpad_outputs=True"):
        inference.dynamically(batch_size=1)(lambda features: features["x"])({"x": rows})


@drivers
@pytest.mark.parametrize(
    ("features", "error"),
    [
        ({"a": np.ones((2, 1)), "b": np.ones((3, 1))}, ValueError),
        ({"a": np.float32(1)}, ValueError),
        ({}, TypeError),
        ([1, 2], TypeError),
        (np.ones(3), TypeError),
    ],
)
def test_features_that_are_none(driver: Any, features: Any, error: type[Exception]) -> None:
    """Unequally many rows, scalars, nothing, no dict: an error at once, for this caller only."""
    with pytest.raises(error, match=r"feature|rows"):
        driver(lambda features: features["a"])(features)


def test_dicts_or_keywords() -> None:
    """Any mapping, as a tokenizer gives; keywords; options beside either; not both ways at once."""
    function = inference.dynamically(timeout_ms=0)(lambda features: features["x"] + 1)
    for out in (
        function({"x": np.array([[1]])}),
        function(UserDict(x=[[1]])),
        function(x=np.array([[1]])),
        function(x=[[1]], timeout=5, priority=1),
        function({"x": [[1]]}, timeout=5),
        asyncio.run(function.acall(x=[[1]], timeout=None)),
    ):
        assert out.tolist() == [[2]]
    with pytest.raises(TypeError, match="as a dict or by keyword, not both: y"):
        function({"x": [[1]]}, y=[[1]])
    double = inference.dynamically(spread_kwargs=True)(lambda timeout: timeout * 2)
    assert double(timeout=np.array([[4]])).tolist() == [[8]]


@drivers
def test_no_rows(driver: Any) -> None:
    """The function sees the empty features as they are, by themselves; what it returns is the result."""
    function = driver(lambda features: features["x"].sum(1) + features["attention_mask"].sum(1), attention_mask=True)
    out = function({"x": np.ones((0, 4), np.float32)})
    assert (out.shape, out.dtype) == ((0,), np.float64)


def test_methods() -> None:
    """On instances and classes, with both calling styles."""

    class Model:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        @inference.dynamically
        def scale(self, features: dict[str, np.ndarray]) -> np.ndarray:
            return features["x"] * self.factor

        @aio.inference.dynamically(spread_kwargs=True)
        async def later(self, x: np.ndarray) -> np.ndarray:
            return x * self.factor

    one, ten = Model(1), Model(10)
    x = np.array([[1, 2]])
    assert ten.scale({"x": x}).tolist() == [[10, 20]]
    assert one.scale(x=x).tolist() == [[1, 2]]
    assert Model.scale(ten, x=x).tolist() == Model.scale(ten, {"x": x}).tolist() == [[10, 20]]
    assert asyncio.run(ten.later(x=x)).tolist() == [[10, 20]]
    assert asyncio.run(ten.scale.acall(x=x)).tolist() == [[10, 20]]


def test_a_budget_of_padded_tokens() -> None:
    """The rows of one call go in order of length, and come back in their own."""
    seen: list[tuple[int, ...]] = []

    def model(features: dict[str, np.ndarray]) -> np.ndarray:
        seen.append(features["x"].shape)
        return features["x"].sum(1)

    function = inference.dynamically(max_batch_cost=8, timeout_ms=1)(model)
    lengths = [4, 1, 9, 2, 1, 4]
    assert function(x=[np.ones(length) for length in lengths]).tolist() == lengths
    assert seen == [(3, 2), (2, 4), (1, 9)]


def test_a_poisonous_row_fails_alone() -> None:
    """retry_alone, also where it is the collation that fails."""

    def model(features: dict[str, np.ndarray]) -> np.ndarray:
        if (features["x"] < 0).any():
            raise OSError("negative")
        return features["x"].sum(1)

    function = inference.dynamically(retry_alone=True, timeout_ms=100, batch_size=3)(model)
    outs = at_once([functools.partial(function, x=np.array([[value]])) for value in (1, -1, 2)])
    assert (outs[0].tolist(), type(outs[1]), outs[2].tolist()) == ([1], OSError, [2])
    bad = inference.dynamically(pad_tokens={"x": 0.5}, retry_alone=True, timeout_ms=100)(model)
    assert bad(x=[np.array([1]), np.array([1, 1])]).tolist() == [1, 2]


def test_options() -> None:
    """pad_token and pad_tokens are one option; sides and tokens are checked at decoration."""
    for told in ({"pad_token": {"x": 7}}, {"pad_tokens": {"x": 7}}):
        function = inference.dynamically(timeout_ms=1, **told)(lambda features: features["x"].sum(1))
        assert function(x=[np.array([1]), np.array([1, 1])]).tolist() == [8, 2]
    with pytest.raises(TypeError, match="two names of one option"):
        inference.dynamically(pad_token={}, pad_tokens={})(lambda features: features)
    with pytest.raises(TypeError, match="dict from feature name"):
        inference.dynamically(pad_token=0)(lambda features: features)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="padding_side is 'top'"):
        inference.dynamically(padding_side="top")(lambda features: features)  # type: ignore[call-overload]

    async def later(features: Any) -> Any:
        return features

    with pytest.raises(TypeError, match=r"gristmill\.aio\.inference\.dynamically"):
        inference.dynamically(later)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    batch_size=st.integers(1, 5),
    side=st.sampled_from(["left", "right"]),
)
def test_results_equal_those_of_the_unbatched_call(lengths: list[int], batch_size: int, side: Any) -> None:
    """However the rows of a call fall into batches."""
    chance = np.random.default_rng(len(lengths))
    rows = [chance.standard_normal((length, 2)).round(2) for length in lengths]

    def model(features: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"tokens": features["x"] * 3, "pooled": (features["x"] * features["mask"][..., None]).sum(1)}

    function = inference.dynamically(
        batch_size=batch_size, timeout_ms=0, padding_side=side, attention_mask="mask", unpad_outputs=["tokens"]
    )(model)
    out = function(x=rows)
    function.close()
    for row, tokens, pooled in zip(rows, out["tokens"], out["pooled"], strict=True):
        alone = model({"x": row[None], "mask": np.ones((1, len(row)), np.int64)})
        np.testing.assert_array_equal(tokens, alone["tokens"][0])
        np.testing.assert_allclose(pooled, alone["pooled"][0], rtol=0, atol=1e-12)
