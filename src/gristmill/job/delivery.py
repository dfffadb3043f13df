"""Deliveries of a job: the stores that its published result is brought to, and how. The sink's folder is the truth; a
delivery shapes no answer, so it is outside the fingerprint.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from gristmill.errors import BadJob
from gristmill.job.annotations import Help
from gristmill.job.keywords import option_fields
from gristmill.job.namelists import split as names_in
from gristmill.job.registry import Registry
from gristmill.job.secret import Secret, reveal
from gristmill.job.secretnames import names_secret
from gristmill.job.storeoptions import names_of, refuse_misplaced, refuse_unknown, said_in
from gristmill.job.uris import in_uri, is_secret, redact
from gristmill.values import dataclass

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gristmill.job.keywords import DeliveryOptions
    from gristmill.stores.contract import StoreKind

Mode = Literal["replace", "append", "upsert"]

STORES: "Registry[type[StoreKind]]" = Registry(
    "store",
    "gristmill.stores",
    {
        "duckdb": "gristmill.stores.duckdb:DuckDB",
        "sqlite": "gristmill.stores.sqlite:SQLite",
        "lmdb": "gristmill.stores.lmdb:Lmdb",
        "postgresql": "gristmill.stores.postgres:Postgres",
        "redis": "gristmill.stores.redis:Redis",
        "usearch": "gristmill.stores.usearch:USearch",
        "faiss": "gristmill.stores.faiss:Faiss",
        "qdrant": "gristmill.stores.qdrant:Qdrant",
        "delta": "gristmill.stores.delta:Delta",
        "iceberg": "gristmill.stores.iceberg:Iceberg",
        "lance": "gristmill.stores.lance:Lance",
        "cassandra": "gristmill.stores.cassandra:Cassandra",
        "spark": "gristmill.stores.spark:Spark",
    },
    needs=("name", "modes", "keyed", "embedded", "open", "reader"),
    aliases={
        "postgres": "postgresql",
        "rediss": "redis",
        "valkey": "redis",
        "valkeys": "redis",
        "qdrants": "qdrant",
        "scylla": "cassandra",
    },
)
STAGING = "staging"  # the key of a sink's `storage` that names the folder of a sink that is a store
_FILES = frozenset({"file", "local", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "http", "https", "hf"})
HIDDEN = ".gristmill"  # how the names of folders of sinks end that are beside a store
FOLDS = ("duckdb", "sqlite")  # in which names of tables are the same but for capitals
_SCHEMAS = {"postgresql": "public", "duckdb": "main"}  # of a table without one
_PORTS = {"postgresql": 5432}
_OURS = ("mode", "key", "evolve", "delete")  # options that a URI may hold in its query; all others are the client's
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def is_store(uri: str) -> bool:
    """Whether a URI names a store: one of ours, or of an installed package."""
    scheme = _scheme(uri)
    return bool(scheme) and scheme not in _FILES and (_known(scheme) in STORES or _is_elsewhere(scheme))


def _is_elsewhere(scheme: str) -> bool:
    """Whether it names a store that is files, in an object store (`delta+s3`): such are read, and not delivered to."""
    base, plus, _ = scheme.partition("+")
    return bool(plus) and base in STORES and STORES.get(base).embedded


def _kind(uri: str) -> str:
    """The name of the kind of store at an address. Raises BadJob for one that is not known, or not there."""
    scheme, shown = _scheme(uri), redact(str(uri))
    base, _, place = scheme.partition("+")
    if scheme not in STORES and _is_elsewhere(scheme):
        raise BadJob(
            f"{shown}: {base} is delivered to, and looked up, on this machine's disks only, and this is in an object "
            f"store: deliver to {base}:///PATH, or let the sink be {place}://…, whose Parquet files others read"
        )
    return STORES.known(scheme)


def _scheme(uri: str) -> str:
    text = str(reveal(uri))
    return text.partition("://")[0].lower() if "://" in text else ""


def _known(scheme: str) -> str:
    return STORES.aliases.get(scheme, scheme)


@dataclass(frozen=True)
class Place:
    """Where in a store a delivery goes. `store` is the name of its kind; `uri` is for its client, without the fragment
    and with its secrets; `name` is what follows the #. `shown` is the whole address without secrets: it identifies the
    place in receipts.
    """

    store: str
    uri: str = field(repr=False)
    name: str
    shown: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def path(self) -> str:
        """The path of an embedded store on this machine."""
        return _path(self.uri)

    @property
    def hidden(self) -> tuple[str, ...]:
        """The secrets in the address, which a client's messages may repeat."""
        parts = urlsplit(self.uri)
        query = (v for n, v in parse_qsl(parts.query) if is_secret(n))
        options = (str(v) for n, v in reveal(self.options).items() if is_secret(n) or names_secret(n))
        return tuple(s for s in (unquote(parts.password or ""), parts.password or "", *query, *options) if s)

    def words(self, error: BaseException) -> str:
        """What a client says is wrong, in one line and without secrets."""
        text = " ".join(str(error).split()) or type(error).__name__
        for secret in self.hidden:
            text = text.replace(secret, "***")
        return redact(text)


def same_table(a: Place, b: Place) -> bool:
    """Whether two places are one table, as far as their addresses tell (see stores/sametable.py): by other names of a
    host they are two.
    """
    return a.store == b.store and _where(a) == _where(b)


def _where(place: Place) -> tuple[str, ...]:
    """What tells the tables of a kind of store apart, however an address spells them."""
    schema, _, table = table_in(place.store, place.name).rpartition(".")
    name = (schema or _SCHEMAS.get(place.store, ""), table)
    if place.store in STORES and STORES.get(place.store).embedded:
        return (os.path.realpath(place.path), *name)
    parts = urlsplit(place.uri)
    said = dict(parse_qsl(parts.query))
    host = (parts.hostname or said.get("host", "localhost")).lower()
    port = str(parts.port or said.get("port") or _PORTS.get(place.store, ""))
    return ("localhost" if host in ("127.0.0.1", "::1") else host, port, parts.path.strip("/"), *name)


@option_fields("delivery ")
@dataclass(frozen=True)
class Delivery:
    """A store that the published result is delivered to. `replace` makes the rows of the result those of the table, in
    one step; `append` adds the rows that were not delivered yet; `upsert` updates or adds rows by `key`.
    """

    not_shaping: ClassVar[Mapping[str, str]] = {}
    _folder: ClassVar[str] = ""  # of each, the current one when it was made: code that is run may change to another
    _is_sink: ClassVar[bool] = False  # of each, whether it is of a sink that is this store

    to: Annotated[str, Help("The store: postgresql://HOST/DB#table, duckdb:///FILE#table, lmdb:///FILE, …", flag=None)]
    mode: Annotated[
        Mode,
        Help("replace: in one step; append: add the rows not delivered yet; upsert: update or add rows by key"),
    ] = "replace"
    key: Annotated[
        tuple[str, ...],
        Help("The columns that tell rows apart: of an upsert, and of what is looked up. No two rows may have the same"),
    ] = ()
    index: Annotated[
        Mapping[str, Any],
        Help("Indices to build before the rows are visible, by column: {label: btree, embedding: hnsw}", flag=None),
    ] = field(default_factory=dict)
    evolve: Annotated[bool, Help("Add columns to the table that it does not have yet")] = False
    delete: Annotated[bool, Help("With upsert: delete rows whose key is not in the result")] = False
    options: Annotated[Mapping[str, Any], Help("Options of the store's client, for example a password", flag=None)] = (
        field(default_factory=dict)
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_folder", _current())
        for name, given in _said(self.to, f"deliver {self.shown}").items():
            if getattr(self, name) not in (given, getattr(type(self), name)):
                raise BadJob(
                    f"deliver {self.shown}: {name} is {getattr(self, name)!r}, and in the address {given!r}: leave one "
                    "of them out"
                )
            object.__setattr__(self, name, given)
        self._scheme()  # says that there is none
        _refuse_late_options(str(self.to), self.shown)
        kind = STORES.get(_kind(self.to))
        _refuse_ignored(self.to, self.options, f"deliver {self.shown}")
        if self.mode not in kind.modes:
            raise BadJob(f"deliver {self.shown}: mode is {self.mode!r}: it must be one of {', '.join(kind.modes)}")
        if (kind.keyed or self.mode == "upsert") and not self.key:
            raise BadJob(f"deliver {self.shown}: no key: name the columns that tell rows apart, for example key=['id']")
        if self.delete and self.mode != "upsert":
            raise BadJob(f"deliver {self.shown}: delete is for upsert, and mode is {self.mode!r}: leave it out")

    def _scheme(self) -> str:
        if not (scheme := _scheme(self.to)):
            raise BadJob(
                f"deliver {redact(str(self.to))}: give a store's address: {', '.join(f'{n}://…' for n in STORES.names)}"
            )
        return scheme

    @property
    def shown(self) -> str:
        """The address without secrets."""
        return _shown(self.to, self._folder)

    @property
    def place(self) -> Place:
        """Where it goes, with the secrets."""
        return place_of(self)

    @property
    def is_sink(self) -> bool:
        """Whether it is short for a sink: the folder of its runs is all that knows what was delivered."""
        return self._is_sink


def of_sink(delivery: Delivery) -> Delivery:
    """The delivery of a sink that is this store."""
    object.__setattr__(delivery, "_is_sink", True)
    return delivery


def place_of(at: str | Delivery) -> Place:
    """The place that an address names, with its secrets. Raises BadJob for a store that is not known."""
    to, options, folder = (at.to, at.options, at._folder) if isinstance(at, Delivery) else (at, {}, _current())
    address, name, query = _parts(str(reveal(to)))
    _refuse_late_options(str(to), _shown(to, folder))
    _refuse_ignored(to, options, _shown(to, folder))
    if _embedded(to):
        _refuse_quoted(address, folder, _shown(to, folder))
        address = f"{address.partition('://')[0]}://{in_uri(_path(address, folder))}"
    uri = address + ("?" + query if query else "")
    return Place(_kind(to), uri, name, _shown(to, folder), dict(reveal(options)))


def keyed_by(at: str | Delivery) -> tuple[str, ...]:
    """The columns that an address, or a delivery, says that rows are told apart by."""
    return at.key if isinstance(at, Delivery) else _said(at, redact(str(at))).get("key", ())


def _refuse_ignored(to: str, options: Mapping[str, Any], shown: str) -> None:
    """Raises BadJob for options that nobody would look at, if the kind of store says which it takes."""
    kind: Any = STORES.get(_kind(to))
    if not hasattr(kind, "in_address"):
        return
    given, whose = names_of(reveal(to)), f"{shown}: an address of {kind.name}"
    if beside := next((n for n in given if n not in (kind.in_address or ()) and n in (kind.in_options or ())), None):
        raise BadJob(f"{whose} has no option {beside!r}: it goes into options: gm.to(…, options={{{beside!r}: …}})")
    refuse_unknown(given, kind.in_address, _OURS, whose)
    refuse_misplaced(options, kind.in_options, (*_OURS, "index"), f"{shown}: the client of {kind.name}")


def _refuse_late_options(to: str, shown: str) -> None:
    """Raises BadJob for options that follow the name of a table, of which they would be a part."""
    if late := re.search(r"\?(\w+)=", to.partition("#")[2]):
        raise BadJob(
            f"{shown.partition('#')[0]}: options stand before the #: {_scheme(to)}://…?{late[1]}=…#"
            f"{to.partition('#')[2][: late.start()]}"
        )


def _refuse_quoted(address: str, folder: str, shown: str) -> None:
    """Raises BadJob for a path that is meant as it is written, but is another one in an address."""
    literal = os.path.join(folder, os.path.dirname(address.partition("://")[2]))
    if "%" in literal and os.path.isdir(literal) and not os.path.isdir(os.path.dirname(_path(address, folder))):
        raise BadJob(
            f"{shown}: in an address %20 is a space, and a percent sign is %25: there is a folder {literal}, which is "
            f"{address.partition('://')[0]}://{in_uri(literal)} there"
        )


def _embedded(to: str) -> bool:
    kind = _known(_scheme(to))
    return kind in STORES and STORES.get(kind).embedded


def _shown(to: str, folder: str) -> str:
    address, name, query = _parts(str(to))
    text = redact(address + ("?" + query if query else ""))
    if _embedded(to) and "${" not in text:
        text = f"{_known(_scheme(to))}://{in_uri(_path(address, folder))}"
    return f"{text}#{name}" if name else text


def _current() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return ""


def _path(address: str, folder: str = "") -> str:
    rest = unquote(address.partition("://")[2].partition("?")[0])
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else os.path.expanduser(rest)
    return os.path.abspath(os.path.join(folder, path)).replace("//", "/")


def _parts(uri: str) -> tuple[str, str, str]:
    """An address without its query, the name after the #, and the query without our options."""
    rest, _, name = uri.partition("#")
    address, _, query = rest.partition("?")
    client = "&".join(p for p in query.split("&") if p and p.partition("=")[0] not in _OURS)
    return address, name, client


def _said(uri: str, shown: str) -> dict[str, Any]:
    """Our options in the query of an address. Raises BadJob for a value that is none of theirs."""
    said: dict[str, Any] = said_in(reveal(uri), _OURS, shown, lists=("key",))
    for name, text in said.items():
        if name == "key":
            said[name] = tuple(names_in(text))
        elif name == "mode" and text not in get_args(Mode):
            raise BadJob(f"{shown}: mode is {text!r}: it must be one of {', '.join(get_args(Mode))}")
        elif name in ("evolve", "delete"):
            if text.lower() not in _FLAGS:
                raise BadJob(f"{shown}: {name} is {text!r}: it must be true or false")
            said[name] = _FLAGS[text.lower()]
    return said


def to(uri: str, **options: "Unpack[DeliveryOptions]") -> Delivery:
    """A delivery with options: `gm.to("duckdb:///scores.duckdb#scores", mode="upsert", key=["id"])`. Fields as in
    `Delivery`. `mode`, `key`, `evolve` and `delete` may also be in the address: `…?mode=upsert&key=id#scores`.
    """
    fields: Mapping[str, Any] = options
    return Delivery(os.fspath(uri), **fields)


def as_deliveries(value: Any) -> tuple[Delivery, ...]:
    """Deliveries from what a person writes: addresses, `gm.to(…)`, mappings of options, or a list of them."""
    if value is None:
        return ()
    several = [value] if isinstance(value, (str, os.PathLike, Mapping, Delivery)) else value
    if not isinstance(several, Iterable):
        raise BadJob(f"deliver is {value!r}: give a list of stores, as addresses or gm.to(…)")
    found = tuple(_delivery(one) for one in several)
    shown = [one.shown for one in found]
    if twice := next((name for name in shown if shown.count(name) > 1), None):
        raise BadJob(f"deliver names {twice} twice: leave one of them out")
    return found


def _delivery(value: Any) -> Delivery:
    if isinstance(value, Delivery):
        return value
    if isinstance(value, (str, os.PathLike)):
        return to(value)  # type: ignore[arg-type]
    if isinstance(value, Mapping) and "to" in value:
        return Delivery(**value)
    raise BadJob(f"deliver has {value!r}: give a store's address, or gm.to(…) (in a job file a mapping with `to`)")


def is_housed(uri: str) -> bool:
    """Whether a store knows itself where the runs of its sinks are; see `stores.contract.Housed`."""
    return hasattr(STORES.get(_kind(uri)), "runs")


def staging_of(uri: str, storage: Mapping[str, Any]) -> str:
    """The folder that holds the runs of a sink that is a store: the one that `storage` names, or for a store that is a
    file a hidden one beside it, unless the store knows. Raises BadJob for any other.
    """
    given = {STAGING: reveal(storage)[STAGING]} if STAGING in storage else {}
    delivery_of: Any = STORES.get(_kind(uri))
    if is_housed(uri):
        return str(delivery_of.runs(place_of(Delivery(uri, options=given))))
    if given:
        return str(given[STAGING])
    address, name, _ = _parts(str(reveal(uri)))
    if not delivery_of.embedded:
        raise BadJob(
            f"sink {redact(address)}: the result and its receipts need a folder, from which the store is filled: give "
            "storage: {staging: FOLDER} (--set sink.storage.staging=FOLDER), or a folder as sink and this store in "
            "deliver"
        )
    return _beside(delivery_of.name, _path(address), name)


def _beside(store: str, path: str, name: str) -> str:
    """The hidden folder beside a store that is a file: one for each table, however an address spells it, but for those
    of earlier versions, which are named as it was spelled then. A file that a link leads to has been moved, perhaps:
    its folder may be where the link is.
    """
    *links, (folder, file) = _steps(path)
    made, spelled = os.path.join(folder, _hidden(file, table_in(store, name))), os.path.split(path)
    for earlier in (os.path.join(spelled[0], _hidden(spelled[1], name)), made):
        if os.path.isdir(earlier):
            return earlier
    for where, called in ((folder, file), *links):
        first = f".{called}{'-' if name else ''}"
        with contextlib.suppress(OSError):  # there is no such folder, which is told where the store is opened
            for one in sorted(n for n in os.listdir(where) if n.startswith(first) and n.endswith(HIDDEN)):
                if table_in(store, one[len(first) : -len(HIDDEN)]) == table_in(store, name):
                    return os.path.join(where, one)
    return made


def _steps(path: str) -> list[tuple[str, str]]:
    """The folder and the name of a file, and before it of each link that leads there."""
    real = os.path.realpath(path)
    steps: list[tuple[str, str]] = []
    while os.path.islink(path) and len(steps) < 40:  # as many as Linux follows
        steps.append(os.path.split(path))
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return [*steps, os.path.split(real)]


def _hidden(file: str, name: str) -> str:
    return f".{file}{f'-{name}' if name else ''}{HIDDEN}"


def table_in(store: str, name: str) -> str:
    """The name of a table in a store, as that tells it from others."""
    if store not in FOLDS:
        return name
    folded = name.encode().lower().decode()  # capitals of ASCII alone are small letters
    return folded.removeprefix(f"{_SCHEMAS[store]}.") if store in _SCHEMAS else folded


def beside(place: Place) -> str | None:
    """The hidden folder of runs beside a store that is a file; None for any other."""
    return _beside(place.store, place.path, place.name) if STORES.get(place.store).embedded else None


def is_hidden(home: str, place: Place) -> bool:
    """Whether a folder of runs is called as one beside a file of this kind is, wherever that is, whatever its name, and
    whatever that of its table: all of them may be given others.
    """
    name = os.path.basename(home.rstrip("/"))
    hidden = "://" not in home and name.startswith(".") and name.endswith(HIDDEN)
    return hidden and ("-" in name or not place.name)


def secret_in(uri: str) -> bool:
    """Whether the text of an address has a secret that is written out."""
    return not isinstance(uri, Secret) and any(redact(p) != p for p in (uri, uri.partition("#")[0]))
