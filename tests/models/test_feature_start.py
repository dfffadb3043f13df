"""What a run over features imports, and where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import joblib
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import skops.io
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

import gristmill as gm
from gristmill.driver.sizes import QUICK_FEATURES, budget_of
from gristmill.fingerprint.diskcache import file_digest
from gristmill.job.options import BatchPlan, Running
from gristmill.job.specs import SklearnModel
from gristmill.models import kinds
from gristmill.models.contract import ModelInfo, Place
from gristmill.worker.describing import Describer, DescribeStages

RNG = np.random.default_rng(0)
COLUMNS = ["a", "b"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """2,000 rows of two numbers."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": np.arange(2000), **{c: RNG.random(2000) for c in COLUMNS}}), path)
    return path


def fitted(estimator: object, source: Path) -> object:
    """The estimator, fitted on the columns."""
    frame = pq.read_table(source).select(COLUMNS).to_pandas()
    return estimator.fit(frame, frame.a > frame.b)  # type: ignore[attr-defined]


def script(code: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that runs this code."""
    env = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, check=False)


def test_skops_is_imported_without_torch() -> None:
    """It trusts the same types as ever, and what was held back can be imported afterwards."""
    told = script(
        "import sys\n"
        "from gristmill.models.skopsfile import io\n"
        "assert io is sys.modules['skops.io'] and 'torch' not in sys.modules\n"
        "assert not any(module is None for name, module in sys.modules.items() if 'array_api_compat' in name)\n"
        "from skops.io import _trusted_types as types\n"
        "from sklearn.utils import all_estimators\n"
        "known = [types.get_type_name(kind) for _, kind in all_estimators()]\n"
        "assert 'torch' in sys.modules and len(known) > 150\n"
        "assert types.SKLEARN_ESTIMATOR_TYPE_NAMES == [n for n in known if n.startswith('sklearn.')]\n"
    )
    assert told.returncode == 0, told.stderr


RUN = (
    "import sys, gristmill as gm\n"
    "model = gm.SklearnModel(sys.argv[1], method='predict_proba', allow_pickle=True, sha256=sys.argv[4] or None)\n"
    "report = gm.run(gm.Job(sys.argv[2], model, gm.sink(sys.argv[3], keep=['id']), workers=2))\n"
    "print('sklearn' in sys.modules, report.state)\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are no forks here")
def test_the_driver_imports_no_scikit_learn(source: Path, tmp_path: Path) -> None:
    """A fork describes the model; without forks this process does, and it is the same job."""
    model = tmp_path / "model.skops"
    skops.io.dump(fitted(HistGradientBoostingClassifier(max_iter=3), source), model)
    given = (str(model), str(source), str(tmp_path / "out"), file_digest(model))
    first, again = script(RUN, *given), script(RUN, *given, GRISTMILL_FORK="0")
    assert (first.returncode, first.stdout) == (0, "False done\n"), first.stderr
    assert (again.returncode, again.stdout) == (0, "True nothing to do\n"), again.stderr
    answers = gm.read(str(tmp_path / "out")).to_table().sort_by("id")
    frame = pq.read_table(source).select(COLUMNS).to_pandas()
    expected = fitted(HistGradientBoostingClassifier(max_iter=3), source).predict_proba(frame)  # type: ignore[attr-defined]
    assert np.array_equal(np.stack(answers["probabilities"].to_numpy()), expected)


class Own(LogisticRegression):  # type: ignore[misc]
    """An estimator of the user's own."""


def test_code_of_the_user_is_compared_where_it_is(source: Path, tmp_path: Path) -> None:
    """A model with a class of the user's, and one that cannot be opened, are described by the driver as ever."""
    own = tmp_path / "own.joblib"
    joblib.dump(fitted(Own(), source), own)
    spec = SklearnModel(str(own), method="predict_proba", allow_pickle=True, sha256=file_digest(own))
    schema = pq.read_schema(source)
    assert kinds.describe(spec, schema).code == (Own,)
    assert Describer(DescribeStages(spec, schema), "w0")._described() is None
    bad = tmp_path / "bad.skops"
    bad.write_bytes(b"PK\x03\x04")
    failed = script(RUN, str(bad), str(source), str(tmp_path / "out"), "")
    assert failed.returncode != 0 and "BadModel" in failed.stderr and "is a pickle (or not a model" in failed.stderr
    assert not (tmp_path / "out").exists()


def test_what_cython_brings_is_no_code_of_the_user(source: Path, tmp_path: Path) -> None:
    """The type of Cython's functions, which boosting holds, is not noted as code."""
    model = tmp_path / "model.joblib"
    joblib.dump(fitted(HistGradientBoostingClassifier(max_iter=2), source), model)
    spec = SklearnModel(str(model), allow_pickle=True, sha256=file_digest(model))
    assert kinds.describe(spec, pq.read_schema(source)).code == ()


def test_quick_calls_grow() -> None:
    """Calls of a model of features on a CPU take more rows while they are quick, as those of functions do, unless their
    number was given.
    """

    def plan(rows: int | str, device: str = "cpu") -> BatchPlan:
        job = SimpleNamespace(running=Running(batch_rows=rows))
        return budget_of(SimpleNamespace(info=ModelInfo("m"), job=job, place=Place(device)))  # type: ignore[arg-type]

    assert (plan("auto").rows, plan("auto").quick) == (1024, QUICK_FEATURES)
    assert (plan(500).rows, plan(500).quick) == (500, None)
    assert plan("auto", "cuda").quick is None
