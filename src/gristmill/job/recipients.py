"""Whom a job tells: alerts, metrics and lineage, and where each goes. None of them shapes an answer, fails a run or
holds one up; addresses are as secret as passwords, since whoever has a webhook's can post to it.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args
from urllib.parse import unquote, urlsplit

from gristmill.errors import BadJob, did_you_mean
from gristmill.job.annotations import Help
from gristmill.job.keywords import check_names, option_fields
from gristmill.job.secret import Secret, reveal, secrets_in
from gristmill.job.uris import is_local, local_path, redact
from gristmill.values import dataclass

Incident = Literal["failed", "late", "gate", "drift", "dead", "skipped", "recovered"]
INCIDENTS: tuple[str, ...] = get_args(Incident)
WEB = ("http", "https")
SMTP = "smtp://localhost:25"
_SECRET = re.compile(r"\$\{env:\w+\}")
_SHELLS = re.compile(r"(?:.*[/\\])?(?:(?:ba|da|z|k|fi)?sh|cmd|pwsh|powershell)(?:\.exe)?", re.IGNORECASE)
_QUOTED = re.compile(r'''\\.|'[^']*'|"((?:\\.|[^"\\])*)"''', re.DOTALL)
_REPLACED = re.compile(r"\$\(|`|\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\}")  # not ${env:NAME}, which the job file has
_SYNTAX = re.compile(rf"{_REPLACED.pattern}|&&|&(?!\S)|\|\|?|>>?|<|;|\*|(?<!\S)~|^\s*\w+=")


@option_fields("alert ")
@dataclass(frozen=True)
class Alert:
    """Somebody who is told of incidents, once each: by a webhook, by e-mail or by a command, of which one is given."""

    not_shaping: ClassVar[Mapping[str, str]] = {}

    webhook: Annotated[
        str | None, Help("An address that gets a POST: of Slack (or what takes its form), or of anything else")
    ] = None
    email: Annotated[tuple[str, ...], Help("Addresses that get a mail")] = ()
    command: Annotated[
        str | None,
        Help(
            "A command (run without a shell) that gets the alert as a line of JSON on its standard input, its kind in "
            "GRISTMILL_ALERT"
        ),
    ] = None
    on: Annotated[
        tuple[str, ...],
        Help("The incidents that are told: failed, late, gate, drift, dead, skipped, recovered (default: all)"),
    ] = INCIDENTS
    form: Annotated[
        Literal["auto", "slack", "json"],
        Help("What a webhook gets: Slack's form, or JSON with all that is known (auto: by the address)"),
    ] = "auto"
    headers: Annotated[Mapping[str, Any], Help("Headers of a webhook's request, for example Authorization")] = field(
        default_factory=dict
    )
    smtp: Annotated[
        str, Help("The mail server, smtp://USER:PASSWORD@HOST:587 (with STARTTLS) or smtps://HOST (default: localhost)")
    ] = SMTP
    sender: Annotated[str | None, Help("The address that mails come from (default: gristmill@ this host)")] = None
    state: Annotated[
        str | None,
        Help("A file on this machine that remembers open incidents (default: beside the plans in the sink)"),
    ] = None

    def __post_init__(self) -> None:
        given = [name for name in ("webhook", "email", "command") if getattr(self, name)]
        if len(given) != 1:
            said = f"has both {given[0]} and {given[1]}" if given else "says nobody"
            raise BadJob(f"alert {said}: give one of webhook, email, command")
        for kind in self.on:
            if kind not in INCIDENTS:
                near = did_you_mean(kind, INCIDENTS)
                raise BadJob(f"alert on has {kind!r}: it has {', '.join(INCIDENTS)}{near}")
        if self.webhook and "://" not in reveal(self.webhook) and "@" in reveal(self.webhook):
            raise BadJob(
                f"alert webhook {self.webhook}: is an address of mail: write mailto:{self.webhook}, or "
                f"{{email: [{self.webhook}]}}"
            )
        if self.webhook:
            _web(self.webhook, "alert webhook")
        if self.email and urlsplit(reveal(self.smtp)).scheme not in ("smtp", "smtps"):
            raise BadJob("alert smtp: give smtp://HOST:587 or smtps://HOST")
        if self.email and (wrong := next((to for to in self.email if "@" not in to or "\n" in to), None)) is not None:
            raise BadJob(f"alert email is {wrong!r}: give an address, NAME@HOST")
        if self.command and not _words(self.command):
            raise BadJob("alert command has a quotation mark that is not closed, or is empty")
        if self.command and (found := of_a_shell(self.command)):
            raise BadJob(
                f"alert command has {found!r}, which a shell would understand, and no shell runs it: write sh -c '…', "
                "or put it in single quotes if it is meant as it stands"
            )

    @property
    def shown(self) -> str:
        """Whom it tells, without secrets."""
        if self.webhook:
            return f"webhook {place(self.webhook)}"
        return f"mail to {', '.join(self.email)}" if self.email else f"command {_words(str(self.command or ''))[0]}"


@option_fields("metrics ")
@dataclass(frozen=True)
class Metrics:
    """Where figures of a run go: a file of Prometheus' text form (its name ends in .prom), a push gateway of
    Prometheus (http://…), or a collector of OpenTelemetry (otlp://HOST:4318).
    """

    not_shaping: ClassVar[Mapping[str, str]] = {}

    to: Annotated[str, Help("FILE.prom, http://PUSHGATEWAY:9091, or otlp://COLLECTOR:4318 (otlps:// with TLS)")]
    headers: Annotated[Mapping[str, Any], Help("Headers of the requests")] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scheme in (*WEB, "otlp", "otlps"):
            _web(self.to, "metrics", "otlp", "otlps")
        elif not is_local(reveal(self.to)) or not local_path(reveal(self.to)).endswith(".prom"):
            raise BadJob(
                f"metrics {self.shown}: give a file that ends in .prom, which is what a collector of text files reads, "
                "a push gateway (http://HOST:9091) or a collector (otlp://HOST:4318)"
            )

    @property
    def scheme(self) -> str:
        """What precedes :// in the address; "" for a file."""
        return _scheme(self.to)

    @property
    def shown(self) -> str:
        """The address without secrets."""
        return place(self.to)


@option_fields("lineage ")
@dataclass(frozen=True)
class Lineage:
    """Where events in OpenLineage's form go: to an address, or, a line each, to the end of a file."""

    not_shaping: ClassVar[Mapping[str, str]] = {}

    to: Annotated[str, Help("https://HOST/api/v1/lineage, or a file, to which lines of JSON are added")]
    namespace: Annotated[str, Help("The namespace of the job (not of its data)")] = "gristmill"
    job: Annotated[str | None, Help("The name of the job (default: that of its sink)")] = None
    headers: Annotated[Mapping[str, Any], Help("Headers of the requests, for example Authorization")] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        if _scheme(self.to) in WEB:
            _web(self.to, "lineage")
        elif not is_local(reveal(self.to)):
            raise BadJob(f"lineage {self.shown}: give http://…, https://…, or a file on this machine")

    @property
    def shown(self) -> str:
        """The address without secrets."""
        return place(self.to)


def place(address: str) -> str:
    """An address for people: of the web only its host, since the rest may be a secret; else the file."""
    if isinstance(address, Secret):
        return str(address)
    parts = urlsplit(redact(address))
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else address


def hidden_in(several: Iterable[Alert | Metrics | Lineage]) -> list[Secret]:
    """What must be told to nobody: secrets, and the parts of plain addresses that are as good as one."""
    found = []
    for one in several:
        found += list(secrets_in(one))
        text = reveal(one.webhook or "") if isinstance(one, Alert) else reveal(one.to)
        for address in (text, reveal(one.smtp) if isinstance(one, Alert) else ""):
            parts = urlsplit(address)
            if parts.netloc and (parts.path.strip("/") or parts.query or parts.password):
                found += [Secret(place(address), address)]
                found += [Secret("***", word) for word in {parts.password, unquote(parts.password or "")} if word]
        found += [Secret("***", str(reveal(value))) for value in one.headers.values()]
    return found


def _scheme(address: str) -> str:
    text = reveal(address)
    return text.partition("://")[0].lower() if "://" in text else ""


def _web(address: str, what: str, *others: str) -> None:
    """Raises BadJob for an address that no request can be sent to."""
    try:
        parts = urlsplit(reveal(address))
        fine = parts.scheme in (*WEB, *others) and parts.hostname and (parts.port or True)
    except ValueError:
        fine = False
    if not fine or any(c.isspace() for c in reveal(address)):
        raise BadJob(f"{what} {place(address)}: is no address: give https://HOST/…")


def of_a_shell(command: str) -> str:
    """What of a command only a shell understands, "" if there is nothing of the kind or a shell is what it runs. In
    single quotes nothing is, in double quotes what a shell replaces.
    """
    whole = isinstance(command, Secret) and _SECRET.fullmatch(command)
    text = reveal(command) if whole else str(command)  # as written: what a secret brings is no syntax of a person's
    first, *others = _words(text)
    if _SHELLS.fullmatch(first) and others and re.fullmatch(r"[-/]\w*c", others[0], re.IGNORECASE):
        return ""
    inside = " ".join(re.sub(r"\\.", "", found[1] or "") for found in _QUOTED.finditer(text))
    found = _SYNTAX.search(_QUOTED.sub("_", text)) or _REPLACED.search(inside)
    return found[0] if found else ""


def _words(command: str) -> list[str]:
    try:
        return shlex.split(reveal(command))
    except ValueError:
        return []


# ---------------------------------------------------------------- what a person writes

T = TypeVar("T", Alert, Metrics, Lineage)


def head(text: Any, key: str) -> Any:
    """The mapping that a short text stands for: an address. For alerts `mailto:` and `command:` say what else it is."""
    if not isinstance(text, str):
        return text
    if key == "webhook" and text.startswith("mailto:"):
        return {"email": [one.strip() for one in text.removeprefix("mailto:").split(",")]}
    if key == "webhook" and text.startswith("command:"):
        return {"command": text.removeprefix("command:").strip()}
    return {key: text}


HEADS: Mapping[str, tuple[type[Any], str]] = {
    "alerts": (Alert, "webhook"),
    "metrics": (Metrics, "to"),
    "lineage": (Lineage, "to"),
}


def as_told(name: str, value: Any) -> tuple[Any, ...]:
    """Those whom a job tells, from what a person writes: addresses, mappings of options, or a list of them."""
    kind, key = HEADS[name]
    if value is None:
        return ()
    several = [value] if isinstance(value, (str, Mapping, kind)) else value
    if not isinstance(several, Iterable):
        raise BadJob(f"{name} is {value!r}: give a list of addresses, or of mappings with {key}")
    return tuple(_one(kind, head(one, key), name) for one in several)


def _one(kind: type[T], value: Any, name: str) -> T:
    if isinstance(value, kind):
        return value
    if isinstance(value, Mapping):
        check_names(kind.__name__, value, kind.__dataclass_fields__)
        return kind(**value)
    raise BadJob(f"{name} has {value!r}: give an address, or a mapping of options")
