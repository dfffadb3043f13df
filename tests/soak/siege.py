"""A siege: the life of one sink under harm, decided by a seed. Every verb is repeated until it has succeeded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

from gristmill.commit import generation as generations
from gristmill.commit.ledger import Ledger
from gristmill.driver.probe import PROBE_ROWS
from gristmill.driver.selection import Held
from gristmill.files.disk import LOCAL
from soak import rows as R
from soak import witness
from soak.harm import TAG, Harm, nothing_left, send, tagged
from soak.reading import Reader
from soak.witness import Broken

VERBS = ("append", "restart", "restart new", "retry", "retry cured", "again", "refused")
SIGNALLED = {0, -2, -9, -15, 130, 143}
BUSY = 75  # another command has the sink


@dataclass(frozen=True)
class Setting:
    """What a siege is about: source, sink, steps and how it runs."""

    source: str
    sink: dict[str, Any]
    shape: R.Shape
    model: dict[str, Any]
    engine: dict[str, Any]
    running: dict[str, Any]
    rows: int
    poison: tuple[str, ...]
    reader: bool

    @property
    def keep(self) -> list[str]:
        return list(self.sink["keep"])


def setting(chance: Random, without: tuple[str, ...]) -> Setting:
    """A random one. `without` leaves out formats, features, poison or signals by their names."""

    def some(*names: Any) -> Any:
        return chance.choice([n for n in names if n not in without] or [names[0]])

    flat = some("flat_map", None) is not None
    shape = R.Shape(chance.random() < 0.5, chance.random() < 0.5, flat, flat and chance.random() < 0.5,
                    some("post", None) is not None)  # fmt: skip
    form = some("parquet", "jsonl", "npy")
    keep = ["id", "day", *["part"] * flat]
    sink: dict[str, Any] = {"uri": "out", "format": form, "keep": keep}
    if form == "jsonl" and (codec := some(None, "gz", "zst")):
        sink["options"] = {"compression": codec}
    layout = some(None, "merge", "files", *["partition"] * (form != "npy"))
    sink |= {"partition": {"partition_by": ["day"]}, "merge": {"merge": True}, "files": {"files": 3}}.get(layout, {})
    if form != "npy" and some("sort_by", None):
        sink["sort_by"] = ["day", "id"]
    if some("row_id", None):
        sink["row_id"] = "row_id"
    shown = some("numpy", "rows", "arrow", "pandas", "polars")
    returned = some("numpy", "rows", "arrow", "pandas", "polars", "views")
    model: dict[str, Any] = {"call": "soak.scoring:Scorer", "batch_format": shown, "args": {"shape": returned}}
    if some("returns", None) or returned == "rows":
        model["returns"] = {"y": "float64", "w": "int64", "t": "string", "vec": "float32[4]"}
    kinds = [k for k in ("raise", "nan", "inf", "odd", "sysexit", "memory", *R.KILLERS) if k not in without]
    plain = [k for k in kinds if k not in R.KILLERS]
    bad = R.poison(chance, shape, plain, chance.choice([0, 2, 5])) if plain else []
    killers = [k for k in kinds if k in R.KILLERS]
    bad += R.poison(chance, shape, killers, chance.choice([0, 0, 1, 2])) if killers else []
    if "post killers" in without:
        bad = [b for b in bad if not (b.startswith("post:") and b.rstrip("!").split("@")[0].endswith(R.KILLERS))]
    if "neighbours" not in without and chance.random() < 0.1:
        bad += ["model:raise"] * 25
    engine = {"workers": chance.choice([1, 2, 2, 3]), "steps_workers": 1 if some("steps_workers", *[None] * 4) else 0}
    running = {"shard_rows": chance.choice([20, 40, 90]), "batch_rows": chance.choice([7, 16]), "batch_timeout": 2}
    model["args"]["pace"] = chance.choice([0.01, 0.03, 0.06])
    source = some("parquet", "jsonl", "jsonl.gz", "csv")
    rows = 100 if "long" in without else chance.choice([150, 400, 800])
    return Setting(source, sink, shape, model, engine, running, rows, tuple(bad), some("reader", None) is not None)


@dataclass
class Tally:
    """What a siege did."""

    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{k} {n}" for k, n in sorted(self.counts.items()))


OWN_FILE = "if the code writes it itself, move it away first"  # what the next run says of it, and what is done then


class Siege:
    """One sink from its first run to its last verb. Raises Broken where an oracle does not hold."""

    def __init__(self, name: str, folder: Path, without: tuple[str, ...], tally: Tally) -> None:
        self.name, self.folder, self.without, self.tally = name, folder, without, tally
        self.setting = setting(Random(f"{name}/setting"), without)
        self.sink, self.cures, self.log = str(folder / "out"), str(folder / "cures"), folder / "calls"
        self.story: list[str] = []
        self.files: list[R.File] = []
        self.version = 1
        self.published: R.Result | None = None
        self._history = [""]
        self._stopped = False  # whether a driver of the last command was stopped, beside one that ended
        self._ids: dict[Any, Any] = {}
        self._made = 0

    def run(self) -> None:
        """The whole siege."""
        for part in ("in", "cures"):
            (self.folder / part).mkdir()
        chance = Random(f"{self.name}/verbs")
        count = 1 if "long" in self.without else chance.choice([2, 4, 6])
        verbs = ["new", *chance.choices([v for v in VERBS if v not in self.without], k=count)]
        tables = self.setting.sink["format"] != "npy"  # which gm.read does not read
        reader = Reader(self.sink, self.folder / "seen") if self.setting.reader and tables else None
        try:
            for number, verb in enumerate(verbs):
                self._verb(verb, Random(f"{self.name}/{number}"))
        finally:
            if reader is not None:
                reader.stop()
            send([p.pid for p in tagged(self.name)], "KILL")
        if reader is not None:
            self.tally.counts["reads"] += reader.check(self._history)

    # ------------------------------------------------ verbs

    def _verb(self, verb: str, chance: Random) -> None:
        self.tally.counts[f"verb {verb}"] += 1
        if verb == "refused":
            return self._refused(chance)
        if verb in ("new", "append", "restart new"):
            self._more_files(chance, 2 if verb == "new" else 1)
        if verb == "restart new":
            self.version += 1
        if verb == "retry cured":
            self._cure(chance)
        flags = {"new": [], "again": [], "append": ["--append"]}.get(verb, ["--restart"])
        if verb.startswith("retry"):
            flags = ["retry-dead"]
        wanted = self._wanted(verb)
        calm = verb == "again" or chance.random() < 0.1
        self._until_done(
            flags, wanted, chance, 0 if calm else chance.choice([1, 3] if "long" in self.without else [3, 6, 12, 20])
        )

    def _wanted(self, verb: str) -> R.Result:
        args = (self.files, self.setting.shape, self.setting.keep, self.version, self.cures)
        if verb in ("new", "restart", "restart new"):
            return R.scored(*args)
        assert self.published is not None
        if verb == "append":
            return R.appended(self.published, *args)
        return self.published if verb == "again" else R.retried(self.published, *args)

    def _refused(self, chance: Random) -> None:
        """Other code on a sink that holds a result: exit 4, and nothing is changed."""
        extra = chance.choice([[], ["--append"]])
        self._refuse_other(extra)
        self._check()

    def _refuse_other(self, extra: list[str]) -> int:
        self._write_job(self.version + 100)
        code, text = self._once(extra, None)
        self._write_job(self.version)
        if code != 4:
            raise Broken(f"other code, {extra}: exit {code}, wanted 4: {text[-1500:]}")
        return code

    def _until_done(self, flags: list[str], wanted: R.Result, chance: Random, kills: int) -> None:
        self._write_job(self.version)
        self._history.append(witness.digest(wanted.ok()))
        harm = Harm(chance, kills, self.without)
        self.story.append(" ".join(["run", *flags]))
        code = 0
        for attempt in range(40):
            killed = code < 0
            several = chance.random() < 0.15 and "two" not in self.without
            before = self._remaining() if attempt and not several else None
            began = self._size()
            code, text = self._once(flags, harm, several)
            self.story.append(f"{'2x' * several}{code}[{','.join(harm.log)}]")
            harm.log.clear()
            if code == 4 and OWN_FILE in text:  # it came in the last moment before the kill
                if not killed:
                    raise Broken(f"its own file was changed, and nothing was killed: {_said(text)[-1500:]}")
                self.log.rename(self.log.with_suffix(f".{attempt}"))
                self.tally.counts["logs moved away"] += 1
                continue
            self._check_calls(before, began, text)
            witness.nothing_partial(self.sink)
            if code == 0 and not self._stopped:  # the other may have begun the next generation before it was
                break
            if self.published is not None and chance.random() < 0.2:
                self._refuse_other([])
        else:
            raise Broken(f"{flags}: not done after 40 attempts: {text[-1500:]}")
        self.tally.counts.update({f"signal {k}": n for k, n in harm.done.items()})
        self.tally.counts["signals"] += harm.done.total()
        self.published = wanted
        self._check(text)

    def _check(self, text: str = "") -> None:
        assert self.published is not None
        s = self.setting
        witness.whole(
            self.sink,
            self.published,
            has_parts=s.shape.flat_map,
            ordered=not s.sink.keys() & {"partition_by", "sort_by"},
        )
        self.tally.counts["checks"] += 1
        self.tally.counts["rows checked"] += len(self.published.outcomes)
        report = [x for line in text.splitlines() if (x := _json(line)).get("event") == "report"]
        for counts in report[-1:]:
            wanted = witness.counted(self.published)
            witness.same({k: counts.get(k) for k in wanted}, wanted, "the report's counts")
        if s.sink.get("row_id"):
            for row in witness.by_read(self.sink):
                plain = dict(row)
                known = self._ids.setdefault((plain["id"], plain.get("part")), plain["row_id"])
                witness.same(plain["row_id"], known, "the row_id of a row that had one before")

    # ------------------------------------------------ runs

    def _once(self, flags: list[str], harm: Harm | None, several: bool = False) -> tuple[int, str]:
        """The command, once, or in two processes at the same time. The least exit code, and what was printed."""
        command = [sys.executable, "-m", "gristmill"]
        command += (
            ["retry-dead", "out", "--job", "job.yaml"] if flags == ["retry-dead"] else ["run", "job.yaml", *flags]
        )
        runs, logs = [], []
        for number in range(2 if several else 1):
            logs.append(self.folder / f"printed{number}")
            with open(logs[-1], "wb") as out:
                runs.append(
                    subprocess.Popen(
                        [*command, "--progress", "json"], stdout=out, stderr=out, cwd=self.folder,
                        env={**os.environ, TAG: self.name},
                    )
                )  # fmt: skip
        self.tally.counts["runs"] += len(runs)
        quiet = Harm(Random(0), 0, ())
        try:
            (harm or quiet).attend(runs, slowest=2.0)
        except Broken as e:
            send([p.pid for p in tagged(self.name)], "KILL")
            raise Broken(f"{e}: {_said(logs[0].read_text())[-1500:]}") from None
        finally:
            for run in runs:
                run.wait()
        nothing_left(self.name, harm.log if harm else [])
        codes, texts = [r.returncode for r in runs], [log.read_text(errors="replace") for log in logs]
        for code, text in zip(codes, texts, strict=True):
            self.tally.counts[f"exit {code}"] += 1
            self._check_code(code, text, harm, several)
        self._stopped = any(code not in (0, BUSY) for code in codes)
        best = codes.index(0) if 0 in codes else 0
        return codes[best], texts[best]

    def _check_code(self, code: int, text: str, harm: Harm | None, several: bool) -> None:
        if harm is None or (code in SIGNALLED and (code == 0 or harm.log)) or (code == BUSY and several):
            return
        if code == 4 and OWN_FILE in text:
            return  # by what a killed run wrote last, as the caller sees
        killed = any(hit.startswith(("KILL", "STOP", "PAUSE")) for hit in harm.log)
        if (
            code == 1
            and killed
            and any(w in text for w in ("workers in a row", "killed from outside", "times in a row"))
        ):
            return
        starting = any(words in text for words in ("Could not import runpy module", "init_import_site"))
        if code == 1 and starting and any("INT" in hit for hit in harm.log):
            return  # by CPython's own start, before there is any of our code
        raise Broken(f"exit {code} after {harm.log}: {_said(text)[-2500:]}")

    def _check_calls(self, remaining: int | None, began: int, text: str) -> None:
        """(c) after a resume the model is called for no committed shard: not for more rows than are left, and, where it
        failed on all of these, those that prove that it works on others.
        """
        if remaining is None:
            return
        remaining += PROBE_ROWS * ("every row fails" in text)
        with open(self.log) as calls:
            calls.seek(began)
            called = {line.split()[0] for line in calls}
        if len(called) > remaining:
            raise Broken(f"the model was called for {len(called)} rows, and {remaining} were left to be scored")

    def _remaining(self) -> int | None:
        """How many source rows the unfinished run has left at most; None where none stands."""
        import gristmill as gm

        if self.setting.source != "parquet" or not os.path.exists(self.sink):
            return None  # text is cut by bytes, not by rows
        if gm.status(self.sink).get("state") != "unfinished":
            return None
        begun = Held.by(self.sink, LOCAL).unfinished
        if begun is None or not begun.planned:
            return None
        shards = generations.read_plan(begun).shards  # of which some have more rows than `shard_rows`
        return shards.weight_of(Ledger.of(begun).missing(len(shards)))

    def _size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    # ------------------------------------------------ the world

    def _more_files(self, chance: Random, count: int) -> None:
        s = self.setting
        for number in range(count):
            name = f"{len(self.files):03d}.{s.source}"
            size = s.rows if number == 0 else chance.choice([1, 60, 150])
            bad = s.poison if number == 0 and not self.files else s.poison[:1]
            file = R.make_file(chance, name, self._made, size, bad, s.shape)
            self._made += size
            R.write(self.folder / "in", file, chance)
            self.files.append(file)

    def _cure(self, chance: Random) -> None:
        """Some of the curable rows are well from now on."""
        for file in self.files:
            for row in file.rows:
                if row.fate.endswith("!") and chance.random() < 0.7:
                    Path(self.cures, str(row.id)).touch()

    def _write_job(self, version: int) -> None:
        s = self.setting
        cures = {"cures": self.cures}

        def step(kind: str, name: str, form: str) -> dict[str, Any]:
            args = {} if name == "admitted" else {"args": cures}
            return {kind: f"soak.scoring:{name}", "batch_format": form, **args}

        steps: list[dict[str, Any]] = [{"filter": "fate <> 'drop'"}]
        steps += [step("map", "before", "arrow")] * s.shape.before
        steps += [step("filter", "admitted", "numpy")] * s.shape.admitted
        steps += [step("flat_map", "expand", "rows")] * s.shape.flat_map
        steps += [step("map", "after", "numpy")] * s.shape.after
        source: dict[str, Any] = {"uri": f"in/*.{s.source}"}
        if s.source != "parquet":
            source["types"] = R.TYPES
        args = {**s.model["args"], "version": version, "log": str(self.log), **cures}
        job = {
            "source": source,
            "steps": steps,
            "model": {**s.model, "args": args},
            "post": [step("map", "post", "numpy")] * s.shape.post,
            "sink": s.sink,
            "gates": {"min_ok": 0, "warn_failed": 1},
            "engine": s.engine,
            "running": s.running,
        }
        hidden = self.folder / ".job.yaml"
        hidden.write_text(yaml.safe_dump(job, allow_unicode=True))
        hidden.replace(self.folder / "job.yaml")


def _json(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _said(text: str) -> str:
    """What was printed beside the progress."""
    return "\n".join(line for line in text.splitlines() if _json(line).get("event") != "progress")
