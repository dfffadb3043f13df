"""Which format a source or a sink has: by what is asked for, else by suffix."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gristmill.errors import BadJob, BadSource
from gristmill.io.schema import check, unify
from gristmill.io.stream import plain_name
from gristmill.plan.contracts import Reading, SinkFormat, SourceFile, SourceFormat, Where
from gristmill.plan.job import Source

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "by_bytes",
    "check",
    "damaged",
    "format_options",
    "reading",
    "sink_format",
    "source_format",
    "suffix_of",
    "unify",
]

_COMPRESSED = (".gz", ".zst", ".bz2")

# Format name -> (module, class, suffixes). Modules are imported when a job uses the format.
_SOURCES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "parquet": ("parquet", "ParquetSource", (".parquet", ".pq", ".parq")),
    "jsonl": ("jsonl", "JsonlSource", (".jsonl", ".ndjson", ".jsonlines")),
    "csv": ("csv", "CsvSource", (".csv",)),
    "tsv": ("csv", "TsvSource", (".tsv", ".tab")),
    "text": ("text", "TextSource", (".txt", ".md", ".rst", ".text", ".log", ".html", ".htm", ".xml", ".tex")),
    "binary": (
        "text",
        "BinarySource",
        (
            ".jpg",
            ".jpeg",
            ".png",
            ".gif",
            ".webp",
            ".bmp",
            ".tif",
            ".tiff",
            ".wav",
            ".mp3",
            ".flac",
            ".ogg",
            ".mp4",
            ".pdf",
        ),
    ),
}
_SINKS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "parquet": ("parquet_sink", "ParquetSink", (".parquet", ".pq")),
    "jsonl": ("jsonl_sink", "JsonlSink", (".jsonl", ".ndjson")),
    "npy": ("npy", "NpySink", (".npy",)),
}
_ALIASES = {"ndjson": "jsonl", "jsonlines": "jsonl", "json": "jsonl", "pq": "parquet", "txt": "text", "bytes": "binary"}
_CUT_BY_THEMSELVES = frozenset({"parquet", "text", "binary"})  # compressed inside, or read whole: no .gz variants


def source_format(source: Source, files: Sequence[SourceFile]) -> SourceFormat:
    """The format of a source: `source.format` where given, else that of the files' suffixes; with the columns of their
    folders where these have some.

    Raises BadSource where a suffix is unknown or files differ in format, naming them.
    """
    name = _format_of(files, source) if source.format is None else _known(_SOURCES, source.format, "source")
    if not any(file.folders for file in files):
        return _source(name)
    from gristmill.io.hive import Hive

    return Hive(_source(name))


def _format_of(files: Sequence[SourceFile], source: Source) -> str:
    found: dict[str, str] = {}
    for file in files:
        suffix = suffix_of(file.path)
        name = _by_suffix(suffix)
        if name is None:
            raise BadSource(f"{file.path}: {_unknown(suffix)}")
        found.setdefault(name, file.path)
    if not found:
        raise BadSource(f"{', '.join(source.uri)}: no files")
    if len(found) > 1:
        each = ", ".join(f"{name} ({path})" for name, path in found.items())
        raise BadSource(
            f"the source holds files of several formats: {each}: name one kind, as in '*.parquet', or give format= "
            "(--source-format)"
        )
    return next(iter(found))


def sink_format(name_or_uri: str) -> SinkFormat:
    """A sink format by name, or by a URI's suffix; parquet where it has none. Raises BadJob for unknown names."""
    looks_like_path = any(c in name_or_uri for c in "/\\.")
    if not looks_like_path:
        return _sink(_known(_SINKS, name_or_uri, "sink"))
    suffix = suffix_of(name_or_uri.rstrip("/\\"))
    for name, (_, _, suffixes) in _SINKS.items():
        if suffix in suffixes:
            return _sink(name)
    return _sink("parquet")


def format_options(source: Source) -> Mapping[str, Any]:
    """What `inspect` and `Reading.options` take: the source's options, and its `types` under that name."""
    return {**source.options, **({"types": dict(source.types)} if source.types else {})}


def reading(
    source: Source, columns: tuple[str, ...] | None, schema: pa.Schema, where: Where | None = None, **more: Any
) -> Reading:
    """What is read of a source's files, as its reader is to be told: with all options of its format."""
    return Reading(columns, schema, where, options=format_options(source), damaged=damaged(source), **more)


def damaged(source: Source) -> bool:
    """Whether rows that cannot be decoded are bad rows, and no error."""
    return source.on_bad_file == "skip"


def suffix_of(path: str) -> str:
    """The suffix that tells the format, in lower case: `.jsonl.gz` of `a/b.v2.jsonl.gz`; "" where there is none."""
    name = plain_name(path).replace("\\", "/").rpartition("/")[2].lower()
    outer = next((c for c in _COMPRESSED if name.endswith(c)), "")
    stem = name[: len(name) - len(outer)]
    dot = stem.rfind(".")
    return (stem[dot:] if dot >= 0 else "") + outer


def by_bytes(path: str) -> bool:
    """Whether rows of such a file are told apart by the byte at which they begin, as far as its suffix tells."""
    return _by_suffix(suffix_of(path)) in ("csv", "tsv", "jsonl")


def _by_suffix(suffix: str) -> str | None:
    outer = next((c for c in _COMPRESSED if suffix.endswith(c)), "")
    inner = suffix[: len(suffix) - len(outer)]
    for name, (_, _, suffixes) in _SOURCES.items():
        if inner in suffixes:
            return None if outer and name in _CUT_BY_THEMSELVES else name
    return None


def _unknown(suffix: str) -> str:
    known = [s for _, _, suffixes in _SOURCES.values() for s in suffixes]
    listed = ", ".join(f"{name} ({suffixes[0]})" for name, (_, _, suffixes) in _SOURCES.items())
    if suffix == ".json":
        return (
            "a .json file may be one value or one a line: if each line is a record, give format='jsonl' "
            "(--source-format jsonl)"
        )
    alike = difflib.get_close_matches(suffix, known, n=1, cutoff=0.7)
    hint = f"did you mean {alike[0]}? " if alike else ""
    what = f"suffix {suffix!r} is of no known format" if suffix else "no suffix tells the format"
    return f"{what}: {hint}give format= (--source-format), one of {listed}"


def _known(table: Mapping[str, Any], name: str, kind: str) -> str:
    wanted = name.lower().lstrip(".")
    wanted = wanted if wanted in table else _ALIASES.get(wanted, wanted)
    if wanted in table:
        return wanted
    alike = difflib.get_close_matches(wanted, table, n=1)
    hint = f": did you mean {alike[0]!r}?" if alike else f": it is one of {', '.join(table)}"
    raise BadJob(f"{kind} format {name!r} is not known{hint}")


def _source(name: str) -> SourceFormat:
    made: SourceFormat = _class(*_SOURCES[name][:2])()
    return made


def _sink(name: str) -> SinkFormat:
    made: SinkFormat = _class(*_SINKS[name][:2])()
    return made


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"gristmill.io.{module}"), name)
