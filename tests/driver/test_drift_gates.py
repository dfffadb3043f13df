"""Gates that compare with the result before: what looks wrong is staged, and published once a person accepts it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.commit import publication
from gristmill.commit.documents import ProfileRecord
from gristmill.driver.drifting import profile_of
from gristmill.driver.run import retry_dead
from gristmill.files.disk import LOCAL
from gristmill.profiles.columns import profiled
from gristmill.profiles.profile import Profile

DRIFT: dict[str, Any] = {"score": {"psi": 0.25}, "label": {}, "vector": {}, "text": {}}


def scored(batch: Any, fail: int = 0, wide: int = 2) -> Any:
    """A score, a label and a vector of a number; multiples of `fail` raise."""
    if fail and (batch["id"] % fail == 0).any():
        raise ValueError("bad row")
    x = batch["x"]
    label = np.where(x > 0.5, "high", "low").astype(object)
    return {"score": x * 2, "label": label, "vector": np.stack([x, 1 - x] * (wide // 2), axis=1).astype("float32")}


def night(folder: Path, name: str, rows: int, shift: float = 0.0, first: int = 0, null: float = 0.0) -> None:
    """A file of rows, whose numbers are moved by `shift`, and of whose notes a share is null."""
    r = np.random.default_rng(first + rows)
    notes = pa.array(["x" if n >= null else None for n in r.random(rows)])
    columns = {"id": range(first, first + rows), "x": r.random(rows) * 0.8 + shift, "note": notes}
    columns["text"] = [f"row {n % 50}" for n in range(rows)]
    folder.joinpath("in").mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "in" / name)


def job(folder: Path, drift: Any = DRIFT, model: Any = scored, sink: str = "out", **gates: Any) -> gm.Job:
    """The job of these rows, in shards of a hundred."""
    out = gm.sink(str(folder / sink), keep=["id", "note"])
    return gm.Job(
        str(folder / "in"), model, out, gates={"drift": drift, **gates}, workers=0, shard_rows=100, batch_rows=50
    )


def whole(folder: Path, sink: str = "out") -> Profile:
    """The profile that is kept of the published result."""
    found = publication.published(str(folder / sink))
    claim = next(folder.glob(f"{sink}/_gristmill/g{found.generation:04d}-*"))
    return ProfileRecord.load_from(str(claim / "profile.json"), LOCAL).whole


def is_of_the_rows(folder: Path, sink: str = "out") -> None:
    """The kept profile is that of the published rows, read again."""
    kept, rows = whole(folder, sink), gm.read(folder / sink).to_table()
    anew = profiled(rows, ["label", "score", "vector"])
    assert kept.rows == rows.num_rows
    assert {name: kept.nulls[name] for name in rows.column_names} == dict(anew.nulls)
    assert kept.columns["label"].counts == anew.columns["label"].counts
    assert np.allclose(kept.columns["vector"].mean(), anew.columns["vector"].mean())
    assert kept.columns["score"].held == rows.num_rows and kept.columns["text"].held == rows.num_rows


def test_drift_is_staged_until_it_is_accepted(tmp_path: Path) -> None:
    """Other values: exit 3, the old result stands, nothing is scored again, and --accept publishes what was staged."""
    night(tmp_path, "a.parquet", 1000)
    assert job(tmp_path).run().drift == ()
    night(tmp_path, "a.parquet", 1100)
    alike = job(tmp_path).run(restart=True)
    assert {d.measure for d in alike.drift if d.column == "label"} == {"psi", "js", "categories", "nulls"}
    assert {d.verdict for d in alike.drift} == {"held"} and "drift score" in str(alike)
    before = gm.read(tmp_path / "out").to_table()
    night(tmp_path, "a.parquet", 1000, shift=0.5)
    with pytest.raises(gm.GateFailed) as refused:
        job(tmp_path).run(restart=True)
    text = str(refused.value)
    assert refused.value.exit_code == 3 and "score: psi " in text and "(limit 0.25)" in text
    assert "the result before (generation 2)" in text and "gone: 'low'" in text and "--accept" in text
    assert refused.value.report is not None
    assert {d.verdict for d in refused.value.report.drift if d.column == "score"} == {"failed"}
    assert gm.read(tmp_path / "out").to_table().equals(before)
    with pytest.raises(gm.GateFailed, match="score: psi"):
        job(tmp_path).run()
    with pytest.warns(gm.GristmillWarning, match="which was accepted"):
        report = job(tmp_path).run(accept=True)
    assert report.rows_run == 0 and report.rows_ok == 1000
    assert gm.read(tmp_path / "out").to_table()["score"].to_numpy().min() > 0.9
    is_of_the_rows(tmp_path)


def test_other_limits_publish_without_scoring(tmp_path: Path) -> None:
    """Limits do not belong to what is scored: with wider ones the same command publishes."""
    night(tmp_path, "a.parquet", 500)
    job(tmp_path, {"score": {}}).run()
    night(tmp_path, "a.parquet", 500, shift=0.5)
    with pytest.raises(gm.GateFailed, match="score: psi"):
        job(tmp_path, {"score": {}}).run(restart=True)
    report = job(tmp_path, {"score": {"psi": 50}}).run()
    assert report.rows_run == 0 and [(d.measure, d.verdict) for d in report.drift] == [("psi", "warned")]


def test_appends_and_retries_keep_the_profile_right(tmp_path: Path) -> None:
    """The kept profile is that of all rows that are published, whatever added them; new rows are what is compared."""
    night(tmp_path, "a.parquet", 900)
    some = gm.model(scored, fail=90)
    job(tmp_path, model=some, min_ok=0.9).run()
    is_of_the_rows(tmp_path)
    night(tmp_path, "b.parquet", 700, first=1000)
    assert job(tmp_path, model=some, min_ok=0.9).run(append=True).rows_ok == 900 + 700 - 10 - 7
    is_of_the_rows(tmp_path)
    retried = retry_dead(job(tmp_path, model=gm.model(scored, fail=0), min_ok=0.9).spec, accept_code_change=True)
    assert retried.rows_ok == 1600
    is_of_the_rows(tmp_path)
    night(tmp_path, "c.parquet", 300, first=5000, shift=0.5)
    with pytest.raises(gm.GateFailed, match="score: psi"):
        job(tmp_path, model=gm.model(scored, fail=0)).run(append=True)


def test_a_run_that_was_stopped_profiles_every_row_once(tmp_path: Path) -> None:
    """Shards that are committed keep their profiles; those whose receipts are lost are profiled with their rows."""
    night(tmp_path, "a.parquet", 1000)
    job(tmp_path).run()
    night(tmp_path, "a.parquet", 1001, shift=0.5)
    with pytest.raises(gm.GateFailed, match="score: psi"):
        job(tmp_path).run(restart=True)
    done = sorted(tmp_path.glob("out/_gristmill/g0002-*/receipts/*.json"))
    assert json.loads(done[-1].read_bytes())["profile"]["columns"]["label"]["counts"]
    done[0].unlink()
    done[-1].write_bytes(b"torn")
    with pytest.raises(gm.GateFailed, match="score: psi"):
        job(tmp_path).run()
    done[3].unlink()
    report = job(tmp_path).run(accept=True)
    assert report.rows_ok == 1001 and report.shards_resumed == len(done) - 1 and report.drift
    is_of_the_rows(tmp_path)


def test_columns_asked_for_later(tmp_path: Path) -> None:
    """What no profile has is read from the files, of the result before and of a run that was resumed; an input that is
    not written is told to be unknown.
    """
    night(tmp_path, "a.parquet", 500)
    job(tmp_path, None).run()
    night(tmp_path, "a.parquet", 500, shift=0.5)
    with pytest.raises(gm.GateFailed, match="label: psi"):
        job(tmp_path, {"label": {}}).run(restart=True)
    with pytest.raises(gm.GateFailed, match="score: ks"):
        job(tmp_path, {"score": {"ks": 0.3}}).run()
    with pytest.warns(gm.GristmillWarning, match="drift of text is not known: the result before .* has no profile"):
        job(tmp_path, {"text": {}}).run()


def test_another_result_by_name(tmp_path: Path) -> None:
    """`against` compares with a result that is elsewhere; one that is not there is told before any row is scored."""
    night(tmp_path, "a.parquet", 500)
    job(tmp_path, {}, sink="monday").run()
    night(tmp_path, "a.parquet", 500, shift=0.5)
    against = str(tmp_path / "monday")
    with pytest.raises(gm.GateFailed, match=r"drift from the result of .*monday: score: psi"):
        job(tmp_path, sink="tuesday", against=against).run()
    with pytest.raises(gm.BadJob, match=r"gates.against names .*sunday.*no result"):
        job(tmp_path, sink="tuesday", against=str(tmp_path / "sunday")).run()
    assert job(tmp_path, sink="wednesday").run().rows_ok == 500


def test_far_fewer_rows_are_refused(tmp_path: Path) -> None:
    """Under a tenth of the rows: exit 3; under half, or over double: a warning; small results are left alone."""
    night(tmp_path, "a.parquet", 2000)
    job(tmp_path, None).run()
    night(tmp_path, "a.parquet", 150)
    with pytest.raises(
        gm.GateFailed, match=r"min_rows 0.1 does not hold: 150 rows, and the result before .* has 2,000"
    ):
        job(tmp_path, None).run(restart=True)
    assert job(tmp_path, None, min_rows=0).run().rows_ok == 150
    night(tmp_path, "a.parquet", 400)
    with pytest.warns(gm.GristmillWarning, match=r"400 rows, and the result before \(generation 2\) has 150"):
        job(tmp_path, None).run(restart=True)
    night(tmp_path, "a.parquet", 50)
    with pytest.warns(gm.GristmillWarning, match="50 rows"):
        job(tmp_path, None).run(restart=True)
    night(tmp_path, "a.parquet", 3)
    job(tmp_path, None).run(restart=True)


def test_nulls_that_were_not_there(tmp_path: Path) -> None:
    """A column that has become null is refused; one with more nulls than before is a warning."""
    night(tmp_path, "a.parquet", 500)
    job(tmp_path, None).run()
    night(tmp_path, "a.parquet", 500, null=0.2)
    with pytest.warns(gm.GristmillWarning, match=r"1\d\.\d% of column 'note' are null, and 0\.0% were"):
        job(tmp_path, None).run(restart=True)
    night(tmp_path, "a.parquet", 500, null=1)
    with pytest.raises(gm.GateFailed, match=r"max_nulls 0.5 does not hold: 100.0% of column 'note'"):
        job(tmp_path, None).run(restart=True)
    assert job(tmp_path, None, max_nulls=1).run().rows_ok == 500


def test_columns_that_are_gone_or_others(tmp_path: Path) -> None:
    """Readers are told of columns that the result before has, and of types that are not what they were."""
    night(tmp_path, "a.parquet", 300)
    job(tmp_path, None).run()
    with pytest.warns(gm.GristmillWarning, match=r"column 'label' is gone, which .*; so are vector"):
        job(tmp_path, None, model=other).run(restart=True)


def other(batch: Any) -> Any:
    """Fewer columns, and another type."""
    return {"score": (batch["x"] * 100).astype("int64")}


def test_no_rows_of_many(tmp_path: Path) -> None:
    """An append that leaves out all of its many rows is refused, unless that is allowed; of a few it may."""
    night(tmp_path, "a.parquet", 200)

    def some(**gates: Any) -> gm.Job:
        source = gm.source(str(tmp_path / "in"), where="id < 1000")
        return gm.Job(source, scored, gm.sink(str(tmp_path / "out")), gates=gates, workers=0)

    some().run()
    night(tmp_path, "b.parquet", 20, first=2000)
    assert some().run(append=True).rows_ok == 200
    night(tmp_path, "c.parquet", 200, first=3000)
    with pytest.raises(gm.GateFailed, match="none of 200 rows was scored: all were filtered out"):
        some().run(append=True)
    assert some(allow_empty=True).run(append=True).rows_ok == 200


@pytest.mark.parametrize(
    ("drift", "said"),
    [
        ({"scor": {}}, "names column 'scor', which is neither written nor read.*did you mean 'score'"),
        ({"score": {"pis": 1}}, "no measure 'pis'.*did you mean 'psi'"),
        ({"score": {"mean_cosine": 0.9}}, "has mean_cosine, which a number column does not have: give psi"),
        ({"score": {"psi": "much"}}, "is 'much': give a number from 0, or {warn: 0.1, fail: 0.25}"),
        ({"score": {"psi": {"fial": 1}}}, "no limit 'fial'.*did you mean 'fail'"),
        ({"score": {"psi": {"warn": 1, "fail": 0.5}}}, "warn has to be at most fail"),
        ({"score": 0.3}, "is 0.3: give measures with limits"),
        (["score"], "give a mapping"),
    ],
)
def test_what_a_job_cannot_mean(tmp_path: Path, drift: Any, said: str) -> None:
    """Told with the way out, before any row is committed."""
    night(tmp_path, "a.parquet", 100)
    with pytest.raises(gm.BadJob, match=said):
        job(tmp_path, drift).run()
    assert not list(tmp_path.glob("out/_gristmill/g*/receipts/*"))


@pytest.mark.long
def test_many_workers_and_formats(tmp_path: Path) -> None:
    """Profiles come from every worker and every format; npy's vectors are compared like others."""
    night(tmp_path, "a.parquet", 1000)

    def made(shift: float) -> gm.Job:
        night(tmp_path, "a.parquet", 1000, shift=shift)
        out = gm.sink(str(tmp_path / "npy"), format="npy", keep=["id"])
        vectors = gm.model(turned, batch_format="numpy")
        return gm.Job(str(tmp_path / "in"), vectors, out, gates={"drift": {"vector": {}}}, workers=2, shard_rows=200)

    made(0).run()
    assert {d.verdict for d in made(0.001).run(restart=True).drift} == {"held"}
    with pytest.raises(gm.GateFailed, match="vector: mean_cosine"):
        made(3).run(restart=True)


def turned(batch: Any) -> Any:
    """Vectors of which the direction is the number."""
    return {"vector": np.stack([np.cos(batch["x"]), np.sin(batch["x"])], axis=1).astype("float32")}


def test_a_kept_profile_that_is_lost(tmp_path: Path) -> None:
    """It is made again from the receipts; a sink copied without them has its rows read."""
    night(tmp_path, "a.parquet", 400)
    job(tmp_path).run()
    kept = whole(tmp_path)
    next(tmp_path.glob("out/_gristmill/g0001-*/profile.json")).unlink()
    found = profile_of(publication.published(str(tmp_path / "out")), ["score"])
    assert found is not None and found.columns["label"] == kept.columns["label"] and found.nulls == kept.nulls
    shutil.copytree(tmp_path / "out", tmp_path / "copy", ignore=shutil.ignore_patterns("_gristmill"))
    copied = profile_of(publication.published(str(tmp_path / "copy")), ["label"])
    assert copied is not None and copied.columns["label"] == kept.columns["label"]


def test_plan_and_status_tell_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The commands: exit 3 with the figures, `status` and `plan` say why, `--accept` publishes."""
    from gristmill.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "scoring.py").write_text(
        "import numpy as np\n\n\ndef score(batch):\n    return {'score': batch['x'] * 2}\n"
    )
    (tmp_path / "job.yaml").write_text(
        "source: in/\nmodel: {call: 'scoring.py:score'}\nsink: {uri: out/, keep: [id]}\n"
        "gates: {drift: {score: {psi: {warn: 0.05, fail: 0.3}, ks: }}}\nengine: {workers: 0}\n"
    )

    def run(*words: str) -> tuple[int, str]:
        code = main(list(words))
        told = capsys.readouterr()
        return code, told.out + told.err

    night(tmp_path, "a.parquet", 500)
    assert run("run", "job.yaml")[0] == 0
    night(tmp_path, "a.parquet", 500, shift=0.5)
    code, text = run("run", "job.yaml", "--restart")
    assert code == 3 and "score: psi" in text and "(limit 0.3)" in text and "drift score" in text
    code, text = run("status", "out")
    assert "a gate did not hold" in text and "score: psi" in text
    code, text = run("plan", "job.yaml")
    assert code == 3 and "score: psi" in text
    code, text = run("run", "job.yaml", "--accept")
    assert code == 0 and "which was accepted" in text
    assert run("run", "job.yaml")[0] == 0


@pytest.mark.parametrize("how", ["update", "append"])
def test_a_column_that_is_not_written_and_asked_for_later(how: str, tmp_path: Path) -> None:
    """Where answers are kept, or rows are only added, it is compared from the second night on that asks for it."""
    asked: dict[str, Any] = {"x": {"psi": 0.25}}

    def run(drift: Any) -> gm.Report:
        if how == "append":
            return job(tmp_path, drift).run(append=(tmp_path / "out").exists())
        options = {"gates": {"drift": drift}, "update": {"key": ["id"]}, "workers": 0, "shard_rows": 100}
        return gm.Job(str(tmp_path / "in"), scored, gm.sink(str(tmp_path / "out"), keep=["id"]), **options).run()

    def more(number: int, shift: float = 0.0) -> None:
        night(tmp_path, "b.parquet" if how == "update" else f"b{number}.parquet", 700, shift, first=1000 * number)

    night(tmp_path, "a.parquet", 300)
    more(1)
    run({})
    more(2)
    with pytest.warns(gm.GristmillWarning, match="drift of x is not known: .*the next run can be compared"):
        second = run(asked)
    assert second.rows_run == 700 if how == "append" else second.updated["scored"] == 700
    more(3)
    assert {d.verdict for d in run(asked).drift} == {"held"}
    more(4, shift=5.0)
    with pytest.raises(gm.GateFailed, match="x: psi"):
        run(asked)
