"""`make demo-night`: three nights of a job that nobody watches, in a minute.

    python examples/nights.py [--reviews 6000]

A model that tells good film reviews from bad ones is trained and approved. In the first night the job scores all
reviews with it; in the second only those that are new or changed. In the third most texts are a site's cookie notice:
the answers are not like those before, so nothing is published, and somebody is told. The source is mended, the job run
again; a page shows what happened. Everything is in the folder `demo/nights`, made anew each time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
HOME = Path("demo/nights")
JOB = """\
source: reviews/
model: {sklearn: "registry:taste@batch", features: [text], method: predict_proba, label: fresh, output: score}
sink: {uri: scores, keep: [id], model_version: model}
update: {key: [id]}                        # what has not changed keeps its answer
gates: {min_ok: 0.99, drift: {score: {psi: 0.25}}}
alerts: [{command: tee -a told.jsonl, on: [failed, gate, drift, recovered]}]
deadline: 1h
"""


def say(text: str) -> None:
    """What comes next."""
    print(f"\n== {text}", flush=True)


def gristmill(*words: str) -> int:
    """Type a command; its exit code."""
    print(f"$ {shlex.join(['gristmill', *words])}", flush=True)
    program = Path(sys.executable).with_name("gristmill")
    return subprocess.run([program, *words], cwd=HOME, check=False).returncode


def trained(reviews: pa.Table) -> None:
    """A model of scikit-learn's, fitted to some of the reviews."""
    import skops.io
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(HashingVectorizer(n_features=1 << 15, ngram_range=(1, 2)), LogisticRegression(C=4.0))
    model.fit(reviews["text"].to_pylist(), reviews["category"].to_pylist())
    skops.io.dump(model, HOME / "taste-1.skops")


def written(rows: pa.Table) -> None:
    """The reviews as the job finds them in the evening."""
    pq.write_table(rows, HOME / "reviews" / "all.parquet")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reviews", type=int, default=6000)
    count = parser.parse_args().reviews
    sys.path.insert(0, str(ROOT / "tests"))
    import kit

    shutil.rmtree(HOME, ignore_errors=True)
    (HOME / "reviews").mkdir(parents=True)
    every = kit.reviews()
    every = every.filter(pc.is_in(every["category"], pa.array(["fresh", "rotten"]))).select(["category", "text"])
    every = every.take(np.random.default_rng(0).permutation(len(every)))
    rows = pa.table({"id": range(count), "text": every["text"][-count:]})
    (HOME / "job.yaml").write_text(JOB)

    say("a model is trained, and somebody approves it")
    trained(every.slice(0, len(every) - count))
    steps = [
        gristmill("approve", "taste", "1", "--for", "batch", "--path", "taste-1.skops", "--by", "anna@example.org")
    ]

    say("the first night: every review is scored")
    written(rows.slice(0, count - 50))
    steps.append(gristmill("run", "job.yaml"))

    say("the second night: 50 new reviews, and 50 that were written anew")
    before = rows["text"].combine_chunks()
    anew = pc.binary_join_element_wise(before[:50], "Seen again: a joy.", " ")
    texts = pa.concat_arrays([anew, before[50:]])
    rows = rows.set_column(1, "text", texts)
    written(rows)
    steps.append(gristmill("run", "job.yaml"))

    say("the third night: from three sites of four comes a cookie notice in place of each review")
    notice = pc.equal(pc.bit_wise_and(rows["id"], 3), 0)
    written(rows.set_column(1, "text", pc.if_else(notice, texts, "We value your privacy: accept all?")))
    refused = gristmill("run", "job.yaml")

    say("the texts are there again, and 20 reviews are gone: nobody had wrong scores meanwhile")
    written(rows.slice(20))
    steps.append(gristmill("run", "job.yaml"))

    say("what made one of the scores, and a page for the morning")
    steps += [gristmill("prove", "scores", "--row", "77", "--key", "id"), gristmill("verify", "scores")]
    steps.append(gristmill("report", "scores", "-o", "report.html"))
    told = [json.loads(line)["kind"] for line in (HOME / "told.jsonl").read_text().splitlines()]
    print(f"\nwho is told was told of: {', '.join(told)}\nthe page: {HOME / 'report.html'}")
    wrong = any(steps) or refused != 3 or told != ["drift", "recovered"]
    print("this was not as it should be" if wrong else "three nights, one refused; what is published is whole")
    return int(wrong)


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "110")
    sys.exit(main())
