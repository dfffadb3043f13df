"""The fingerprint of a plan: a table of digests of everything that shapes its output, and the readable difference of
two.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gristmill.plan.contracts import FileInfo
from gristmill.plan.job import HELD, JobSpec, Sink, Source
from gristmill.plan.options import EngineSpec, Gates, Running
from gristmill.plan.secret import SEALED, Secret, salt_of
from gristmill.plan.secret import sealed as seal
from gristmill.plan.specs import (
    Call,
    FunctionModel,
    OnnxModel,
    SklearnModel,
    Step,
    TextClassifier,
    TextEmbedder,
    TorchScriptModel,
)

_FILES = "its files are compared by their digests"
_PLACE = "where a model runs does not change what it answers"
_DIGESTED = "compared as code, with all that it refers to"
_CUT = "how rows are grouped for a call or a commit: the plan stores it, and an answer is its row's alone"
_AROUND = "how the run behaves, not what it answers"

# Every field that does NOT shape what is written, and why. Any other field of these types counts, also one that is
# added later.
NOT_SHAPING: Mapping[type, Mapping[str, str]] = {
    JobSpec: {
        "on_new_files": "what the next run does about files that are new",
        "audit": "looks at the staged result, and may only refuse it",
    },
    Source: {
        "uri": "the files that it stands for are compared one by one",
        "data": "compared as the file that it is written to",
        "on_bad_file": "the files that are left are compared one by one",
        "storage": "how to reach the files, which are compared one by one; credentials change from night to night",
    },
    Sink: {
        "uri": "the sink that is looked at",
        "storage": "how to reach the sink; credentials change from night to night",
        "evolve": "whether a later run may widen the schema, which the plan stores",
        "overwrite": "whether files of others may stand beside the result",
    },
    Step: {},
    Call: {"target": _DIGESTED, "args": _DIGESTED, "batch_format": _DIGESTED, "takes": _DIGESTED},
    FunctionModel: {},
    TextEmbedder: {"model": _FILES, "sha256": _FILES, "device": _PLACE},
    TextClassifier: {"model": _FILES, "sha256": _FILES, "device": _PLACE},
    OnnxModel: {"model": _FILES, "sha256": _FILES, "device": _PLACE},
    TorchScriptModel: {"model": _FILES, "sha256": _FILES, "device": _PLACE},
    SklearnModel: {"model": _FILES, "sha256": _FILES, "allow_pickle": "whether a file may be opened: it is compared"},
    Running: {
        "batch_tokens": _CUT,
        "batch_rows": _CUT,
        "shard_rows": _CUT,
        "window_bytes": _CUT,
        "batch_timeout": _AROUND,
        "worker_memory": _AROUND,
        "log": _AROUND,
    },
    Gates: dict.fromkeys(("min_ok", "warn_failed", "allow_empty"), "whether the result is published, not what it is"),
    EngineSpec: dict.fromkeys(("name", "workers", "gpus", "threads", "steps_workers", "options"), _PLACE),
}
MOST_LINES = 12
_OTHER_TABLE = "input: the table in memory holds something else"
FILE = "file "  # before the name, among code, of a file that an argument of a function names
PACKAGE = "package "  # before the name of an installed package that a callable itself is of
NOT_COMPARED = "not compared: "  # before what is only named, which comes and goes as code runs; the reason for a file
VALUE = "value of "  # before the name of a value of the environment that is in an argument
_COLUMNS, _TYPES, _FOLDERS = "source.columns", "source.types", "source.folders"


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Digests by section and name. `inputs` may be large, and is compared only where its own digest differs. `reads` is
    one of the columns that are read, in their order: those which count where the job names them in other words. `held`
    are values behind `code` that each worker has by itself (models.values.Held). `texts` are the columns that are read
    as text where all values are, so that to ask for it (`types`) changes nothing.

    `looked` is what was at the paths in arguments (`models.files.Looked`); `written` those that the code is known to
    write itself, which do not count (see `without_written`). Neither is stored with it.
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

    def as_dict(self) -> dict[str, Any]:
        """As claims and plans store it: the inputs as one digest without their stamps, as the plan's files are in a
        table of it.
        """
        return {
            "options": dict(self.options),
            "model": dict(self.model),
            "code": dict(self.code),
            "inputs": without_stamps(self.inputs),
            "reads": self.reads,
            "texts": list(self.texts),
        }


def compared(code: Mapping[str, str]) -> dict[str, str]:
    """Of digests of code by name those that tell it from other code."""
    return {n: d for n, d in code.items() if not n.startswith(NOT_COMPARED) and f": {NOT_COMPARED}" not in n}


def digest_of(value: Any) -> str:
    """sha256 of a plain value, the same in every process."""
    return hashlib.sha256(_plain(value).encode()).hexdigest()


def options_of(job: JobSpec, source_format: str, sink_format: str) -> dict[str, str]:
    """The options that shape the output, as JSON by name: all that are not what they are by default and that
    `NOT_SHAPING` does not name. Formats are given as they were found out, said or not.
    """
    source = replace(job.source, format=source_format)
    if source.sample is None:
        source = replace(source, seed=Source.seed)  # of nothing
    sink = None if job.sink is None else replace(job.sink, format=sink_format)
    said = None if job.nulls == "dead" else job.on_null  # which is the default, said or not
    found = dict(_shaping(replace(job, source=source, sink=sink, on_null=said), ""))
    found["model.kind"] = json.dumps(type(job.model).__name__)
    return found


def of_folders(types: Mapping[str, str]) -> dict[str, str]:
    """What counts beside these options where columns are read that stand in folders' names: their types."""
    return {_FOLDERS: _plain(types)}


def in_order(options: Mapping[str, str], source: Source, paths: Sequence[str]) -> dict[str, str]:
    """Options with the order of the source's files, which counts where only some of their rows are taken."""
    name = "source.uri in order"
    found = {key: told for key, told in options.items() if key != name}
    if len(paths) > 1 and (source.limit is not None or source.sample is not None):
        found[name] = _plain(paths if len(paths) < 4 else digest_of(paths))
    return found


def _shaping(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """What counts of one part of a job, and of the parts below it. `name` is where it stands, with a dot behind it."""
    ignored = NOT_SHAPING.get(type(value), {})
    for field in dataclasses.fields(value):
        item, here = getattr(value, field.name), name + field.name
        if field.name in ignored:
            continue
        if dataclasses.is_dataclass(item):
            yield from _shaping(item, f"{here}.")
        elif isinstance(item, tuple) and any(dataclasses.is_dataclass(i) for i in item):
            for number, part in enumerate(item):
                yield from _shaping(part, f"{here}[{number}].")
        elif _plain(item) != _plain(_default(field)):
            yield here, _plain(item)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _plain(value: Any) -> str:
    """JSON, where a mapping is the same in any order and a list the same as a tuple, an array, or a column of a table.
    Secrets show as they are named.
    """
    return json.dumps(value, default=_told, sort_keys=True)


def _told(value: Any) -> Any:
    """What JSON has no form for; of many values all, as their own text would leave out those in the middle."""
    listed = getattr(value, "tolist", None) or getattr(value, "to_list", None)
    if listed is not None:
        return listed()
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


# ---------------------------------------------------------------- inputs


def input_digest(info: FileInfo) -> str:
    """What identifies a file's content without reading it."""
    return json.dumps([info.file.size, info.file.stamp, info.layout + info.file.folders])


def without_stamps(inputs: Mapping[str, str]) -> str:
    """One digest of what files are called, how large they are and how they are laid out, whenever they were written."""
    return digest_of({path: [size, layout] for path, d in inputs.items() for size, _, layout in [json.loads(d)]})


def other_content(digest: str, reason: str) -> str:
    """The digest of a file that looks as it did, and was found to hold something else: unlike any that is made of a
    file. `reason` says how it was found out.
    """
    return json.dumps([*json.loads(digest)[:3], reason])


def _input_line(path: str, before: str, now: str) -> str:
    (size, stamp, _, *reason), (size_now, stamp_now, *_) = json.loads(before), json.loads(now)
    if reason:
        return f"input: {path}: {reason[0]}"
    parts = [] if size == size_now else [f"{size_now:,} bytes, planned with {size:,}"]
    if stamp != stamp_now:
        parts.append(written(stamp_now, stamp))
    return (
        f"input: {path}: {', '.join(parts) or 'its rows are stored otherwise than planned (size and time are equal)'}"
    )


def written(now: str, planned: str) -> str:
    """Two stamps of one file in words: when it was written, where they are times, else which versions they name."""
    times = [_time(now), _time(planned)]
    if None in times:
        return f"version {now or 'unknown'}, planned with {planned or 'unknown'}"
    digits = 19 if times[0][:19] != times[1][:19] else None  # to the second, where that tells them apart
    return f"modified {times[0][:digits]}, planned with {times[1][:digits]}"


def _time(stamp: str) -> Any:
    """A stamp as local time to the nanosecond: whole nanoseconds since 1970, or seconds with a fraction; else None."""
    whole, dot, fraction = stamp.partition(".")
    if not whole.isdigit() or (dot and not fraction.isdigit()) or len(whole) != (10 if dot else 19):
        return None
    seconds, rest = (int(whole), fraction.ljust(9, "0")) if dot else (int(whole[:10]), whole[10:])
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + f".{rest}"


# ---------------------------------------------------------------- differences


def differences(old: Mapping[str, Any], new: Fingerprint, old_inputs: Mapping[str, str]) -> list[str]:
    """What differs between a stored fingerprint, with its inputs apart, and this one, a line each; empty where nothing
    does.
    """
    lines = []
    # Columns may be named that all were read of before: what is read is the same then.
    meant = {_COLUMNS} if new.reads and old.get("reads") == new.reads else set()
    if _other_types(old.get("options", {}), new.options) <= {*old.get("texts", ())} & {*new.texts}:
        meant.add(_TYPES)
    then, since = (options.get(_FOLDERS) for options in (old.get("options", {}), new.options))
    if then is not None and since is not None:
        meant.add(_FOLDERS)
        lines += _of_folders(then, since)
    for section in ("options", "model", "code"):
        before, now = _but(old.get(section, {}), new.written), getattr(new, section)
        lines += _differing(section, *({n: v for n, v in d.items() if n not in meant} for d in (before, now)))
    if old_inputs != new.inputs:
        lines += _differing("input", old_inputs, new.inputs)
    return lines


def _of_folders(before: str, now: str) -> list[str]:
    """How columns in folders' names came to have other types, which is nobody's option."""
    old, new = json.loads(before), json.loads(now)
    return [
        f"folders: {name}=… in their names was {old[name]}, is {new[name]}, by the names that there are now (01 is no "
        f"number as it is written): a restart with types={{{name!r}: 'string'}} "
        f"(--set source.types.{name}=string) reads them as text whichever come"
        for name in sorted(old.keys() & new.keys())
        if old[name] != new[name]
    ] + [
        f"folders: column {name!r} {'stands in their names now' if name in new else 'stood in their names'}"
        for name in sorted(old.keys() ^ new.keys())
    ]


def _other_types(old: Mapping[str, str], new: Mapping[str, str]) -> set[str]:
    """The columns whose types are asked for in one of two jobs, and not in the other or otherwise."""
    before, now = (json.loads(options.get(_TYPES) or "{}") for options in (old, new))
    return {name for name in {*before, *now} if before.get(name) != now.get(name)}


def sealed(new: Fingerprint, stored: Iterable[Mapping[str, str]]) -> Fingerprint:
    """With values of the environment as digests whose salt is that of the stored ones, which these so equal where the
    values do; a new salt where there are none.
    """
    if not any(isinstance(digest, Secret) for digest in new.code.values()):
        return new
    salts = (salt for code in stored for digest in code.values() if (salt := salt_of(digest)) is not None)
    salt = next(salts, None) or os.urandom(16)
    code = {name: seal(digest, salt) if isinstance(digest, Secret) else digest for name, digest in new.code.items()}
    return dataclasses.replace(new, code=code)


def without_written(new: Fingerprint, written: frozenset[str]) -> Fingerprint:
    """Without the files at these paths, which arguments name and the code writes itself, as a log."""
    looked = {name: at for name, at in new.looked.items() if name not in written}
    return dataclasses.replace(new, code=_but(new.code, written), looked=looked, written=written)


def _but(code: Mapping[str, str], written: frozenset[str]) -> dict[str, str]:
    return {name: digest for name, digest in code.items() if not written or file_path(name, code) not in written}


def file_path(name: str, code: Mapping[str, str]) -> str | None:
    """The path in the name of a file's entry among digests of code; None for another entry. What names the file stands
    behind it in brackets, and has an entry of its own; the path may have brackets, too.
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
            way = "move it away to go on as before, also if the code writes it itself"
            lines.append(f"{section}: {name} was not there ({way})")
        elif file and now is None:
            lines.append(f"{section}: {name} is gone (put it back to go on as before)")
        elif name.startswith(HELD) and None in (before, now):
            lines += [] if _OTHER_TABLE in lines else [_OTHER_TABLE]
        elif section == "input" and now is None:
            lines.append(f"input: {name} is not in the source any more")
        elif before is None or now is None:
            lines.append(f"{section}: {name} is {'new' if before is None else 'gone'}")
        elif section == "input":
            lines.append(_input_line(name, before, now))
        elif len(before) == len(now) == 64 or before.startswith(SEALED):  # digests
            way = " (to go on as before put it back; of a folder, move away what came into it)" if file else ""
            lines.append(f"{section}: {name} changed{way}")
        else:
            lines.append(f"{section}: {name} was {_short(before)}, is {_short(now)}")
    return lines


def _apart(before: str | None, now: str | None) -> tuple[str, str]:
    """Two values of an option as short texts that differ: of long ones the first place where they do."""
    shown = [("not given", "") if text is None else (_short(text), text) for text in (before, now)]
    if shown[0][0] == shown[1][0]:
        pairs = enumerate(zip(*(text for _, text in shown), strict=False))
        same = next((n for n, (a, b) in pairs if a != b), min(len(text) for _, text in shown))
        shown = [(f"…{text[max(0, same - 20) : same + 30]}…", text) for _, text in shown]
    return shown[0][0], shown[1][0]


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:12] + "…"


def listed(lines: list[str]) -> str:
    """Difference lines as text, not more than a screen."""
    more = len(lines) - MOST_LINES
    return "\n".join(f"  {line}" for line in lines[:MOST_LINES]) + (f"\n  … and {more} more" if more > 0 else "")
