"""Secrets among arguments, and arguments without any, which are given as they are."""

from __future__ import annotations

import collections
import types
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.job.secret import Secret, reveal


class AnyCase(dict[str, Any]):
    """A mapping that does not mind case."""

    def get(self, key: str, default: Any = None) -> Any:
        """By the key in lower case."""
        return super().get(key.lower(), default)


class Pair(NamedTuple):
    """A record."""

    name: str
    token: str


class Tagged(list[Any]):
    """A list with an attribute."""

    tag = ""


class Scorer:
    """Looks rows up in a mapping, in its own way."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        found = [
            self.weights.get(key, 0) if isinstance(self.weights, AnyCase) else self.weights[key] for key in batch["k"]
        ]
        return {"y": found}


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        (AnyCase(us=1, de=2), [1, 2]),
        (collections.defaultdict(lambda: 7, US=1), [1, 7]),
        (collections.ChainMap({"US": 3}, {"DE": 4}), [3, 4]),
        (collections.Counter(US=5), [5, 0]),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_model_is_given_the_argument_itself(weights: Any, found: list[int], workers: int) -> None:
    """A mapping that looks up in its own way does so in a worker, too."""
    rows = pa.table({"k": ["US", "DE"]})
    assert gm.apply(rows, fn=gm.model(Scorer, weights=weights), workers=workers)["y"].to_pylist() == found


def test_secrets_are_revealed_in_what_can_hold_them() -> None:
    """In values of all these classes, which stay what they are and are not changed."""
    secret, hidden = Secret("${env:T}", "hush"), "hush"
    lists = Tagged([secret])
    lists.tag = "x"
    ordered, default = collections.OrderedDict(a=secret), collections.defaultdict(int, a=[secret])
    assert reveal({"a": (secret, [secret])}) == {"a": (hidden, [hidden])}
    assert reveal(types.MappingProxyType({"a": secret})) == {"a": hidden}
    assert reveal(Pair("n", secret)) == Pair("n", hidden) and isinstance(reveal(Pair("n", secret)), Pair)
    assert (reveal(lists), reveal(lists).tag, type(reveal(lists))) == ([hidden], "x", Tagged)
    assert (reveal(ordered), type(reveal(ordered))) == ({"a": hidden}, collections.OrderedDict)
    assert (reveal(default)["a"], reveal(default)["b"]) == ([hidden], 0)
    assert isinstance(lists[0], Secret) and isinstance(ordered["a"], Secret) and isinstance(default["a"][0], Secret)
    plain = Pair("n", "t")
    assert reveal(plain) is plain
