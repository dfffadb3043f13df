"""Which page answers which request: from what is asked for to what is answered, with nothing of sockets."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from gristmill.errors import MissingExtra, RunFailed
from gristmill.observe import units
from gristmill.observe.tables import clean
from gristmill.pages import shown
from gristmill.pages.access import Access
from gristmill.pages.asking import PATIENCE_S, Asking, Unseen
from gristmill.pages.figures import Scrapes
from gristmill.pages.server import Request, Response
from gristmill.schedule.contract import RETRY, Run, tick_of
from gristmill.schedule.entry import Scheduled
from gristmill.schedule.state import State
from gristmill.values import dataclass

GLANCE_S = 3.0  # seconds that a page waits for what is only a part of it: the rest is of more use at once
SHOWS_LATELY = 12  # of what was told
REFRESH_S, IDLE_REFRESH_S = 3, 30  # seconds until a page is loaded anew: while something runs, and else
NEW_CODE = "--accept-code-change"
_ALWAYS = (
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; "
                                "base-uri 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "same-origin"),  # with no-referrer, a browser would not say where a form comes from
    ("Cache-Control", "no-store"),
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What is known of a sink, or why it is not shown; it may be `soon`."""

    value: Any = None
    why: str = ""
    soon: bool = False


class Refused(Exception):
    """A request that is answered by a page that says why not."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class Pages:
    """Answers requests. Called from many threads at once: it holds nothing that changes but what it asks."""

    def __init__(self, source: shown.Source, access: Access, asking: Asking) -> None:
        self._source, self._access, self._asking = source, access, asking
        self._scrapes = Scrapes(source, asking)

    def answer(self, request: Request) -> Response:
        """What a request is answered."""
        try:
            found = self._let_in(request) or self._routed(request)
        except Refused as e:
            found = self._page("message.html", e.status, title=HTTPStatus(e.status).phrase, text=e.text)
        except (sqlite3.Error, RunFailed) as e:
            text = f"What is stored cannot be read: {e}"
            found = self._page("message.html", HTTPStatus.SERVICE_UNAVAILABLE, title="Not now", text=text)
        return Response(found.body, found.status, found.type, (*_ALWAYS, *found.headers))

    # ---------------------------------------------------------------- who

    def _let_in(self, request: Request) -> Response | None:
        """None if the request is to be answered. Raises Refused."""
        access, host = self._access, request.header("host")
        if not access.knows_host(host):
            raise Refused(
                HTTPStatus.MISDIRECTED_REQUEST,
                "These pages are for this machine: open them as localhost. For other names they need a token "
                "(GRISTMILL_TOKEN).",
            )
        if request.path == ("healthz",):
            ill = self._source.ill()
            status = HTTPStatus.SERVICE_UNAVAILABLE if ill else HTTPStatus.OK
            return Response(f"{ill or 'ok'}\n".encode(), status, "text/plain; charset=utf-8")
        if request.method == "GET" and access.is_token(request.query.get("token", "")):
            return _other("/".join(quote(part, safe="") for part in request.path), ("Set-Cookie", access.set_cookie))
        if not access.lets_in(request.header("cookie"), request.header("authorization")):
            raise Refused(
                HTTPStatus.UNAUTHORIZED,
                "These pages need the token with which gristmill up was started: add ?token=… to the address once; the "
                "browser remembers it. Programs send it as Authorization: Bearer ….",
            )
        return None

    # ---------------------------------------------------------------- what

    def _routed(self, request: Request) -> Response:
        with self._state() as state:
            if request.method == "POST":
                return self._done(request, state)
            match request.path:
                case ():
                    return self._jobs(state)
                case ("metrics",):
                    return self._metrics()
                case ("job", job):
                    return self._job(state, job)
                case ("job", job, tick):
                    return self._run(state, self._of(state, job, tick))
                case ("job", job, tick, "report"):
                    return self._report(state, self._of(state, job, tick))
                case ("job", job, tick, "dead"):
                    return self._dead(state, self._of(state, job, tick))
        raise Refused(HTTPStatus.NOT_FOUND, "There is no such page.")

    @contextlib.contextmanager
    def _state(self) -> Iterator[State]:
        """A look at what is stored, of this thread alone."""
        state = State(self._source.state)
        try:
            yield state
        finally:
            state.close()

    def _of(self, state: State, job: str, tick: str) -> Run:
        """The run of a tick. Raises Refused."""
        try:
            found = state.of(job, tick_of(tick))
        except ValueError:
            found = []
        if not found:
            raise Refused(
                HTTPStatus.NOT_FOUND, "No run of that job and time is known: it may be longer ago than 100 days."
            )
        return found[0]

    def _told(self, job: str) -> Scheduled | None:
        return self._source.folder().jobs.get(job)

    def _line(self, run: Run) -> shown.Line:
        return shown.line(self._source, run, self._told(run.job))

    # ---------------------------------------------------------------- pages

    def _jobs(self, state: State) -> Response:
        jobs = shown.jobs(self._source, state)
        going = [job.going for job in jobs if job.going is not None]
        until = time.monotonic() + GLANCE_S
        now = {line.address: self._asked("now", line.run, wait=max(0.0, until - time.monotonic())) for line in going}
        lately = list(self._source.told())[-SHOWS_LATELY:][::-1]
        return self._page(
            "jobs.html", jobs=jobs, going=going, now={key: found.value for key, found in now.items()},
            troubled=shown.troubled(self._source, state), bad=[job for job in jobs if job.bad], ill=self._source.ill(),
            lately=lately, forecast=self._forecast, refresh=REFRESH_S if going else IDLE_REFRESH_S,
        )  # fmt: skip

    def _job(self, state: State, name: str) -> Response:
        told, why = self._told(name), self._source.folder().bad.get(name, "")
        runs = state.last(name, shown.MOST_RUNS)
        if told is None and not why and not runs:
            raise Refused(HTTPStatus.NOT_FOUND, "There is no job of that name in the folder.")
        job = next((one for one in shown.jobs(self._source, state) if one.name == name), shown.JobShown(name, ""))
        going = any(run.state == "running" for run in runs)
        return self._page(
            "job.html", job=job, told=told, why=why, runs=[self._line(run) for run in runs],
            failed=sum(run.state == "failed" for run in runs), path=self._source.path(name),
            refresh=REFRESH_S if going else IDLE_REFRESH_S,
        )  # fmt: skip

    def _run(self, state: State, run: Run) -> Response:
        both = state.of(run.job, run.tick)
        newest = both[-1]
        line = self._line(run)
        running = any(one.state == "running" for one in both)
        seen = self._asked("now" if running else "facts", run, wait=GLANCE_S) if run.begun else Seen()
        failed = next((one for one in reversed(both) if one.state == "failed"), None)
        lines = [self._line(one) for one in both]
        return self._page(
            "run.html", run=run, line=line, lines=lines, running=running, now=seen.value if running else None,
            facts=None if running else seen.value, unseen=seen.why, forecast=self._forecast, told=self._told(run.job),
            failed=None if failed is None else self._line(failed),
            steps=[] if failed is None else self._steps(failed),
            failures=sum(one.state == "failed" for one in state.last(run.job, shown.MOST_RUNS)),
            log=[clean(text) for text in shown.log_end(self._source.log_of(newest))],
            log_path=self._source.log_of(newest),
            refresh=REFRESH_S if running or seen.soon else IDLE_REFRESH_S if newest.state == "due" else 0,
        )  # fmt: skip

    def _steps(self, failed: Run) -> list[tuple[str, str]]:
        told = self._source.folder().jobs.get(failed.job)
        words, updates = self._line(failed).words, told is not None and told.updates
        return shown.steps(failed, self._source.path(failed.job), words, updates)

    def _report(self, state: State, run: Run) -> Response:
        above = [("Jobs", "/"), (run.job, shown.address(run.job)), (self._line(run).of, shown.run_address(run))]
        seen = self._asked("report", run, above=above)
        if seen.why:
            raise Refused(HTTPStatus.BAD_GATEWAY, f"There is no report: {seen.why}")
        return Response(str(seen.value).encode("utf-8", "replace"))

    def _dead(self, state: State, run: Run) -> Response:
        seen = self._asked("facts", run)
        if seen.why:
            raise Refused(HTTPStatus.BAD_GATEWAY, f"The dead letters cannot be shown: {seen.why}")
        retry = next((self._line(one) for one in state.of(run.job, run.tick) if one.what == RETRY), None)
        busy = retry is not None and retry.run.state in ("due", "running")
        return self._page(
            "dead.html", run=run, line=self._line(run), facts=seen.value, retry=retry, busy=busy,
            refresh=REFRESH_S if busy else 0,
        )  # fmt: skip

    def _metrics(self) -> Response:
        try:
            return Response(self._scrapes.text(), type="text/plain; version=0.0.4; charset=utf-8")
        except MissingExtra as e:
            return Response(f"{e}\n".encode(), HTTPStatus.NOT_IMPLEMENTED, "text/plain; charset=utf-8")

    # ---------------------------------------------------------------- forms

    def _done(self, request: Request, state: State) -> Response:
        """What a form asks for is done; then the page where it shows. Raises Refused."""
        ours = self._access.sent_by_us(
            request.form.get("form", ""), request.header("origin"), request.header("sec-fetch-site"),
            request.header("host"),
        )  # fmt: skip
        if not ours:
            raise Refused(
                HTTPStatus.FORBIDDEN,
                "This form is from before gristmill up was started, or from elsewhere: go back, load the page again, "
                "and send it again.",
            )
        match request.path:
            case ("job", job, "again"):
                state.again(job, self._source.now().timestamp())
                to = shown.address(job)
            case ("job", job, tick, "retry-dead"):
                run = self._of(state, job, tick)
                to = f"{shown.run_address(run)}/dead"
                self._ask_retry(state, run, NEW_CODE if request.form.get("code") else "")
            case _:
                raise Refused(HTTPStatus.NOT_FOUND, "There is no such page.")
        self._source.nudge()
        return _other(to)

    def _ask_retry(self, state: State, run: Run, options: str) -> None:
        if self._told(run.job) is None:
            raise Refused(HTTPStatus.CONFLICT, f"{run.job} cannot be run: mend or restore its job file first.")
        now = self._source.now().timestamp()
        state.ask(Run(run.job, run.tick, next=now, what=RETRY, options=options))

    # ---------------------------------------------------------------- parts

    def _asked(
        self, what: str, run: Run, *, above: Sequence[tuple[str, str]] = (), wait: float = 2 * PATIENCE_S
    ) -> Seen:
        """What is known of the sink of a run."""
        told = self._told(run.job)
        if told is None:
            return Seen(why=f"{run.job} is no job that can be run now, so its sink is not known")
        tick = run.tick.astimezone(told.schedule.zone).isoformat()
        try:
            return Seen(self._asking.ask(what, self._source.path(run.job), tick, above, wait))
        except Unseen as e:
            return Seen(why=str(e), soon=e.soon)

    def _forecast(self, line: shown.Line, now: Any) -> tuple[str, str]:
        told = self._told(line.run.job)
        if now is None or told is None:
            return "", ""
        return shown.forecast(line.run, now, self._source.now(), told.schedule.zone)

    def _page(self, name: str, status: int = HTTPStatus.OK, *, refresh: int = 0, **values: Any) -> Response:
        text = (
            _templates()
            .get_template(name)
            .render(form=self._access.form, refresh=refresh, as_of=self._source.now().astimezone(), **values)
        )
        return Response(text.encode("utf-8", "replace"), status)


def _other(to: str, *headers: tuple[str, str]) -> Response:
    """The browser is sent to another page; two slashes in front would lead to another site."""
    return Response(status=HTTPStatus.SEE_OTHER, headers=(("Location", "/" + to.lstrip("/")), *headers))


@functools.cache
def _templates() -> Any:
    import jinja2

    ours, reports = jinja2.PackageLoader("gristmill.pages", "."), jinja2.PackageLoader("gristmill.observe", ".")
    around = jinja2.Environment(
        loader=jinja2.ChoiceLoader([ours, reports]), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    around.globals |= {
        "units": units, "address": shown.address, "run_address": shown.run_address,
        "rough": lambda seconds: shown.rough(timedelta(seconds=seconds)),
    }  # fmt: skip
    return around
