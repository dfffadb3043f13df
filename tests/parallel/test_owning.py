"""What a call is given and what it returns is its own: nothing is seen of what other calls do with their memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import called
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.parallel.pickles import Bundle, Unread, opened, seal, seal_back

CALLS = 400


def expected(kind: str, x: int) -> Any:
    """What `called.buffered` holds at the end of its call."""
    if kind in ("array", "large"):
        return float(x)
    return {"dict": {"x": x}, "nested": ({"rows": [x]}, 1), "own": called.Box([x])}.get(kind, x.to_bytes(8, "little"))


@pytest.mark.parametrize("kind", ["array", "dict", "nested", "bytearray", "own", "view"])
def test_results_of_memory_that_is_used_again(kind: str) -> None:
    """A function may return one object each time: every result is what that was at the end of its call."""
    found = gm.map(called.buffered, [(x, kind) for x in range(CALLS)], max_parallelism=1, spinner=False)
    if kind == "array":
        assert all((value == x).all() for x, value in enumerate(found))
        found = [float(value[0]) for value in found]
    assert found == [expected(kind, x) for x in range(CALLS)]
    assert len({id(value) for value in found}) == CALLS


def test_large_results_of_memory_that_is_used_again() -> None:
    """Also where results travel through files."""
    found = gm.map(called.buffered, [(x, "large") for x in range(20)], max_parallelism=1, spinner=False)
    assert [set(value.tolist()) for value in found] == [{float(x)} for x in range(20)]


def test_a_checkpoint_keeps_what_was_returned(tmp_path: Path) -> None:
    """What is kept is each call's own answer, also for those that come after."""
    options: dict[str, Any] = {"max_parallelism": 1, "spinner": False, "checkpoint": str(tmp_path)}
    inputs = [(x, "array") for x in range(CALLS)]
    gm.map(called.buffered, inputs, **options)
    assert [float(v[0]) for v in gm.map(called.buffered, inputs, **options)] == list(range(CALLS))


@pytest.mark.parametrize("retries", [0, 1])
def test_inputs_that_share_an_object(retries: int) -> None:
    """Each call gets it as the caller holds it, however inputs fall into messages; the caller's own is not touched."""
    shared: list[int] = []
    inputs = [(shared, x) for x in range(CALLS)]
    assert set(gm.map(called.grows, inputs, max_parallelism=1, spinner=False, retries=retries)) == {1}
    box = called.Box([])
    assert set(gm.map(called.grows, [(box, x) for x in range(CALLS)], max_parallelism=1, spinner=False)) == {1}
    assert not shared and not box.rows
    array = np.ones(3)
    assert set(gm.map(called.doubled_in_place, [array] * CALLS, max_parallelism=1, spinner=False)) == {2.0}
    assert array.tolist() == [1, 1, 1]


class Again:
    """Inputs of one buffer, as readers of data give them; with a length or without."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        row = {"array": np.zeros(2), "x": [0]}
        for x in range(self.count):
            row["array"][:] = x
            row["x"][0] = x  # type: ignore[index]
            yield row


class Sized(Again):
    """The same with a length."""

    def __len__(self) -> int:
        return self.count


def summed(row: dict[str, Any]) -> float:
    """Both values of a row."""
    return float(row["array"][0]) + row["x"][0]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["iterator", "sized", "checkpoint", "detached"])
def test_inputs_of_memory_that_is_used_again(kind: str, tmp_path: Path) -> None:
    """Inputs are read ahead, and are nevertheless what the iterator gave when it gave them."""
    inputs: Any = Sized(CALLS) if kind in ("sized", "checkpoint") else iter(Again(CALLS))
    options: dict[str, Any] = {"checkpoint": str(tmp_path)} if kind == "checkpoint" else {}
    found = gm.map(summed, inputs, max_parallelism=1, spinner=False, detach=kind == "detached", **options)
    found = found.results(timeout=60) if kind == "detached" else found
    assert found == [2 * x for x in range(CALLS)]
    if kind == "checkpoint":  # under the input as it was, too
        assert gm.map(summed, [next(iter(Again(1)))], spinner=False, checkpoint=str(tmp_path)) == [0]


def test_an_input_of_an_iterator_is_named_where_it_fails() -> None:
    """Errors show the input, also one that was sealed when it was read."""
    with pytest.raises(KeyError) as caught:
        gm.map(summed, iter([{"a": 1}]), spinner=False)
    assert "input 0: {'a': 1}" in caught.value.__notes__


def test_classes_of_a_script_travel_once_a_message(tmp_path: Path) -> None:
    """Inputs and results of classes that a script defines are their own too, and quick; classes stay the same."""
    script = tmp_path / "script.py"
    script.write_text(
        "import gristmill as gm, dataclasses, enum\n"
        "class Color(enum.Enum):\n    RED = 1\n"
        "@dataclasses.dataclass\nclass Base:\n    rows: list\n"
        "class Row(Base):\n    color = Color.RED\n"
        "last = Row([0])\n"
        "def f(row, x):\n"
        "    row.rows.append(x)\n"
        "    assert type(row) is Row and isinstance(row, Base) and row.color is Color.RED\n"
        "    last.rows[0] = (x, len(row.rows), Color.RED)\n"
        "    return last\n"
        "shared = Row([])\n"
        "found = gm.map(f, [(shared, x) for x in range(300)], max_parallelism=1, spinner=False)\n"
        "assert all(type(r) is Row for r in found)\n"
        "assert [r.rows[0] for r in found] == [(x, 1, Color.RED) for x in range(300)], found[:5]\n"
        "found = gm.map(lambda row: row.rows[0], (Row([x]) for x in range(300)), spinner=False)\n"
        "assert found == list(range(300))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


class Wrong:
    """Says that it has no items, which may be wrong."""

    def __init__(self, count: int, says: int) -> None:
        self.count, self.says = count, says

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


@pytest.mark.parametrize(("count", "says"), [(20, 0), (1, 0), (0, 0), (0, 1)])
@pytest.mark.parametrize("kind", ["plain", "generator", "checkpoint", "detached"])
def test_a_length_of_zero_is_a_hint_too(count: int, says: int, kind: str, tmp_path: Path) -> None:
    """Inputs that are there are called, whatever `len` says."""
    options: dict[str, Any] = {"checkpoint": str(tmp_path)} if kind == "checkpoint" else {}
    options |= {"generator": True} if kind == "generator" else {"detach": True} if kind == "detached" else {}
    found = gm.map(called.double, Wrong(count, says), spinner=False, **options)
    found = found.results(timeout=60) if kind == "detached" else found
    assert list(found) == [2 * x for x in range(count)]


ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.binary().map(bytearray)
        | st.sampled_from([called.Box([1]), np.float32(2), {1, 2}])
    ),
    max_leaves=8,
)


def changeable(value: Any) -> Iterator[int]:
    """The ids of all that can be changed in a value."""
    if isinstance(value, (list, dict, set, bytearray, called.Box, np.ndarray)):
        yield id(value)
    if isinstance(value, called.Box):
        value = value.rows
        yield id(value)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from changeable(inner)


@settings(max_examples=200, deadline=None)
@given(values=st.lists(VALUES, max_size=5), shares=st.booleans(), back=st.booleans())
def test_what_is_sealed_is_whole_and_shares_nothing(values: list[Any], shares: bool, back: bool) -> None:
    """A bundle gives what it was made of, in order, and no two values have anything in common that can be changed."""
    bundle = Bundle(None)
    given = [*values, *values] if shares else values
    for value in given:
        bundle.add((seal_back if back else seal)(value))
    found = list(opened(bundle.parcel()))
    assert found == given and list(map(type, found)) == list(map(type, given))
    ids = [set(changeable(value)) for value in found]
    assert sum(map(len, ids)) == len(set().union(*ids))


def test_what_cannot_be_read_is_no_other_values_fault() -> None:
    """One value of a bundle that cannot be made again leaves the others as they are."""
    bundle = Bundle(None)
    for value in (1, [2], called.Unreadable(), [3]):
        bundle.add(seal(value))
    found = list(opened(bundle.parcel()))
    assert found[:2] == [1, [2]] and found[3] == [3]
    assert isinstance(found[2], Unread) and isinstance(found[2].error, ValueError)


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3).T, np.zeros(0), np.array(["a", "bc"]), np.arange(9)[::2]])
def test_arrays_arrive_as_they_are(array: np.ndarray) -> None:
    """Shape, type and values of an array, and whether it can be written to."""
    for writable in (True, False):
        value = array.copy("K")
        value.flags.writeable = writable
        bundle = Bundle(None)
        bundle.add(seal(value))
        (found,) = opened(bundle.parcel())
        assert found.dtype == value.dtype and (found == value).all() and found.shape == value.shape
        assert found.flags.writeable == writable


KEEPS = """
import enum, sys
from dataclasses import dataclass
import gristmill as gm

class Label(enum.Enum):
    POS = 1
    NEG = 2

@dataclass(frozen=True)
class Found:
    n: int
    label: Label
    next: "Found | None" = None

class Odd(Exception):
    pass

def found(x):
    if x == 3:
        return Odd(x)
    label = Label.POS if x % 2 else Label.NEG
    return Found(x, label, Found(-x, label))

def fails(x):
    raise Odd(x)

folder = sys.argv[1]
options = dict(checkpoint=folder, spinner=False, max_parallelism=1)
results = gm.map(found, range(5), **options)
assert [type(r) for r in results] == [Odd if x == 3 else Found for x in range(5)], results
del results[3]
assert results == [found(x) for x in (0, 1, 2, 4)], results
assert sum(r.label is Label.POS for r in results) == 1
if len(sys.argv) == 2:
    handles = [gm.remote_parallel_map(f, [0, 1], detach=True, return_exceptions=True) for f in (found, fails)]
else:
    handles = [gm.detached(id) for id in sys.argv[2:]]
done, failed = (h.results(timeout=60) for h in handles)
assert done == [found(0), found(1)], done
assert [type(e) for e in failed] == [Odd, Odd], failed
print(*(h.id for h in handles))
"""


@pytest.mark.long
def test_what_is_kept_comes_back_as_the_script_s_own_in_a_later_process(tmp_path: Path) -> None:
    """Enums, dataclasses and exceptions of a script: what a checkpoint or a detached map kept is as computed."""
    script = tmp_path / "script.py"
    script.write_text(KEEPS)
    handles: list[str] = []
    for _ in range(2):
        command = [sys.executable, str(script), str(tmp_path / "kept"), *handles]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        handles = done.stdout.split()
