"""What is known of a sink, for its report: what is published, the generations and runs before, errors with examples. It
is read from the sink's own documents, also while a run goes on, and nothing is written.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from gristmill import __version__
from gristmill.commit import generation as generations
from gristmill.commit import publication
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Success
from gristmill.commit.generation import Generation, decode_schema, meta
from gristmill.commit.publication import Publication
from gristmill.driver import runrecord
from gristmill.driver.driftplots import plots
from gristmill.driver.notices import INCIDENTS
from gristmill.driver.views import status
from gristmill.errors import CorruptStore, GristmillError
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.job.uris import file_of, redact
from gristmill.observe import units
from gristmill.observe.facts import MOST_NIGHTS, Example, Incident, Kind, Night, SinkFacts
from gristmill.observe.incidents import Incidents
from gristmill.observe.report import count_rows, store_line
from gristmill.observe.standing import standing
from gristmill.result.reading import letters_of, unfinished
from gristmill.shards.counts import Counts
from gristmill.sources.formats import by_bytes

MOST_KINDS, MOST_EXAMPLES = 20, 3
MOST_LETTERS = 100_000  # dead letters that are looked at for examples; their numbers are known without
MOST_TEXT = 400  # characters of a message or a payload
MOST_RUNS = 20


def facts(root: str, files: Files, *, job: str = "", folder: str = "") -> SinkFacts:
    """What is known of a sink; `job` is the job file that last published it, and `folder` where that was started.
    Raises BadSource if nothing was run here.
    """
    now = status(root, files)
    latest = publication.latest(root, files)
    body = None if latest is None else latest.body
    begun = unfinished(root, files)
    runs = tuple(runrecord.settled(run, now["state"]) for run in runrecord.listed(root, files, MOST_RUNS))
    kinds, letters = _kinds(root, files, latest, begun)
    shown = None if body is None else body
    return SinkFacts(
        sink=file_of(root) or root,
        state=str(now["state"]),
        at=time.time(),
        version=__version__,
        now=now,
        standing=standing(now, runrecord.last(root, files, str(now["state"]))),
        rows=() if shown is None else tuple(count_rows(Counts(*shown.counts_list), shown.errors)),
        nights=tuple(_nights(root, files, latest)),
        runs=runs,
        kinds=kinds,
        letters=letters,
        digests=() if shown is None else tuple(_digests(shown)),
        inputs=() if latest is None else tuple(_inputs(root, files, latest)),
        columns=() if shown is None else tuple((f.name, str(f.type)) for f in decode_schema(shown.output_schema)),
        deliveries=tuple(map(store_line, now.get("deliveries", ()))),
        incidents=_incidents(root, files),
        drift=plots(latest, runs),
        job=job,
        folder=folder,
    )


def _nights(root: str, files: Files, latest: Publication | None) -> list[Night]:
    """The last generations that were published, newest last. One that was published again is one."""
    found: dict[int, Night] = {}
    number = 0 if latest is None else latest.number
    while number > 0 and len(found) < MOST_NIGHTS:
        one = latest if latest is not None and number == latest.number else publication.load(root, number, files)
        number -= 1
        if one is not None and one.generation not in found:
            found[one.generation] = _night(one.body)
    return [found[key] for key in sorted(found)]


def _night(body: Success) -> Night:
    updated = {name: body.updated[name] for name in ("kept", "scored", "gone") if name in body.updated}
    return Night(
        body.generation, body.published, body.seconds, body.rows_in, body.rows_ok, body.rows_dead, body.rows_filtered,
        body.model.name, body.model.digest, dict(body.errors), updated, dict(body.used),
    )  # fmt: skip


def _digests(body: Success) -> Iterator[tuple[str, str]]:
    yield "model", f"{body.model.name} {body.model.digest}".strip()
    if body.model.version:
        yield "model version", body.model.version
    if body.fingerprint.inputs:
        yield "data", body.fingerprint.inputs
    for name, digest in sorted(body.fingerprint.model.items())[:20]:
        yield name if name.startswith("files of ") else f"model file {name}", digest
    yield from ((f"code {name}", digest) for name, digest in sorted(body.fingerprint.code.items())[:40])
    yield from ((f"option {name}", text[:MOST_TEXT]) for name, text in sorted(body.fingerprint.options.items()))


def _inputs(root: str, files: Files, latest: Publication) -> Iterator[tuple[str, str]]:
    """Files of the source that the result was made of, with sizes: some of them, and how many there are."""
    known = {g.number: g for g in generations.generations(root, files)}
    for number in latest.generations:
        generation = known.get(number)
        if generation is None or generation.lost:
            continue
        with contextlib.suppress(OSError, CorruptStore):
            table = generations.stored_files(generation)
            if table is not None:
                rows = table.slice(0, 10).to_pylist()
                yield from ((redact(str(row["path"])), units.size(row.get("size") or 0)) for row in rows)
                if table.num_rows > len(rows):
                    yield f"and {units.plural(table.num_rows - len(rows), 'more file')} of generation {number}", ""


def _incidents(root: str, files: Files) -> tuple[Incident, ...]:
    with contextlib.suppress(FileNotFoundError, CorruptStore):
        found = Incidents.load_from(join(meta(root), INCIDENTS), files).incidents
        return tuple(Incident(one.kind, one.text, one.since) for one in found if one.over is None)
    return ()


# ---------------------------------------------------------------- dead letters


def _kinds(
    root: str, files: Files, latest: Publication | None, begun: Generation | None
) -> tuple[tuple[Kind, ...], str]:
    """Errors by kind, the most frequent first, with examples; and why there are none, if they cannot be read. Those of
    an unfinished run come first, as they are what keeps it from being published.
    """
    counts: Counter[str] = Counter()
    try:
        if begun is not None and (paths := _begun_letters(begun, files, counts)):
            return _ranked(counts, _examples(paths, files)), ""
        counts.clear()
        if latest is None:
            return (), ""
        counts.update({name: int(n) for name, n in latest.body.errors.items()})
        return _ranked(counts, _examples(letters_of(root, latest.live(), files), files)), ""
    except (OSError, GristmillError) as e:
        return _ranked(counts, {}), str(e)


def _begun_letters(begun: Generation, files: Files, counts: Counter[str]) -> list[str]:
    paths = []
    for done in receipts.standing(begun.receipts, files).values():
        counts.update(done.errors)
        paths += [join(begun.root, part.work) for part in done.parts if part.role == "dead"]
    return paths


def _ranked(counts: Counter[str], examples: dict[str, list[Example]]) -> tuple[Kind, ...]:
    most = heapq.nsmallest(MOST_KINDS, counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Kind(name, n, tuple(examples.get(name, ()))) for name, n in most if n > 0)


def _examples(paths: Sequence[str], files: Files) -> dict[str, list[Example]]:
    """A few dead letters of each error. Of very many only the first are looked at."""
    found: dict[str, list[Example]] = {}
    looked = 0
    for name in paths:
        with files.local(name) as path, open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                looked += 1
                if looked > MOST_LETTERS:
                    return found
                row = json.loads(line)
                some = found.setdefault(str(row.get("error")), [])
                if len(some) < MOST_EXAMPLES:
                    some.append(_example(row))
    return found


def _example(row: dict[str, Any]) -> Example:
    source, position = str(row.get("source")), row.get("position")
    where = f"{source}, byte {position:,}" if by_bytes(source) and isinstance(position, int) else f"{source}:{position}"
    return Example(where, str(row.get("stage") or ""), _short(row.get("message")), _short(_payload(row.get("payload"))))


def _payload(payload: Any) -> Any:
    """A dead letter's content; a record that could not be read is in it as base64."""
    if isinstance(payload, dict) and list(payload) == ["base64"] and isinstance(payload["base64"], str):
        with contextlib.suppress(ValueError):
            return base64.b64decode(payload["base64"], validate=True).decode("utf-8", "replace")
    return payload if isinstance(payload, str) or payload is None else json.dumps(payload, ensure_ascii=False)


def _short(text: Any) -> str:
    text = "" if text is None else str(text)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"
