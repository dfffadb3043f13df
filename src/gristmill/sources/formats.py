"""Which format a source has: the one that is asked for, else by suffix."""

from __future__ import annotations

import codecs
import contextlib
import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gristmill.errors import BadJob, BadSource, GristmillError
from gristmill.job.job import Source
from gristmill.job.registry import Registry
from gristmill.shards.sourcefiles import SourceFile
from gristmill.sources.contract import Reading, SourceFormat, Where, Whole
from gristmill.sources.paths import Storage
from gristmill.sources.stream import opened, plain_name

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SOURCES", "by_bytes", "damaged", "format_options", "reading", "source_format", "suffix_of"]

_COMPRESSED = (".gz", ".zst", ".bz2")
_DATABASES = {".duckdb": "duckdb", ".ddb": "duckdb", **dict.fromkeys((".sqlite", ".sqlite3", ".db"), "sqlite")}
ONE_DOCUMENT = "looks like one JSON document, not JSON Lines: write one object a line (jq -c '.[]' does it)"
_TARS = (".tar", ".tar.gz", ".tar.bz2", ".tar.zst", ".tgz", ".tbz2", ".txz", ".tzst")
_PACKED = {".zip": "zip", **dict.fromkeys(_TARS, "tar")}

SOURCES: Registry[type[SourceFormat]] = Registry(
    "source format",
    "gristmill.sources",
    {
        "parquet": "gristmill.sources.parquet:ParquetSource",
        "jsonl": "gristmill.sources.jsonl:JsonlSource",
        "openai-batch": "gristmill.sources.openaibatch:OpenAIBatchSource",
        "csv": "gristmill.sources.csv:CsvSource",
        "tsv": "gristmill.sources.csv:TsvSource",
        "text": "gristmill.sources.text:TextSource",
        "binary": "gristmill.sources.text:BinarySource",
        "kafka": "gristmill.sources.kafka:KafkaSource",
    },
    needs=("name", "suffixes", "inspect", "read", "compressed", "by_bytes", "written", "typed"),
    aliases={
        "ndjson": "jsonl",
        "jsonlines": "jsonl",
        "json": "jsonl",
        "pq": "parquet",
        "txt": "text",
        "bytes": "binary",
    },
)
# The suffixes of the built-in formats, repeated here (a test compares them) so that looking one up imports nothing.
_OURS = {
    suffix: name
    for name, suffixes in {
        "parquet": ".parquet .pq .parq",
        "jsonl": ".jsonl .ndjson .jsonlines",
        "csv": ".csv",
        "tsv": ".tsv .tab",
        "text": ".txt .md .rst .text .log .html .htm .xml .tex",
        "binary": ".jpg .jpeg .png .gif .webp .bmp .tif .tiff .wav .mp3 .flac .ogg .mp4 .pdf",
    }.items()
    for suffix in suffixes.split()
}


def source_format(source: Source, files: Sequence[SourceFile], fs: Storage | None = None) -> SourceFormat:
    """The format of a source: `source.format` if given, else that of the files' suffixes; with the columns of the
    files' folders, if there are any.

    Raises BadSource if a suffix is unknown or files differ in format, naming them, and, if `fs` opens them, what they
    hold.
    """
    name = _format_of(files, source, fs) if source.format is None else SOURCES.known(source.format)
    packed = next((file.path for file in files if suffix_of(file.path) in _PACKED), None)
    if packed is not None and SOURCES.get(name).compressed:
        raise BadSource(f"{packed}: {_packed(suffix_of(packed))}")
    if not any(file.folders for file in files):
        return _source(name)
    from gristmill.sources.hive import Hive

    return Hive(_source(name))


def _format_of(files: Sequence[SourceFile], source: Source, fs: Storage | None) -> str:
    found: dict[str, str] = {}
    for file in files:
        suffix = suffix_of(file.path)
        name = _by_suffix(suffix)
        if name is None:
            if fs is not None and suffix.startswith(".json") and _is_list(file, fs):
                raise BadSource(f"{file.path}: {ONE_DOCUMENT}")
            raise BadSource(f"{file.path}: {_unknown(suffix)}")
        found.setdefault(name, file.path)
    if not found:
        raise BadSource(f"{', '.join(source.uri)}: no files")
    if len(found) > 1:
        each = ", ".join(f"{name} ({path})" for name, path in found.items())
        raise BadSource(
            f"the source holds files of several formats: {each}: select one, as in "
            f"'*{suffix_of(next(iter(found.values())))}', or give format= (--source-format)"
        )
    return next(iter(found))


def _is_list(file: SourceFile, fs: Storage) -> bool:
    """Whether a file begins as a list of JSON does, which is no record."""
    with contextlib.suppress(OSError, GristmillError), opened(file, fs) as stream:
        return stream.read(0, 64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    return False


def format_options(source: Source) -> Mapping[str, Any]:
    """What `inspect` and `Reading.options` take: the source's options, and its `types` under that name."""
    return {**source.options, **({"types": dict(source.types)} if source.types else {})}


def reading(
    source: Source, columns: tuple[str, ...] | None, schema: pa.Schema, where: Where | None = None, **more: Any
) -> Reading:
    """The `Reading` for a source's files, with all options of its format."""
    return Reading(columns, schema, where, options=format_options(source), damaged=damaged(source), **more)


def damaged(source: Source) -> bool:
    """Whether rows that cannot be decoded are bad rows rather than an error."""
    return source.on_bad_file == "skip"


def suffix_of(path: str) -> str:
    """The suffix that shows the format, in lower case: `.jsonl.gz` of `a/b.v2.jsonl.gz`; "" if there is none."""
    name = plain_name(path).replace("\\", "/").rpartition("/")[2].lower()
    outer = next((c for c in _COMPRESSED if name.endswith(c)), "")
    stem = name[: len(name) - len(outer)]
    dot = stem.rfind(".")
    return (stem[dot:] if dot >= 0 else "") + outer


def is_whole(source: Source, path: str) -> bool:
    """Whether such a file of a source is one row, which its name belongs to."""
    name = _by_suffix(suffix_of(path)) if source.format is None else SOURCES.known(source.format)
    form: Any = None if name is None else SOURCES.get(name)
    return isinstance(form, Whole) and form.whole


def by_bytes(path: str) -> bool:
    """Whether rows of such a file are identified by the byte at which they begin, as far as its suffix shows."""
    name = _by_suffix(suffix_of(path))
    return name is not None and SOURCES.get(name).by_bytes


def _by_suffix(suffix: str) -> str | None:
    """The format of files with that suffix, one of ours if any of them is. Raises BadJob if two packages claim it."""
    outer = next((c for c in _COMPRESSED if suffix.endswith(c)), "")
    inner = suffix[: len(suffix) - len(outer)]
    name = _OURS.get(inner)
    if name is None and inner:
        found = [n for n in SOURCES.names if inner in SOURCES.get(n).suffixes]
        if len(found) > 1:
            raise BadJob(f"{inner} files can be read by formats {' and '.join(found)}: give format= (--source-format)")
        name = next(iter(found), None)
    return None if name is None or (outer and not SOURCES.get(name).compressed) else name


def _packed(suffix: str) -> str:
    kind = _PACKED[suffix]
    return f"an archive: as {kind}://::PATH all files in it are read, as {kind}://NAME::PATH one, or a folder"


def _unknown(suffix: str) -> str:
    suffixes = {name: SOURCES.get(name).suffixes for name in SOURCES.names}
    listed = ", ".join(f"{name} ({of[0]})" if of else name for name, of in suffixes.items())
    if suffix == ".json":
        return (
            "a .json file may be one JSON value or one per line: if each line is a record, give format='jsonl' "
            "(--source-format jsonl)"
        )
    if suffix in _PACKED:
        return _packed(suffix)
    if suffix in _DATABASES:
        return (
            f"a file of a database is read as {_DATABASES[suffix]}://FILE#TABLE, or with a query; beside others that "
            "are read, name those (FOLDER/*.jpg), or read all of them as they are (format='binary')"
        )
    alike = difflib.get_close_matches(suffix, [s for of in suffixes.values() for s in of], n=1, cutoff=0.7)
    hint = f"did you mean {alike[0]}? " if alike else ""
    what = f"suffix {suffix!r} is not a known format" if suffix else "there is no suffix to tell the format by"
    return f"{what}: {hint}give format= (--source-format), one of {listed}"


def _source(name: str) -> SourceFormat:
    return SOURCES.get(name)()
