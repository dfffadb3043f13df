"""Alerts: who is told of which incident, in which words. Each is told once (incidents.py), by a thread of its own a
channel, so that one that hangs keeps nobody from hearing of it.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field, replace
from datetime import datetime, timezone
from typing import Any

from gristmill import __version__
from gristmill.job.recipients import Alert, hidden_in
from gristmill.job.secret import reveal
from gristmill.observe import units
from gristmill.observe.channels import run_command, send_mail
from gristmill.observe.events import Progress
from gristmill.observe.incidents import Book, Open
from gristmill.observe.outbox import Outbox
from gristmill.observe.posting import NotTold, post
from gristmill.observe.teller import Begun, Ended, Sign
from gristmill.values import dataclass

WITHIN_S = 8.0  # seconds that one alert may take, all tries together
MOST_TEXT = 2000  # characters of an error's text: Slack takes 40,000, a telephone shows 200
_SAYS = {
    "failed": "failed",
    "late": "is late",
    "gate": "was not published: a gate did not hold",
    "drift": "has drifted: data or answers are not as before",
    "dead": "has dead rows",
    "skipped": "left out files that cannot be read",
    "recovered": "is well again",
}
_OVER = {  # said of one that is over while others are open
    "failed": "no longer fails",
    "late": "is no longer late",
    "gate": "is no longer held back by a gate",
    "drift": "no longer drifts",
    "dead": "has no dead rows any more that are to be told",
    "skipped": "no longer leaves out files",
}


@dataclass(frozen=True)
class Message:
    """An alert as it is sent. `kind` is that of the incident, or "recovered"; `of` is what it recovered from, and
    `still` the kinds that are open. Times are RFC 3339; `run` is the one that showed it, `rows` are those of the run,
    empty if none was scored yet. `changes` is how often an incident has been told again, as it was another or worse.
    """

    kind: str
    job: str
    sink: str
    text: str
    incident: str
    since: str
    of: str = ""
    run: str = ""
    host: str = field(default_factory=socket.gethostname)
    rows: Mapping[str, int] = field(default_factory=dict)
    look: str = ""
    next: str = ""
    version: str = __version__
    still: tuple[str, ...] = ()
    changes: int = 0

    @property
    def headline(self) -> str:
        """What happened, in one line."""
        if self.kind == "recovered" and self.still:
            return f"{self.job} {_OVER.get(self.of, f'is over {self.of}')}; still open: {', '.join(self.still)}"
        return f"{self.job} {_SAYS.get(self.kind, self.kind)}"

    @property
    def lines(self) -> list[str]:
        """All of it for a person."""
        counts = ", ".join(f"{units.count(n)} {name}" for name, n in self.rows.items())
        after = f"after: {self.of}, since {self.since}" if self.of else ""
        again = f"told again, as it is another, or worse; open since {self.since}" if self.changes and not after else ""
        rows, look = f"rows: {counts}" if counts else "", f"$ {self.look}" if self.look else ""
        return [
            line for line in (self.text, after, again, rows, look, f"next: {self.next}" if self.next else "") if line
        ]

    def as_slack(self) -> dict[str, Any]:
        """In Slack's form, which Mattermost, Rocket.Chat and Discord (…/slack) take, too."""
        sign = (
            ":white_check_mark:"
            if self.kind == "recovered"
            else ":warning:"
            if self.kind in ("dead", "skipped")
            else ":x:"
        )
        first, *others = (
            line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for line in self._whole()
        )
        return {"text": "\n".join([f"{sign} *{first}*", *others])}

    def as_json(self) -> dict[str, Any]:
        """All that is known, for programs."""
        return {"source": "gristmill", "headline": self.headline, **asdict(self)}

    def _whole(self) -> list[str]:
        return [self.headline, *self.lines]


class Alerts:
    """Tells everybody whom a job's `alerts` name of its incidents. `book` gives the book of incidents for a file, or
    for the sink (None).
    """

    def __init__(self, alerts: Sequence[Alert], book: Callable[[str | None], Book]) -> None:
        books = {state: book(state) for state in {one.state for one in alerts}}
        names: list[str] = []
        for one in alerts:  # two of the same kind, at one host, are told apart by their order
            same = sum(name.split(" #")[0] == one.shown for name in names)
            names.append(f"{one.shown} #{same + 1}" if same else one.shown)
        self._desks = [_Desk(one, name, books[one.state]) for one, name in zip(alerts, names, strict=True)]
        eased = frozenset(desk.name for desk in self._desks if "recovered" in desk.alert.on)
        for desk in self._desks:
            desk.eased = eased
        self._signs: dict[str, Sign] = {}
        self._run = ""

    def began(self, run: Begun) -> None:
        """Tell what an earlier run could not, and how earlier runs ended that could tell nothing themselves."""
        self._run = run.run
        self._each("began", run)
        for one, how in run.died:
            self._each("raised", Sign("failed", how, ("killed",)), one)

    def progress(self, now: Progress) -> None:
        """Nothing is told of a run that runs."""

    def raised(self, sign: Sign) -> None:
        """An incident, or one more sign of one that is open."""
        before = self._signs.get(sign.kind)
        if before is not None and set(sign.what) <= set(before.what):
            return
        if before is not None:
            sign = replace(sign, what=(*before.what, *(w for w in sign.what if w not in before.what)))
        self._signs[sign.kind] = sign
        self._each("raised", sign, self._run)

    def ended(self, end: Ended) -> None:
        """What came of the run: an incident, or the end of those that it did not raise."""
        self._each("counted", end)
        if end.incident is not None:
            self.raised(end.incident)
        elif end.good:
            # If nothing was scored, what is published has the drift that it had, and its dead rows, unless they were
            # scored again by somebody who told nobody.
            same = () if end.state == "done" else ("drift", "dead") if end.rows_dead else ("drift",)
            self._each("over", frozenset({*self._signs, *same}))

    def close(self, until: float) -> list[str]:
        lines = [line for desk in self._desks for line in desk.box.close(until)]
        return [f"alert to {line}; it is tried again with the next run" for line in lines]

    def _each(self, *thing: Any) -> None:
        for desk in self._desks:
            desk.box.put(thing)


class _Desk:
    """One who is told. Everything here but `box.put` is in the thread of its outbox."""

    def __init__(self, alert: Alert, name: str, book: Book) -> None:
        self.alert, self.name, self._book = alert, name, book
        self.eased: frozenset[str] = frozenset()
        self.box = Outbox(name, self._do, within=WITHIN_S)
        self._run: Begun | None = None
        self._rows: dict[str, int] = {}
        self._way = ("", "")  # the kind of the incident, and what to do about it

    def _do(self, thing: tuple[Any, ...], until: float) -> None:
        what, *values = thing
        if what == "began":
            self._run = values[0]
            for one in self._untold():
                self._tell(one, until)
        elif what == "counted":
            end: Ended = values[0]
            counts = {"in": end.rows_in, "ok": end.rows_ok, "dead": end.rows_dead, "filtered": end.rows_filtered}
            self._rows = counts if end.rows_in else {}
            self._way = "" if end.incident is None else end.incident.kind, end.way
        elif what == "raised":
            sign, run = values
            self._raised(sign, run, until)
        else:
            self._book.over(values[0])
            for one in self._untold():
                self._tell(one, until)
            self._book.swept(self.eased)

    def _raised(self, sign: Sign, run: str, until: float) -> None:
        try:
            found = self._book.raised(sign, run)
        except OSError:  # a full disk: better told twice than never
            if sign.kind in self.alert.on:
                self._send(self._message(Open("", self._book.job, sign.kind, sign.text, 0.0, run=run)), until)
            raise
        if self.name not in found.told and sign.kind in self.alert.on:
            self._tell(found, until)

    def _untold(self) -> list[Open]:
        """Incidents that this one does not know of, and ends of those that it does."""
        known = self._book.mine()
        new = [one for one in known if one.over is None and one.kind in self.alert.on and self.name not in one.told]
        done = [one for one in known if one.over is not None and self.name in one.known and self.name not in one.eased]
        return new + (done if "recovered" in self.alert.on else [])

    def _tell(self, incident: Open, until: float) -> None:
        still = tuple(sorted(one.kind for one in self._book.mine() if one.over is None)) if incident.over else ()
        self._send(self._message(incident, still), until)
        self._book.told(incident, self.name, self.eased)

    def _message(self, one: Open, still: tuple[str, ...] = ()) -> Message:
        run, over = self._run, one.over is not None
        sink, now = ("", "") if run is None else (run.sink, run.run)
        by = now if over else one.run or now
        rows = self._rows if by == now else {}
        what = "dead" if one.kind == "dead" or (one.kind == "gate" and rows.get("dead")) else "status"
        look = "" if not sink or over else f"gristmill {what} {shlex.quote(sink)}"
        since = datetime.fromtimestamp(one.since, timezone.utc).isoformat(timespec="seconds") if one.since else ""
        return Message(
            "recovered" if over else one.kind, one.job if run is None else run.job, sink,
            "" if over else one.text[:MOST_TEXT], one.id, since, one.kind if over else "",
            by, rows=rows, look=look, next=self._way[1] if not over and self._way[0] == one.kind and by == now else "",
            still=still, changes=one.changes,
        )  # fmt: skip

    def _send(self, message: Message, until: float) -> None:
        alert, plain = self.alert, json.dumps(message.as_json(), ensure_ascii=False, default=str).encode()
        if alert.webhook:
            address = reveal(alert.webhook)
            slack = alert.form == "slack" or (alert.form == "auto" and _is_slack(address))
            body = json.dumps(message.as_slack()).encode() if slack else plain
            key = f"{message.incident}-{message.kind}" + (f"-{message.changes}" if message.changes else "")
            own = {"Content-Type": "application/json", "Idempotency-Key": key}
            post(address, body, {**own, **{n: str(v) for n, v in reveal(alert.headers).items()}}, until)
        elif alert.email:
            send_mail(alert, f"[gristmill] {message.headline}", "\n\n".join(message.lines), until)
        elif alert.command:
            said = {"GRISTMILL_ALERT": message.kind, "GRISTMILL_ALERT_TEXT": f"{message.headline}: {message.text}"}
            words, hidden = shlex.split(reveal(alert.command)), hidden_in([alert])
            run_command(words, plain + b"\n", {**os.environ, **said}, until, hidden)
        else:
            raise NotTold("nobody to tell")


def _is_slack(address: str) -> bool:
    host, _, path = address.partition("://")[2].partition("/")
    return host.endswith("slack.com") or path.partition("?")[0].rstrip("/").endswith("/slack")
