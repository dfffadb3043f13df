"""The fingerprint of a plan: a table of digests of everything that shapes its output, and the readable differences
between two fingerprints.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gristmill.job.job import COPY, HELD, JobSpec, Source
from gristmill.job.secret import SEALED, Secret, salt_of
from gristmill.job.secret import sealed as seal
from gristmill.shards.sourcefiles import FileInfo
from gristmill.values import dataclass

MOST_LINES = 12
_OTHER_TABLE = "input: the table in memory has different content"
_TOP = ": statements"  # those of a module that define nothing (fingerprint/modules.py)
_GUARD = "what only a script is to do goes below if __name__ == '__main__':, which does not count"
_OTHER_ROWS = (
    "input: the store that is the source holds other rows now, or the same in another order (those of a query have one "
    "only by ORDER BY)"
)
FILE = "file "  # before the name, among code, of a file that an argument of a function names
_CYTHON = "model: callable cython_function_or_method"  # noted until 0.1 of estimators that hold one; it says nothing
PACKAGE = "package "  # before the name of an installed package that a callable itself belongs to
NOT_COMPARED = "not compared: "  # before what is only named, as it comes and goes while code runs; a reason, for files
VALUE = "value of "  # before the name of an environment value in an argument
_COLUMNS, _TYPES, _FOLDERS = "source.columns", "source.types", "source.folders"
_IN_ORDER = "source.uri in order"  # the files, where only some of their rows are taken


@dataclass(frozen=True)
class StoredFingerprint:
    """A fingerprint as claims and plans store it: the inputs are one digest without stamps, because the plan has its
    files in a table.
    """

    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    model: Mapping[str, str] = dataclasses.field(default_factory=dict)
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)
    inputs: str = ""
    reads: str = ""
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fingerprint:
    """Digests by section and name. `inputs` may be large, and is compared only if its own digest differs. `reads` is a
    digest of the columns that are read, in order: it is what counts if the job names the same columns differently.
    `held` are values behind `code` that each worker creates itself (values.Held). `texts` are the columns that
    are read as text if all values are, so that asking for it (`types`) changes nothing.

    `looked` is what was found at the paths in arguments (`modelfiles.Looked`); `written` are the files that the code
    is known to write itself, which do not count (see `without_written`). Neither is stored with it.
    """

    options: Mapping[str, str]
    model: Mapping[str, str]
    code: Mapping[str, str]
    inputs: Mapping[str, str]
    reads: str = ""
    held: tuple[Any, ...] = ()
    texts: tuple[str, ...] = ()
    looked: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    written: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    def stored(self) -> StoredFingerprint:
        """The form that claims and plans store."""
        inputs = without_stamps(self.inputs)
        return StoredFingerprint(
            dict(self.options), dict(self.model), dict(self.code), inputs, self.reads, tuple(self.texts)
        )


def compared(code: Mapping[str, str]) -> dict[str, str]:
    """Those of a code's digests by name that distinguish it from other code."""
    return {n: d for n, d in code.items() if not n.startswith(NOT_COMPARED) and f": {NOT_COMPARED}" not in n}


def digest_of(value: Any) -> str:
    """sha256 of a plain value, the same in every process."""
    return hashlib.sha256(_plain(value).encode()).hexdigest()


def options_of(job: JobSpec, source_format: str, sink_format: str) -> dict[str, str]:
    """The options that shape the output, as JSON by name: all that differ from their defaults and that no class lists
    in its `not_shaping`. Formats are given as determined, whether or not the job declares them.
    """
    source = replace(job.source, format=source_format)
    if source.sample is None:
        source = replace(source, seed=Source.seed)  # nothing is drawn
    sink = None if job.sink is None else replace(job.sink, format=sink_format)
    said = None if job.nulls == "dead" else job.on_null  # "dead" is the default, declared or not
    found = dict(_shaping(replace(job, source=source, sink=sink, on_null=said), ""))
    found["model.kind"] = json.dumps(type(job.model).__name__)
    return found


def of_folders(types: Mapping[str, str]) -> dict[str, str]:
    """What counts besides these options if columns are read from folders' names: their types."""
    return {_FOLDERS: _plain(types)}


def in_order(options: Mapping[str, str], source: Source, paths: Sequence[str]) -> dict[str, str]:
    """Options with the order of the source's files, which counts if only some of their rows are taken."""
    found = {key: told for key, told in options.items() if key != _IN_ORDER}
    if len(paths) > 1 and (source.limit is not None or source.sample is not None):
        found[_IN_ORDER] = _plain(paths if len(paths) < 4 else digest_of(paths))
    return found


def _shaping(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """The shaping options of one part of a job, and of the parts below it. `name` is its path, ending in a dot."""
    for field in dataclasses.fields(value):
        item, here = getattr(value, field.name), name + field.name
        if field.name in value.not_shaping or isinstance(item, type):  # a class is compared as code
            continue
        if dataclasses.is_dataclass(item):
            yield from _shaping(item, f"{here}.")
        elif isinstance(item, tuple) and any(dataclasses.is_dataclass(i) for i in item):
            for number, part in enumerate(item):
                yield from _shaping(part, f"{here}[{number}].")
        elif _plain(item) != _plain(_default(field)):
            yield here, _plain(item)
            if field.name in getattr(value, "ordered", ()):
                yield f"{here} in order", json.dumps(item, default=_told)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _plain(value: Any) -> str:
    """JSON in which the order of a mapping does not count, and a list equals a tuple, an array, or a column of a table.
    Secrets show as they are named.
    """
    return json.dumps(value, default=_told, sort_keys=True)


def _told(value: Any) -> Any:
    """What JSON has no form for; all values of an array, as its own text would leave out those in the middle."""
    listed = getattr(value, "tolist", None) or getattr(value, "to_list", None)
    if listed is not None:
        return listed()
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


# ---------------------------------------------------------------- inputs


def input_digest(info: FileInfo) -> str:
    """What identifies a file's content without reading it."""
    if info.file.path.startswith(HELD) and f"{COPY}/" in info.file.path:  # its path does
        return json.dumps([0, "", ""])
    return json.dumps([info.file.size, info.file.stamp, info.layout + info.file.folders])


def without_stamps(inputs: Mapping[str, str]) -> str:
    """One digest of the files' names, sizes and layouts, without the times when they were written."""
    return digest_of({path: [size, layout] for path, d in inputs.items() for size, _, layout in [json.loads(d)]})


def other_content(digest: str, reason: str) -> str:
    """The digest of a file that looks unchanged but was found to hold something else: unlike the digest of any real
    file. `reason` says how the change was detected.
    """
    return json.dumps([*json.loads(digest)[:3], reason])


def _input_line(path: str, before: str, now: str) -> str:
    (size, stamp, _, *reason), (size_now, stamp_now, *_) = json.loads(before), json.loads(now)
    if reason:
        return f"input: {path}: {reason[0]}"
    parts = [] if size == size_now else [f"{size_now:,} bytes, but {size:,} when planned"]
    if stamp != stamp_now:
        parts.append(written(stamp_now, stamp))
    return (
        f"input: {path}: {', '.join(parts) or 'its rows are stored otherwise than planned (size and time are equal)'}"
    )


def written(now: str, planned: str) -> str:
    """Two stamps of one file in words: when it was written, if they are times, else which versions they name."""
    times = [_time(now), _time(planned)]
    if None in times:
        return f"version {now or 'unknown'}, but {planned or 'unknown'} when planned"
    digits = 19 if times[0][:19] != times[1][:19] else None  # to the second, if the times then differ
    return f"modified {times[0][:digits]}, but {times[1][:digits]} when planned"


def _time(stamp: str) -> Any:
    """A stamp as local time to the nanosecond: whole nanoseconds since 1970, or seconds with a fraction; else None."""
    whole, dot, fraction = stamp.partition(".")
    if not whole.isdigit() or (dot and not fraction.isdigit()) or len(whole) != (10 if dot else 19):
        return None
    seconds, rest = (int(whole), fraction.ljust(9, "0")) if dot else (int(whole[:10]), whole[10:])
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + f".{rest}"


# ---------------------------------------------------------------- differences


def differences(old: StoredFingerprint, new: Fingerprint, old_inputs: Mapping[str, str]) -> list[str]:
    """What differs between a stored fingerprint, whose inputs are given separately, and this one: a line each, none if
    they are equal.
    """
    lines = []
    # A job may now name the columns that it read before, when it read all: what is read is the same.
    meant = {_COLUMNS} if new.reads and old.reads == new.reads else set()
    if _other_types(old.options, new.options) <= {*old.texts} & {*new.texts}:
        meant.add(_TYPES)
    then, since = (options.get(_FOLDERS) for options in (old.options, new.options))
    if then is not None and since is not None:
        meant.add(_FOLDERS)
        lines += _of_folders(then, since)
    meant |= {n for n in old.code if n.startswith(_CYTHON)}
    if any(old.options.get(n) != new.options.get(n) for n in ("source.limit", "source.sample")):
        meant.add(_IN_ORDER)  # of which one of the two has nothing, as that says
    for section in ("options", "model", "code"):
        before, now = _but(getattr(old, section), new.written), getattr(new, section)
        lines += _differing(section, *({n: v for n, v in d.items() if n not in meant} for d in (before, now)))
    if old_inputs != new.inputs:
        lines += _differing("input", old_inputs, new.inputs)
    return lines


def between(old: StoredFingerprint, new: StoredFingerprint) -> list[str]:
    """What differs of options, model and code between two stored fingerprints: a line each."""
    sections = ("options", "model", "code")
    return [line for name in sections for line in _differing(name, getattr(old, name), getattr(new, name))]


def _of_folders(before: str, now: str) -> list[str]:
    """How columns in folders' names came to have other types, which no option set."""
    old, new = json.loads(before), json.loads(now)
    return [
        f"folders: {name}=… in their names was {old[name]}, is {new[name]}, judging by the names that exist now (a "
        f"number is not written 01 or 09): a restart with types={{{name!r}: 'string'}} "
        f"(--set source.types.{name}=string) reads them as text, whichever appear later"
        for name in sorted(old.keys() & new.keys())
        if old[name] != new[name]
    ] + [
        f"folders: column {name!r} {'stands in their names now' if name in new else 'stood in their names'}"
        for name in sorted(old.keys() ^ new.keys())
    ]


def _other_types(old: Mapping[str, str], new: Mapping[str, str]) -> set[str]:
    """The columns for which the two jobs ask different types, or only one of them asks for a type."""
    before, now = (json.loads(options.get(_TYPES) or "{}") for options in (old, new))
    return {name for name in {*before, *now} if before.get(name) != now.get(name)}


def sealed(new: Fingerprint, stored: Iterable[Mapping[str, str]]) -> Fingerprint:
    """With environment values as salted digests. The salt is that of the stored digests, so that equal values have
    equal digests; a new one if there are none.
    """
    if not any(isinstance(digest, Secret) for digest in new.code.values()):
        return new
    salts = (salt for code in stored for digest in code.values() if (salt := salt_of(digest)) is not None)
    salt = next(salts, None) or os.urandom(16)
    code = {name: seal(digest, salt) if isinstance(digest, Secret) else digest for name, digest in new.code.items()}
    return dataclasses.replace(new, code=code)


def of_approved(new: Fingerprint, digests: Mapping[str, str], paths: Collection[str]) -> Fingerprint:
    """With the digests of models that a registry names and arguments are given, whose files are at `paths`: these are
    compared whatever they are called.
    """
    code = {
        name: digest
        for name, digest in new.code.items()
        if not (digest.startswith(NOT_COMPARED) and file_path(name, new.code) in paths)
    }
    return dataclasses.replace(new, model={**new.model, **digests}, code=code)


def without_written(new: Fingerprint, written: frozenset[str]) -> Fingerprint:
    """Without the files at these paths, which arguments name but the code writes itself, such as a log."""
    looked = {name: at for name, at in new.looked.items() if name not in written}
    return dataclasses.replace(new, code=_but(new.code, written), looked=looked, written=written)


def _but(code: Mapping[str, str], written: frozenset[str]) -> dict[str, str]:
    return {name: digest for name, digest in code.items() if not written or file_path(name, code) not in written}


def file_path(name: str, code: Mapping[str, str]) -> str | None:
    """The path in the name of a file's entry among digests of code; None for another entry. After the path, in
    brackets, is what names the file, which has an entry of its own; the path may contain brackets, too.
    """
    place, found, rest = name.partition(FILE)
    if not found or (place and not place.endswith(": ")):
        return None
    return next((rest[: at.start()] for at in re.finditer(r" \(", rest) if place + rest[at.end() : -1] in code), None)


def new_inputs_only(old_inputs: Mapping[str, str], new: Fingerprint) -> bool:
    """Whether the inputs differ only by files that were not there before."""
    return all(new.inputs.get(path) == digest for path, digest in old_inputs.items())


def _differing(section: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    lines = []
    gone, come = ([name for name in one if name not in other] for one, other in ((old, new), (new, old)))
    if section == "model" and len(gone) == len(come) == 1:  # one file in the place of another
        lines.append(f"model: was {gone[0]}, is {come[0]}")
        old, new = ({name: d for name, d in one.items() if name not in (*gone, *come)} for one in (old, new))
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        file = f": {FILE}" in name
        if before == now or (file and all((d or NOT_COMPARED).startswith(NOT_COMPARED) for d in (before, now))):
            continue
        if f": {NOT_COMPARED}" in name:
            continue
        if section == "options":
            was, is_now = _apart(before, now)
            lines.append(f"options: {name} was {was}, is {is_now}")
        elif file and before is None:
            way = "to continue as before move it away, even if the code itself writes it"
            lines.append(f"{section}: {name} was not there ({way})")
        elif file and now is None:
            lines.append(f"{section}: {name} is gone (to continue as before put it back)")
        elif name.startswith(HELD) and None in (before, now):
            line = _OTHER_ROWS if f"{COPY}/" in name else _OTHER_TABLE
            lines += [] if line in lines else [line]
        elif section == "code" and name.endswith(_TOP):
            lines.append(f"code: {name.removesuffix(_TOP)}: what it does when it is imported changed ({_GUARD})")
        elif section == "input" and now is None:
            lines.append(f"input: {name} is no longer in the source")
        elif before is None or now is None:
            lines.append(f"{section}: {name} is {'new' if before is None else 'gone'}")
        elif section == "input":
            lines.append(_input_line(name, before, now))
        elif len(before) == len(now) == 64 or before.startswith(SEALED):  # digests
            way = (
                " (to continue as before put it back; if it is a folder, move away what has been added)" if file else ""
            )
            lines.append(f"{section}: {name} changed{way}")
        else:
            lines.append(f"{section}: {name} was {_short(before)}, is {_short(now)}")
    return lines


def _apart(before: str | None, now: str | None) -> tuple[str, str]:
    """Two values of an option as short texts that differ: for long ones, the first place where they differ."""
    shown = [("not given", "") if text is None else (_short(text), text) for text in (before, now)]
    if shown[0][0] == shown[1][0]:
        pairs = enumerate(zip(*(text for _, text in shown), strict=False))
        same = next((n for n, (a, b) in pairs if a != b), min(len(text) for _, text in shown))
        shown = [(f"…{text[max(0, same - 20) : same + 30]}…", text) for _, text in shown]
    return shown[0][0], shown[1][0]


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:12] + "…"


def listed(lines: list[str]) -> str:
    """Difference lines as text, no more than fit on a screen."""
    more = len(lines) - MOST_LINES
    return "\n".join(f"  {line}" for line in lines[:MOST_LINES]) + (f"\n  … and {more} more" if more > 0 else "")
