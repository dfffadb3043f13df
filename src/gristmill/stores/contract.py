"""The contract of a store: what a delivery asks of it, so that its readers see the old rows or the new ones, complete
and once, whenever whoever is killed.

A delivery is of one generation of one sink (`Load`). Its parts are *staged*, one by one, where no reader looks; when
all are there and *counted*, one atomic step of the store *publishes* them together with a `Mark`, which says what is
*live*. What other generations left is *dropped* before the first part comes, as it may be what fills the store, and in
the end. Anyone may stop at any point, and anyone may begin again: whoever delivers asks `live` first, then `staged`,
and does only what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from gristmill.errors import BadJob, RunFailed, SinkBusy
from gristmill.files.document import Document
from gristmill.job.delivery import Mode, Place
from gristmill.values import dataclass

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = [
    "DISTANCE",
    "Housed",
    "Key",
    "Load",
    "Mark",
    "Metric",
    "Mode",
    "Near",
    "Overtaken",
    "Part",
    "Place",
    "Reader",
    "Search",
    "Searcher",
    "Store",
    "StoreBusy",
    "StoreKind",
    "StoreUnavailable",
    "is_there",
]

DISTANCE = "_distance"  # what is added to a row that is near
BEGUN = ".tmp"  # how the names of files in staging places end while they are written
LEFT = 600.0  # seconds after which one that nobody has written to was left by who is not there any more
STAGED = r"gm_[0-9a-f]{10}_"  # what the names of staging places begin with: see `Load.stage`
Row = dict[str, Any]
Key = tuple[Any, ...] | Mapping[str, Any]
"""What a row is looked up by: a value for each key column, in their order or by their names."""
Metric = Literal["cosine", "l2", "ip"]
"""How far apart two vectors are: 1 - their cosine; the length of their difference; their inner product, negated. Less
is nearer.
"""


class StoreUnavailable(RunFailed):
    """A store cannot be reached, or refuses what is asked, in its own words. The result stands in the sink: running
    again, or `gristmill deliver`, delivers it.
    """


class StoreBusy(StoreUnavailable):
    """Another process has a store for itself, which may have ended when the result is published."""


class Overtaken(StoreUnavailable):
    """What a store has of a sink is not what was found when it was decided which rows to bring: nothing was changed."""


@dataclass(frozen=True)
class Mark(Document, what="mark of a delivery", sealed=False):
    """What a store says of the rows that its readers see: the sink that they are from, and the generation (its number,
    and the name of its folder, which is unique). It is written in the same atomic step as they become visible.

    `generations` are those whose rows are delivered, `names` their folders (empty: not noted; "": lost), `rows` how
    many of them this delivery brought, `older` how many it left out as later ones have their keys, `total` how many
    rows of this sink are there at least, with those of earlier appends (None: that was not noted), `again` how often
    the same was brought once more as rows were missing, `key` the columns that tell rows apart, `delete` whether rows
    of others were to go, `index` a digest of the indices that were asked for, `schema` the Arrow schema
    (`commit.generation.encode_schema`), by which `lookup` gives back the values as they were, `columns` the same with
    those that only rows of earlier deliveries, or of others, have (empty: there are none), `unmarked` whether rows were
    there, when these came, that no mark told of, and of which sink they were is not known since. `replaced` are the
    sinks whose rows went when this one's took the place of all: the generation and `at` of their last marks. `table`
    tells which table the rows came to, where a database says so (see `sql.Which`), and where not, `past` is a mark of
    one whose name a delivery has found at another one since. `home` is the folder of a sink that is this store (empty:
    it is not, or that was not noted). A `doubtful` mark may be of rows that are not there any more, as what would tell
    is gone. `at` is for people: clocks differ. Of the marks of several sinks the one with the greatest `turn` is the
    latest, where a store does not keep them in order (0: that was not noted).
    """

    sink: str
    generation: int
    name: str
    generations: tuple[int, ...]
    mode: str
    key: tuple[str, ...]
    rows: int
    schema: str
    at: str = ""
    again: int = 0
    older: int = 0
    total: int | None = None
    turn: int = 0
    names: tuple[str, ...] = ()
    delete: bool = False
    index: str = ""
    doubtful: bool = False
    columns: str = ""
    unmarked: bool = False
    table: str = ""
    past: bool = False
    home: str = ""
    replaced: tuple[tuple[str, int, str], ...] = ()

    @property
    def held(self) -> str:
        """The schema, encoded, of all columns that rows there have."""
        return self.columns or self.schema


@dataclass(frozen=True)
class Load:
    """What a delivery brings: `mark` is what the store is to say in the end, `target` the name of what is delivered to
    (a table, a prefix; empty for a store that is one file), `schema` that of the rows. `found` is the mark of this sink
    by which it was decided which rows these are: unless they are the whole, they are right beside those rows alone.
    """

    target: str
    mark: Mark
    schema: pa.Schema
    mode: Mode = "replace"
    key: tuple[str, ...] = ()
    index: Mapping[str, Any] = field(default_factory=dict)
    evolve: bool = False
    delete: bool = False
    found: Mark | None = None

    @property
    def whole(self) -> bool:
        """Whether the result is all that is to be there: then the rows of all others go, and so do their marks."""
        return self.mode == "replace" or self.delete

    @property
    def places(self) -> str:
        """What the names of all staging places of this sink for this target begin with."""
        whose = "\0".join((self.target, self.mark.sink))
        return f"gm_{hashlib.sha256(whose.encode()).hexdigest()[:10]}_"

    @property
    def stage(self) -> str:
        """The name of the staging place of this generation: letters, digits and underscores, at most 40. What is
        brought in another mode, by another key or with other indices has another.
        """
        again = (str(self.mark.again),) * bool(self.mark.again)
        index = (self.mark.index,) * bool(self.mark.index)
        how = hashlib.sha256("\0".join((self.mode, *self.key, *again, *index)).encode()).hexdigest()[:6]
        return f"{self.places}{self.mark.name.replace('-', '_')}_{how}"

    def of(self, rows: int, older: int = 0, total: int | None = None, unmarked: bool = False) -> Load:
        """The load with the number of its rows in the mark, of those that it leaves out, and of all that are there; and
        whether rows are beside these of which there is no mark. The sink's folder stays noted.
        """
        home = self.mark.home or ("" if self.found is None else self.found.home)
        mark = dataclasses.replace(self.mark, rows=rows, older=older, total=total, unmarked=unmarked, home=home)
        return dataclasses.replace(self, mark=mark)

    def after(self, found: Mark) -> Load:
        """The same load once more, in place of what is found."""
        return dataclasses.replace(self, mark=dataclasses.replace(self.mark, again=found.again + 1))


@dataclass(frozen=True)
class Part:
    """One committed file of the sink. `id` names its content: a part that was scored again has another. `batches` reads
    its rows, as Arrow record batches of the load's schema, and may be called again. `path` is the file in the sink,
    which may have more rows than these.
    """

    id: str
    rows: int
    path: str
    batches: Callable[[], Iterator[pa.RecordBatch]]


class Store(Protocol):
    """A place in a store, open. One thread at a time uses it. What the store refuses is a StoreUnavailable, in one line
    with its own words and without secrets; every call may be repeated.
    """

    def check(self, load: Load) -> None:
        """Before anything is scored: raises BadJob for a column whose values it cannot hold without loss, and for one
        that does not fit what is there. Changes nothing.
        """
        ...

    def live(self, sink: str) -> Mark | None:
        """The mark of a sink's rows that readers see; None if there are none of it. A doubtful one is told as such, and
        stays so until something of this sink is published. Trap: rows of other sinks may be
        there as well (append, upsert), each with a mark of its own.
        """
        ...

    def staged(self, load: Load) -> Mapping[str, int]:
        """The parts, by id, that are whole in the staging place of this generation, with their rows."""
        ...

    def stage(self, load: Load, parts: Sequence[Part]) -> None:
        """Bring parts into the staging place, each once: its receipt is in the transaction of its rows, or its rows
        have ids that make bringing them twice the same. A part that is there already is left alone. No reader sees any.
        Several parts, which are small, may be one transaction.
        """
        ...

    def count(self, load: Load | None) -> int:
        """Rows in the staging place, counted there; with None, rows that readers see."""
        ...

    def publish(self, load: Load) -> None:
        """The atomic step: what is staged becomes visible as the mode says, and `load.mark` live, both or neither.
        Nothing happens if that is live already, and SinkBusy or Overtaken is raised if something else of this sink is
        than what was found: see `is_there`, which says all that, and is asked within the step.
        """
        ...

    def drop(self, load: Load, *, this: bool = False) -> None:
        """Remove the staging places of this sink for this target, except that of this generation unless `this`; of
        that, what an interrupted attempt has begun and nobody goes on with. Trap: other sinks may be loading into the
        same target; theirs stay. Trap: another deliverer of this sink may be about to publish what is removed, and has
        to find within its step that it is gone; a store that cannot tell then removes nothing unless `this`.
        """
        ...

    def close(self) -> None:
        """Let go of what is held, such as a file's lock. The next call takes it again."""
        ...


class Unmarked(Protocol):
    """A Store whose rows may come without their marks: the table alone is copied, or restored."""

    def unmarked(self) -> int:
        """Rows that readers see, where there is no sign of any delivery, or a mark is `unmarked`: others have delivered
        beside them since. Where marks are that are not, whatever was before them went with a whole result.
        """
        ...


@runtime_checkable
class Counted(Unmarked, Protocol):
    """A Store that is one of several tables in one place, with marks of all deliveries beside them."""

    def untold(self, sink: str, last: tuple[int, str]) -> int:
        """Rows that readers see, where there is no mark of this sink, and others' marks tell neither that its rows, the
        `last` ones of this generation and time, were replaced, nor of just as many: marks of before its delivery were
        restored, say.
        """
        ...

    def was(self, name: str) -> bool:
        """Whether this may be the table that an address of the same place names, under another name: that one is gone,
        and what would tell is not known.
        """
        ...

    def astray(self, sink: str) -> tuple[str, Mark] | None:
        """A mark of this sink's deliveries to a table that is gone, with its name, if this may be that one: marks go
        with their tables to another file or server, where receipts name none of these.
        """
        ...

    def copies(self, mark: Mark) -> Sequence[str]:
        """The names of other tables that say to be the one that a mark is of, but to which nothing was delivered."""
        ...


class Shared(Protocol):
    """A Store that tells of all sinks whose rows are there, as several may append to it."""

    def marks(self) -> Sequence[Mark]:
        """The marks of all sinks whose rows readers see."""
        ...


class Leaving(Protocol):
    """A Store that may have to leave rows of earlier results where they are."""

    def left(self) -> str:
        """After `drop`, why rows stay that nobody may need, and the way out; nothing if none do."""
        ...


class Reader(Protocol):
    """Looks rows up. It sees one published generation at a time and moves on when there is a next one; values are as
    Arrow's `as_py` gives them. Threads may share it.
    """

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[Row | None]]:
        """For each key its row, or None; all of one generation, whose mark is given. `keys.exact` and `lookup.asked`
        make values of the key columns' types of keys. Raises BadKey for one that is none, BadSource if nothing is
        published there.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Search:
    """What is asked of a Searcher: to each of `vectors` (a matrix of float32, a row each, finite) the `k` nearest.
    `column` is the one to look in, `metric` how to compare; None for what there is.
    """

    vectors: np.ndarray
    k: int
    column: str | None = None
    metric: Metric | None = None


@dataclass(frozen=True)
class Near:
    """What was found: for each vector asked for its rows, nearest first, and how far each is by `metric`; all of one
    generation, whose mark is given.
    """

    mark: Mark | None
    metric: Metric
    rows: list[list[Row]]
    distances: list[list[float]]


@runtime_checkable
class Searcher(Protocol):
    """A Reader that also finds the rows whose vectors are nearest to one."""

    def nearest(self, search: Search) -> Near:
        """At most k rows for each vector; rows whose vector is null are near to none. Raises BadJob for a column or a
        metric that is not there, and for vectors of another length, BadSource if nothing is published.
        """
        ...


class StoreKind(Protocol):
    """A kind of store, registered under the scheme of its addresses. A class with these attributes is one."""

    name: ClassVar[str]
    modes: ClassVar[tuple[Mode, ...]]
    keyed: ClassVar[bool]
    """Whether it holds one row a key, so that a delivery must have one."""
    embedded: ClassVar[bool]
    """Whether it is a file on this machine."""

    @staticmethod
    def open(place: Place) -> Store:
        """The store at a place. Raises BadJob for an address that is not one, MissingExtra, StoreUnavailable."""
        ...

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """A reader; `key` are the columns to look up by, the mark's if empty. Raises as `open`, and BadSource."""
        ...


class Choosy(Protocol):
    """A StoreKind that says which options it takes, beside those of every delivery: others are refused. One without
    these attributes is given all.
    """

    in_address: ClassVar[tuple[str, ...] | None]
    """Names in the query of its addresses; None: those of its client, which refuses others or knows any."""
    in_options: ClassVar[tuple[str, ...] | None]
    """Names in a delivery's `options`, in the same way."""


class Filed(Protocol):
    """A StoreKind that makes several files on this machine, or one that its address does not name."""

    @staticmethod
    def files(place: Place) -> tuple[str, str] | None:
        """The folder of a table, and there the path of a file as deliveries make them; None if that is not known, or
        elsewhere.
        """
        ...


class Housed(Protocol):
    """A StoreKind that knows itself where the runs of a sink are that is short for such a store."""

    @staticmethod
    def runs(place: Place) -> str:
        """The folder of the sink; within the one that the place's option `staging` names, if there is any. It is asked
        when a run begins, and may take long. Raises as `open`.
        """
        ...


class Known(Protocol):
    """A StoreKind, not of files, that tells whether two addresses lead to one table."""

    @staticmethod
    def same(read: Place, to: Place) -> bool | None:
        """Whether a table that is there is that of a delivery, by what they are; None if that cannot be told, as when
        one cannot be reached.
        """
        ...


class Aimed(Protocol):
    """A StoreKind whose address names the table otherwise than by `#name`."""

    @staticmethod
    def target(place: Place) -> str:
        """The table, as those in one place are told apart: see `Load.target`."""
        ...


def refuse_ours(place: Place, name: str, ours: str = STAGED) -> None:
    """Raises BadJob for a name that is one of a staging place, or one to which the expression `ours` leads: what is
    kept there of other targets would be taken for rows of this one.
    """
    if found := re.match(f"{STAGED}|{ours}", name, re.IGNORECASE | re.DOTALL):
        raise BadJob(
            f"{place.shown}: {found[0]!r} is what deliveries call something of their own there: give another name"
        )


def refuse_gone(load: Load, staged: Iterable[int], shown: str) -> None:
    """For `publish`, right before its step: raises RunFailed if the parts that are staged, of so many rows each, are
    not all that is to be live. They were counted, but a deliverer may be suspended after that, while another one
    brings the same and drops the staging place, and a store without persistence may lose it.
    """
    if sum(staged) != load.mark.rows:
        raise RunFailed(f"{shown}: what was staged is not there any more: run again")


@contextlib.contextmanager
def in_staging(shown: str) -> Iterator[None]:
    """While a file of a staging place is made. Raises Overtaken if that is taken away meanwhile, as it is when another
    deliverer has published what is in it.
    """
    try:
        yield
    except FileNotFoundError as e:
        raise Overtaken(f"{shown}: what was being staged is not there any more: run again") from e


def damaged(shown: str, why: str, *, strange: bool = False, what: str = "it") -> BadJob:
    """The error for a file that lacks a part, which no repeat mends; `strange`: it may as well be somebody's of another
    kind. `what` is to be removed for a new one.
    """
    told = (
        f"{why}, or was copied or restored in part: give another path; if it is ours, restore it"
        if strange
        else f"{why}, as a file that was copied or restored in part: restore it"
    )
    return BadJob(
        f"{shown}: {told}, or remove {what} and run again, or gristmill deliver, which brings this sink's result "
        "(others bring theirs)"
    )


def is_left(path: str) -> bool:
    """Whether a file that was begun in a staging place is nobody's any more, as none has written to it for so long. Who
    was suspended while writing it is told that it is gone.
    """
    with contextlib.suppress(OSError):
        return time.time() - os.stat(path).st_mtime > LEFT
    return False


def same_but_for_capitals(
    names: Iterable[str], store: str, fold: Callable[[str], str] = str.lower, what: str = "columns"
) -> str | None:
    """What is wrong with columns of these names in a store that takes capitals for small letters; None if nothing."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(fold(name), name)) != name:
            return (
                f"{what} {other!r} and {name!r} are the same but for capitals, and {store} takes them for one: give "
                "one of them another name in a step"
            )
    return None


def fields_but_for_capitals(kind: pa.DataType, store: str, fold: Callable[[str], str] = str.lower) -> str | None:
    """The same of the fields of structs in a type, at any depth."""
    import pyarrow as pa

    fields = [kind.field(n) for n in range(kind.num_fields)]
    if pa.types.is_struct(kind):
        why = same_but_for_capitals([field.name for field in fields], store, fold, "its fields")
        if why is not None:
            return why
    return next((why for f in fields if (why := fields_but_for_capitals(f.type, store, fold)) is not None), None)


def is_there(found: Mark | None, load: Load, shown: str) -> bool:
    """Whether what is to be delivered is live already, by the mark found there; for `publish`, which then does nothing.
    A result that was delivered otherwise (see `as_asked`) is not. Raises SinkBusy if a later generation has become live
    since it was decided what to bring: the deliverer was suspended, and is stale; Overtaken if anything else of this
    sink has, or has gone, and the rows are not the whole.
    """
    wanted = load.mark
    if found is not None and not found.doubtful and found.name == wanted.name and as_asked(found, load):
        return True
    if found == load.found:
        return False
    if found is not None and found.generation > wanted.generation:
        raise SinkBusy(later(found, wanted, shown))
    if not load.whole:
        raise Overtaken(f"{shown}: others have delivered there while this was being loaded: run again")
    return False


def as_asked(found: Mark, load: Load) -> bool:
    """Whether the rows of a generation, which are there, came as they are to come now: by the same key, in the same
    mode, with the same indices, and without the rows of others if these are to go. Rows are never appended twice.
    """
    wanted = load.mark
    if wanted.mode == "append":
        return True
    same = (found.mode, found.key, found.index) == (wanted.mode, wanted.key, wanted.index)
    return same and found.again >= wanted.again and (found.delete or not wanted.delete)


def later(found: Mark, wanted: Mark, shown: str) -> str:
    """What is said of a result that is older than the one of the same sink that is there."""
    return (
        f"{shown}: holds generation {found.generation} of this sink already, and this is {wanted.generation}: another "
        "run has delivered meanwhile, and nothing was changed"
    )
