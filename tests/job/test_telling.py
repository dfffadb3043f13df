"""Whom a job tells, as people write it: short forms, mistakes, secrets, and files that read back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gristmill as gm
from gristmill.errors import BadJob
from gristmill.job.recipients import Alert, Lineage, Metrics, as_told, hidden_in
from gristmill.job.secret import Secret, reveal
from gristmill.jobfile.jobfile import load
from gristmill.jobfile.writing import dump


def test_short_forms() -> None:
    """An address, or one of `mailto:` and `command:`; one, or several."""
    assert as_told("alerts", "https://x.org/h") == (Alert("https://x.org/h"),)
    assert as_told("alerts", ["mailto:a@x.org,b@x.org", "command: ./page 'a b'"]) == (
        Alert(email=("a@x.org", "b@x.org")), Alert(command="./page 'a b'"),
    )  # fmt: skip
    assert as_told("metrics", "x.prom") == (Metrics("x.prom"),)
    assert as_told("lineage", {"to": "x.jsonl", "job": "j"}) == (Lineage("x.jsonl", job="j"),)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "give one of webhook, email, command"),
        ({"webhook": "https://x.org", "email": "a@x.org"}, "has both webhook and email"),
        ({"webhook": "hooks.slack.com/x"}, "is no address"),
        ({"webhook": "ftp://x.org"}, "is no address"),
        ({"webhook": "me@x.org"}, "write mailto:me@x.org, or {email: [me@x.org]}"),
        ({"webhook": "https://x.org/a b"}, "is no address"),
        ({"webhook": "https://x.org", "on": ["fail"]}, "on has 'fail': it has failed, late"),
        ({"email": "ops"}, "email is 'ops'"),
        ({"email": "a@x.org\nBcc: b@x.org"}, "give an address"),
        ({"email": "a@x.org", "smtp": "mail:25"}, "give smtp://HOST:587"),
        ({"command": "echo 'x"}, "quotation mark"),
        (
            {"command": "cat >> a.jsonl"},
            "'>>', which a shell would understand, and no shell runs it: write sh -c '…'",
        ),
        ({"webhook": "https://x.org", "form": "xml"}, "must be one of auto, slack, json"),
    ],
)
def test_alerts_that_are_none(options: dict[str, Any], told: str) -> None:
    """Each mistake is one line, with the way out."""
    with pytest.raises(BadJob) as caught:
        Alert(**options)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("jq .|tee x", "|"),
        ("a && b", "&&"),
        ("a; b", ";"),
        ("a &", "&"),
        ("a <x", "<"),
        ("a 2>&1", ">"),
        ("ls *.x", "*"),
        ("curl -d $(cat) x", "$("),
        ('echo "`id`"', "`"),
        ('echo "of $GRISTMILL_ALERT"', "$GRISTMILL_ALERT"),
        ("~/bin/page", "~"),
        ("A=b page", "A="),
        ("sh page.sh | tee x", "|"),
    ],
)
def test_a_command_for_a_shell_is_refused(command: str, found: str) -> None:
    """As words of their own, inside of others, and in double quotes what a shell replaces."""
    with pytest.raises(BadJob) as caught:
        Alert(command=command)
    assert str(caught.value).startswith(f"alert command has {found!r}, which a shell would understand")


@pytest.mark.parametrize(
    "command",
    [
        "tee -a x",
        "sh -c 'cat >> x'",
        'sh -c "cat >> $HOME/x"',
        "/bin/bash -lc 'a; b'",
        "python -c 'a; b'",
        'python -c "a; b > c"',
        "curl https://x.org/h?a=1&b=2",
        r"find . -name \*.x",
        Secret("page ${env:TOKEN}", "page a|b"),
    ],
)
def test_a_command_for_no_shell_is_taken(command: str) -> None:
    """A shell that is named, quotes, and what a secret holds."""
    assert Alert(command=command).command == command


def test_a_wrong_name_is_told_with_the_right_one() -> None:
    """In Python as in a job file."""
    with pytest.raises(BadJob, match="did you mean 'webhook'"):
        as_told("alerts", {"webhok": "https://x.org"})


FILE = """
source: rows.parquet
model: {call: "scoring:f"}
sink: out/
alerts:
  - "${env:SLACK_URL}"
  - {email: ops@x.org, on: [failed, gate], smtp: "smtp://me:${env:PASSWORD}@mail:587"}
metrics: gristmill.prom
lineage: [{to: "https://x.org/api", headers: {Authorization: "Bearer ${env:PASSWORD}"}}]
profiles: {quiet: {alerts: []}}
"""
SECRETS = {"SLACK_URL": "https://hooks.slack.com/services/T0/B0/abcdef", "PASSWORD": "hunter22"}


def test_a_job_file_with_secrets(tmp_path: Path) -> None:
    """They are sealed, read back as they were written, and a profile may tell nobody."""
    path = tmp_path / "job.yaml"
    path.write_text(FILE)

    def loaded(profile: str | None = None) -> Any:
        return load(str(path), variables={}, profile=profile, sets=[], environ=SECRETS)

    spec = loaded()
    assert reveal(spec.alerts[0].webhook) == SECRETS["SLACK_URL"]
    assert [one.shown for one in spec.alerts] == ["webhook ${env:SLACK_URL}", "mail to ops@x.org"]
    text = dump(spec)
    assert not any(secret in text + repr(spec) for secret in SECRETS.values())
    path.write_text(text)
    assert loaded().alerts == spec.alerts and loaded().lineage == spec.lineage and loaded().metrics == spec.metrics
    path.write_text(FILE)
    assert loaded("quiet").alerts == ()
    hidden = {secret.reveal() for secret in hidden_in([*spec.alerts, *spec.lineage])}
    assert {*SECRETS.values(), "Bearer hunter22"} <= hidden


def test_errors_of_a_job_file_have_their_place(tmp_path: Path) -> None:
    """File, line and the key that was meant."""
    path = tmp_path / "job.yaml"
    path.write_text(FILE.replace("on: [failed", "onn: [failed"))
    with pytest.raises(BadJob, match=r"job.yaml:7.*'onn'.*did you mean 'on'"):
        load(str(path), variables={}, profile=None, sets=[], environ=SECRETS)
    path.write_text(FILE.replace("[failed, gate]", "[fail]"))
    with pytest.raises(BadJob, match=r"job.yaml:7.*has 'fail'"):
        load(str(path), variables={}, profile=None, sets=[], environ=SECRETS)


def test_whom_a_job_tells_shapes_no_answer() -> None:
    """Another webhook is the same job."""
    from gristmill.fingerprint.digests import options_of

    def spec(**options: Any) -> Any:
        return gm.Job(source="rows.parquet", model=gm.model(abs), sink="out/", **options).spec

    assert options_of(spec(), "parquet", "parquet") == options_of(
        spec(alerts="https://x.org", metrics="x.prom", lineage="x.jsonl"), "parquet", "parquet"
    )
