"""The report of a run: the counts that prove it, its speed, how to read what it published; and all this as text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from typing import TYPE_CHECKING, Any, TextIO

from gristmill.observe import units
from gristmill.observe.events import Loaded
from gristmill.observe.streams import is_terminal, width_of
from gristmill.observe.tables import clip
from gristmill.shards.counts import Counts
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.commit.documents import Delivered, Drifted
    from gristmill.files.contract import Files

DIGEST = 12  # characters of a digest to show: enough to distinguish any two models of a project
WORTH_FORESEEING = 60.0  # seconds: of a shorter run nobody asks how long it would take
BUSY = 0.95  # share of the time above which nothing is reported as holding the model back
MOST_ERRORS = 3
MOST_WORKERS = 16  # workers up to which each has a line
TEXT_WIDTH = 120  # columns of a report as text

Row = tuple[str, str, str]


@dataclass(frozen=True)
class WorkerPace:
    """What one worker did in a run: source rows that it committed, and the seconds from when its model was loaded to
    its last message. `host` is "" if it is not known.
    """

    worker: str
    host: str = ""
    rows: int = 0
    seconds: float = 0.0

    @property
    def rows_per_second(self) -> float:
        """Its own throughput."""
        return self.rows / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Report:
    """A finished (or stopped) run. `rows_*` and `errors` cover all live generations of the sink (for a run that has not
    published: what it committed itself), `shards` are the run's own; times are in seconds, sizes in bytes.

    `used` is what an endpoint was asked for (requests, prompt_tokens, completion_tokens, cost in dollars, and
    `refused`, the rows whose answer is an error; of a run that has not published also `kept`, the answers to rows that
    are not committed, which the next run has, `batched`, how many more are in batches, and `again`, the rows whose
    answers it has no use for and asks again), `padding` is the share of padded tokens that were padding, `busy` the
    share of the workers' time in the model, and `held_back` the shares in which it waited for "rows" (reading, steps,
    tokenising), for "writing", and for the rest; empty if the run was too short to tell. `updated` has how many source
    rows were "kept", "scored" and, if that is known, "gone" since the result before, for an update.
    """

    sink: str
    state: str
    generation: int
    counts: Counts
    shards: int
    shards_resumed: int
    seconds: float
    model: str
    digest: str
    workers: int
    engine: str = "local"
    files: int = 0
    bytes_out: int = 0
    model_seconds: float = 0.0
    busy: float | None = None
    held_back: Mapping[str, float] = field(default_factory=dict)
    padding: float | None = None
    tokens: int | None = None
    used: Mapping[str, float] = field(default_factory=dict)
    rows_run: int = 0
    shards_done: int = 0
    per_worker: tuple[WorkerPace, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # files of the source that could not be read, with the reason
    format: str = "parquet"  # of the sink
    details: Mapping[str, Any] = field(default_factory=dict)
    updated: Mapping[str, int] = field(default_factory=dict)
    drift: tuple[Drifted, ...] = ()  # how far columns are from those of the result before
    deliveries: tuple[Delivered, ...] = ()  # receipts of the stores that the result is in
    delivering: float = 0.0  # seconds of `seconds` in which it was brought there, once it was published
    opened: tuple[str, Files] | None = field(default=None, repr=False, compare=False)  # the sink's root and file layer

    @property
    def rows_in(self) -> int:
        """Source rows of the live result."""
        return self.counts.rows_in

    @property
    def rows_ok(self) -> int:
        """Rows scored and written."""
        return self.counts.ok

    @property
    def rows_dead(self) -> int:
        """Rows in the dead letters, source rows and derived ones."""
        return self.counts.dead + self.counts.derived_dead

    @property
    def rows_filtered(self) -> int:
        """Rows left out on purpose by where, filter steps or on_null=skip."""
        return self.counts.filtered + self.counts.derived_filtered

    @property
    def rows_per_second(self) -> float:
        """Source rows that this run itself scored, by its wall time without that of deliveries."""
        seconds = self.seconds - self.delivering
        return self.rows_run / seconds if seconds > 0 else 0.0

    def __str__(self) -> str:
        """The table that the command line shows: what became of every row, how fast the run was, what comes next."""
        return "\n".join([headline(self), *_lines(summary_rows(self), TEXT_WIDTH), *after(self)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # what IPython and notebooks show
        printer.text(str(self))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(replace(self, opened=None))
        del plain["opened"]
        paces = [{**asdict(w), "rows_per_second": round(w.rows_per_second, 2)} for w in self.per_worker]
        return {
            **plain,
            "per_worker": paces,
            "rows_in": self.rows_in,
            "rows_ok": self.rows_ok,
            "rows_dead": self.rows_dead,
            "rows_filtered": self.rows_filtered,
            "rows_per_second": round(self.rows_per_second, 2),
        }

    def read(self) -> Any:
        """A pyarrow Dataset of exactly the published parts. Raises BadSource for npy, like gm.read."""
        from gristmill.result.reading import read

        return read(*self._place)

    def dead(self) -> Any:
        """The dead letters as an Arrow table; for a run that has not published, those of its committed shards."""
        from gristmill.result.reading import dead

        return dead(*self._place, generation=self.generation)

    @property
    def _place(self) -> tuple[str, Files]:
        from gristmill.files.roots import opened

        return self.opened or opened(self.sink)


# ---------------------------------------------------------------- as text


def show_report(report: Report, stream: TextIO) -> None:
    """Write a report for a person. Raises what writing to the stream raises."""
    width = width_of(stream)
    lines = [*_lines(summary_rows(report), width), *after(report)]  # commands are to be copied: uncut at any width
    title = clip(headline(report), width)
    if not is_terminal(stream):
        stream.write("\n".join([title, *lines]) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    console.print(Text(title, style="bold" if report.state in ("done", "nothing to do") else "bold yellow"))
    for text in lines:
        drawn = Text(text)
        drawn.highlight_regex(r"^ *dead +[\d,]*[1-9][\d,]*", "red")
        drawn.highlight_regex(r"^ *ok +[\d,]+", "green")
        console.print(drawn, soft_wrap=True)


def headline(report: Report) -> str:
    """What happened, in one line."""
    if report.state == "nothing to do":
        return f"{report.sink}: nothing to do, all rows are published"
    if report.state == "done":
        return f"{report.sink}: done in {units.seconds(report.seconds)}"
    if report.state.startswith("published"):
        return f"{report.sink}: {report.state}"
    return f"{report.sink}: {report.state} after {units.seconds(report.seconds)}, not published"


def summary_rows(report: Report) -> list[Row]:
    """The report's lines as label, figure, remark. The counts add up: indented lines sum to the line above."""
    whole = report.state in ("done", "nothing to do") or report.state.startswith("published")
    rows = count_rows(report.counts, report.errors) if whole or report.rows_in else []
    if not whole and rows:
        rows[0] = ("committed", *rows[0][1:])
    if report.updated:
        rows.append(("kept", units.count(report.updated["kept"]), _updated(report.updated)))
    if report.skipped:
        rows.append(("skipped", units.count(len(report.skipped)), f"not read: {'; '.join(report.skipped)}"))
    if report.files:
        rows.append(("files", units.count(report.files), units.size(report.bytes_out)))
    resumed = report.shards_resumed
    remark = f"{units.count(resumed)} were done before" if resumed and report.state != "nothing to do" else ""
    of = "" if whole else f"of {units.count(report.shards)}"
    if whole or report.shards:  # else there was no plan yet
        rows.append(("shards", units.count(report.shards_done), ", ".join(part for part in (of, remark) if part)))
    if report.rows_run and report.state != "nothing to do":
        rows.append(("speed", units.short_rate(report.rows_per_second), _pace(report)))
        rows += _paces(report)
    digest = report.digest.removeprefix("sha256:")[:DIGEST]
    rows.append(("model", "", f"{report.model} {digest}".strip()))
    if registered := report.details.get("registered"):
        rows += [("  version", "", _registered(one)) for one in (registered, *report.details.get("registered_too", ()))]
    if report.used:
        rows.append(("asked", "", asked(report.used)))
    if (on_time := report.details.get("on_time")) and (text := _on_time(on_time)):
        rows.append(("time", "", text))
    if runs_on := report.details.get("runs_on"):
        rows.append(("on", "", _runs_on(runs_on)))
    rows += [(label, "", text) for label, text in drift_rows(report.drift)]
    for d in report.deliveries:
        rows.append(("delivered", units.count(d.rows), f"{d.mode} in {units.seconds(d.seconds)}, {d.to}"))
        if d.beyond:
            rows.append(("  beside", units.count(d.beyond), _OTHERS))
    return rows


_OTHERS = "of earlier nights or of others (delete: true removes them)"


def store_line(one: Mapping[str, Any]) -> str:
    """What `status` knows of a store: `duckdb:///s.duckdb#t: delivered, generation 2: 40 rows by upsert in 0.2 s`."""
    if under_way := one.get("delivering"):
        return f"{one['to']}: delivering, {Loaded(**under_way).brief}"
    if "rows" not in one:
        return f"{one['to']}: {one['state']}"
    rows = f"{units.plural(one['rows'], 'row')} by {one['mode']} in {units.seconds(one['seconds'])}"
    return f"{one['to']}: {one['state']}, generation {one['generation']}: {rows}{others(one['beyond'])}"


def others(beyond: int | None) -> str:
    """What to say of rows in a store that are not of the result."""
    if not beyond:
        return ""
    return f"; {units.plural(beyond, 'row')} beside them: {_OTHERS}"


def _updated(updated: Mapping[str, int]) -> str:
    """`answers made before; 12 scored, 3 gone`."""
    gone = f", {units.count(updated['gone'])} gone" if "gone" in updated else ""
    return f"answers made before; {units.plural(updated['scored'], 'row')} scored{gone}"


def drift_rows(drift: Sequence[Drifted]) -> list[tuple[str, str]]:
    """A line for each column that was compared: `drift score`, `psi 0.031, ks 0.022 (warned)`."""
    columns = dict.fromkeys(d.column for d in drift)
    said = {"held": "", "warned": " (warned)", "failed": " (over its limit)"}
    return [
        (f"drift {c}", ", ".join(f"{d.measure} {d.figure:.3g}{said[d.verdict]}" for d in drift if d.column == c))
        for c in columns
    ]


def count_rows(counts: Counts, errors: Mapping[str, int] | None = None) -> list[Row]:
    """What became of the rows. If steps turn one row into many there are two sums, of source and of derived rows."""
    why = top_errors(errors or {})
    one_level = counts.expanded == counts.derived
    if one_level:
        return [
            ("rows in", units.count(counts.rows_in), ""),
            ("  ok", units.count(counts.ok), ""),
            ("  dead", units.count(counts.all_dead), why),
            ("  filtered", units.count(counts.all_filtered), ""),
        ]
    return [
        ("rows in", units.count(counts.rows_in), ""),
        ("  expanded", units.count(counts.expanded), f"into {units.plural(counts.derived, 'row')}"),
        ("  dead", units.count(counts.dead), "" if counts.derived_dead else why),
        ("  filtered", units.count(counts.filtered), ""),
        ("rows made", units.count(counts.derived), ""),
        ("  ok", units.count(counts.ok), ""),
        ("  dead", units.count(counts.derived_dead), _of_both(why, counts)),
        ("  filtered", units.count(counts.derived_filtered), ""),
    ]


def _of_both(why: str, counts: Counts) -> str:
    if not counts.derived_dead:
        return ""
    return f"of both: {why}" if counts.dead and why else why


def top_errors(errors: Mapping[str, int]) -> str:
    """The most frequent errors: `ValueError 3, NullText 2, 4 other kinds`."""
    ranked = sorted(errors.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{name} {units.count(n)}" for name, n in ranked[:MOST_ERRORS]]
    if len(ranked) > MOST_ERRORS:
        named.append(units.plural(len(ranked) - MOST_ERRORS, "other kind"))
    return ", ".join(named)


def _pace(report: Report) -> str:
    parts = [f"{units.plural(report.workers, 'worker')}" if report.workers else "in this process"]
    if report.engine != Report.engine:  # the default, for jobs that name none
        parts.append(report.engine)
    if report.busy is not None:
        parts.append(f"model busy {units.percent(report.busy)}{_held_back(report)}")
    if report.padding is not None:
        parts.append(f"padding {units.percent(report.padding)}")
    if report.tokens and report.state == "done":
        parts.append(f"{units.count(report.tokens)} tokens")
    return ", ".join(parts)


def _paces(report: Report) -> list[Row]:
    """A line for each worker, if there are several but not too many to read."""
    if not 2 <= len(report.per_worker) <= MOST_WORKERS:
        return []
    apart = len({w.host for w in report.per_worker}) > 1
    rows = []
    for w in report.per_worker:
        parts = [w.host] if apart else []
        parts += [units.plural(w.rows, "row"), f"{units.seconds(w.seconds)} at work"]
        rows.append((f"  {w.worker}", units.short_rate(w.rows_per_second), ", ".join(parts)))
    return rows


def _held_back(report: Report) -> str:
    """What took most of the time in which the model was not busy, if that was more than a twentieth of the run."""
    if report.busy is None or report.busy >= BUSY or not report.held_back:
        return ""
    what, share = max(report.held_back.items(), key=lambda item: item[1])
    names = {"rows": "waiting for rows", "writing": "waiting for the sink", "start and end": "starting and ending"}
    return f" ({names[what]} {units.percent(share)})"


def asked(used: Mapping[str, float]) -> str:
    """What rows took of an endpoint, and what is kept: `1,204 requests, 310,221 tokens in, 40,112 out, $0.1882`."""
    parts = []
    if "requests" in used:
        tokens = [units.count(int(used.get(name, 0))) for name in ("prompt_tokens", "completion_tokens")]
        parts += [units.plural(int(used["requests"]), "request"), f"{tokens[0]} tokens in", f"{tokens[1]} out"]
    parts += [f"${used['cost']:.4f}"] if "cost" in used else []
    parts += [units.plural(int(used["refused"]), "error")] if "refused" in used else []
    parts += [f"{units.plural(int(used['kept']), 'answer')} kept for the next run"] if used.get("kept") else []
    parts += [f"{units.count(int(used['batched']))} more in batches at the provider"] if used.get("batched") else []
    again = units.plural(int(used.get("again", 0)), "row") + " to be asked again, as their answers failed"
    parts += [again] if used.get("again") else []
    return ", ".join(parts)


def _registered(told: Mapping[str, str]) -> str:
    """`reviews/3, approved for batch by anna, 2026-01-01T09:00:00+00:00`."""
    parts = [f"{told['name']}/{told['version']}"]
    if told["stage"]:
        parts.append(f"approved for {told['stage']}" + (f" by {told['approved_by']}" if told["approved_by"] else ""))
    return ", ".join([*parts, *filter(None, [told["approved_at"]])])


def _on_time(told: Mapping[str, Any]) -> str:
    """`foreseen were 1 h 50 min (4.2 % off), $5.20, deadline 06:00 missed`."""
    parts = []
    worth = "deadline" in told or told["seconds"] >= WORTH_FORESEEING
    if worth and (foreseen := told.get("foreseen")) and told["seconds"]:
        off = units.percent(abs(foreseen / told["seconds"] - 1))
        parts.append(f"foreseen were {units.seconds(foreseen)} ({off} off)")
    parts += [f"${told['cost']:,.2f}" if told["cost"] >= 0.095 else f"${told['cost']:.2g}"] if "cost" in told else []
    if "deadline" in told:
        parts.append(f"deadline {told['deadline']} {'missed' if told['late'] else 'held'}")
    return ", ".join(parts)


def _runs_on(told: Mapping[str, Any]) -> str:
    """`ONNX Runtime, float32, cpu, 1 thread a worker`; or `https://host/v1, up to 64 requests at a time, 38 put off
    (429, 503)`.
    """
    if asked := told.get("endpoint"):
        off = f", {told['put_off']:,} put off (429, 503)" if told.get("put_off") else ""
        most = f", up to {units.plural(told['at_once'], 'request')} at a time" if told["at_once"] else ""
        return f"{asked}{most}{off}"
    backend = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}.get(told.get("backend", ""), told.get("backend"))
    parts = [p for p in (backend, told.get("dtype"), told.get("device")) if p]
    return ", ".join([*parts, f"{units.plural(told['threads'], 'thread')} a worker"])


def after(report: Report) -> list[str]:
    """What to do next, as lines to copy: how to read the result and look at the dead letters."""
    if report.state not in ("done", "nothing to do"):
        return []
    from gristmill.sinks.formats import sink_format

    sink = shlex.quote(report.sink)
    lines = [f"read    gm.read({report.sink!r})"]
    if not sink_format(report.format).tables:
        named = f"pq.read_table({report.sink.rstrip('/') + '/manifest.parquet'!r})['output_path'].unique().to_pylist()"
        lines = [f"read    [np.load(os.path.join({report.sink!r}, name)) for name in {named}]"]
    if report.rows_dead:
        lines.append(f"dead    gristmill dead {sink}")
    return lines


def _lines(rows: list[Row], width: int) -> list[str]:
    label = max(len(row[0]) for row in rows)
    figure = max(len(row[1]) for row in rows)
    lines = []
    for name, number, remark in rows:
        text = f"{name:<{label}}  {number:>{figure}}"
        lines.append(clip(f"{text}  {remark}".rstrip() if number else f"{name:<{label}}  {remark}", width))
    return lines
