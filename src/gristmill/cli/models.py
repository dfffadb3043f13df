"""`approve` and `models`: which version of a model is for what."""

from __future__ import annotations

import getpass
import json
import sys
import time
from typing import Any

import click

from gristmill.cli import common as words
from gristmill.cli.helptext import Command
from gristmill.errors import BadJob

APPROVE = """
gristmill approve reviews 3 --for batch --path models/reviews-3/
gristmill approve reviews 4 --for batch --by anna@example.org
gristmill approve churn 2026-01 --for live --path churn.skops --file ../shared/models.yaml
gristmill approve models:/reviews 4 --for batch
"""


@click.command(cls=Command, examples=APPROVE)
@click.argument("name", metavar="NAME")
@click.argument("version", metavar="VERSION")
@words.option("--for", "stage", required=True, metavar="STAGE", help="What it is approved for, for example batch")
@words.option("--path", metavar="PATH", help="Where the files of a new version are: a file, or a folder")
@words.option("--by", metavar="WHO", help="Who approves it (default: the name of your login)")
@words.option("--file", metavar="FILE",
              help="The file to write (default: models.yaml of this folder, or the nearest one above)")  # fmt: skip
@words.as_json
@words.debug
def approve(name: str, version: str, stage: str, **given: Any) -> int:
    """Approve a version of a model for a stage: jobs name it registry:NAME@STAGE, and score with exactly these files.

    models.yaml gets their digest, who approved them and when; another version that had the stage loses it. Commit the
    file with your code. A NAME that begins with models:/ is one of MLflow's registry, whose version gets the stage as
    its alias, and tags.
    """
    by, at = given["by"] or getpass.getuser(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    found, before, changed = _approved(name, version, stage, by=by, at=at, path=given["path"], file=given["file"])
    if given["as_json"]:
        said = {"name": found.name, "version": found.version, "stage": stage, "path": found.path}
        sys.stdout.write(json.dumps({**said, "sha256": found.sha256, "by": by, "at": at, "before": before}) + "\n")
        return 0
    told = f"instead of {before}" if before else f"by {by}"
    if not changed:
        told = "already"
    sys.stdout.write(f"{found.name}/{found.version} is approved for {stage} {told}: {found.path}, {found.sha256}\n")
    return 0


def _approved(
    name: str, version: str, stage: str, *, by: str, at: str, path: str | None, file: str | None
) -> tuple[Any, str, bool]:
    from gristmill.errors import BadModel
    from gristmill.models import mlflow, modelsfile
    from gristmill.models.versions import MLFLOW

    if name.startswith(MLFLOW):
        if path or file:
            raise BadJob(f"{'--path' if path else '--file'} is for models.yaml: MLflow knows where its versions are")
        return mlflow.approve(name, version, stage, by=by, at=at), "", True
    try:
        nearest = file or modelsfile.nearest_file()
    except BadModel:
        nearest = modelsfile.FILE
    made = modelsfile.approve(name, version, stage, by=by, at=at, path=path, file=nearest)
    return made.version, made.before, made.changed


MODELS = """
gristmill models
gristmill models --file ../shared/models.yaml
gristmill models --json
"""


@click.command(cls=Command, examples=MODELS)
@words.option("--file", metavar="FILE",
              help="The file to read (default: models.yaml of this folder, or the nearest one above)")  # fmt: skip
@words.as_json
@words.debug
def models(**given: Any) -> int:
    """List the models of models.yaml: their versions, what these are approved for, by whom and when, and whether their
    files are those that were recorded.

    Exits 2 if some are not.
    """
    from gristmill.models import modelsfile
    from gristmill.observe.tables import Table

    file = given["file"] or modelsfile.nearest_file()
    versions = modelsfile.read(file).versions
    files = [modelsfile.state(v) for v in versions]
    if given["as_json"]:
        for v, state in zip(versions, files, strict=True):
            approved = {stage: vars(told) for stage, told in v.approved.items()}
            told = {"name": v.name, "version": v.version, "path": v.path, "sha256": v.sha256, "approved": approved}
            sys.stdout.write(json.dumps({**told, "files": state}, ensure_ascii=False) + "\n")
    else:
        rows = []
        for v, state in zip(versions, files, strict=True):
            approvals = [(stage, told.by, told.at) for stage, told in v.approved.items()] or [("", "", "")]
            rows += [(v.name, v.version, *told, (v.sha256 or "")[:12], v.path, state) for told in approvals]
        Table(("model", "version", "for", "by", "at", "sha256", "path", "files"), tuple(rows)).show(sys.stdout)
    return 0 if all(state in (modelsfile.SAME, modelsfile.UNRECORDED) for state in files) else BadJob.exit_code
