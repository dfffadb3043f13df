"""Exceptions as text: what they are called says nothing about whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

import gristmill as gm
from gristmill import errors
from gristmill.driver.shardfeed import ShardFeed
from gristmill.fingerprint.modelfiles import OtherFiles
from gristmill.process.failure import failure_of, own_frames
from gristmill.process.messages import Failure
from gristmill.worker.outcome import Uncounted


class PlanChanged(Exception):
    """A user's own."""


class Derived(gm.BadJob):
    """A user's own, too."""


Pretended = type("BadJob", (Exception,), {"__module__": "gristmill.errors"})


def test_whose_an_error_is() -> None:
    """Ours are known by what they are, also those that are only used inside; a name makes nobody's class ours."""
    ours = (gm.PlanChanged, gm.BadJob, gm.MissingExtra, OtherFiles, Uncounted)
    assert [failure_of(kind("x")).ours for kind in ours[:4]] == ["PlanChanged", "BadJob", "MissingExtra", "BadModel"]
    assert failure_of(Uncounted("x")).ours in vars(errors)
    assert [failure_of(kind("x")).ours for kind in (PlanChanged, Derived, Pretended, ValueError)] == [""] * 4


@pytest.mark.parametrize("name", ["PlanChanged", "BadJob", "MissingExtra", "gristmill.errors.BadJob"])
def test_what_follows_of_a_name_like_ours(name: str) -> None:
    """The run stops as for any other error, resumable, with the user's traceback."""
    feed = ShardFeed(1)
    feed._fail(Failure("other", name, "no", "Traceback: mine"), "w0")
    assert type(feed.fatal) is gm.RunFailed and "Traceback: mine" in str(feed.fatal)


def test_a_model_that_raises_one(tmp_path: Path) -> None:
    """A class that cannot be built is told with its own words; it is no job that cannot run, and no changed plan."""

    class Model:
        def __init__(self) -> None:
            raise PlanChanged("of my own")

        def __call__(self, batch: object) -> object:
            return batch

    job = gm.Job([{"x": 1}], Model, str(tmp_path / "out"), workers=0)
    with pytest.raises(gm.RunFailed, match=r"PlanChanged: of my own\nTraceback") as raised:
        job.run()
    assert raised.value.exit_code == 1


def test_whose_frames_are_told(tmp_path: Path) -> None:
    """Those from the user's first one on, in each traceback of a text; where none is the user's, all stay."""
    ours = f'  File "{errors.__file__}", line 3, in score\n    self.call(rows)\n    ^^^^^^^^^^^^^^^\n'
    frozen = '  File "<frozen importlib._bootstrap>", line 9, in _find\n'
    own = '  File "/home/me/risk.py", line 2, in risk\n    return 1 / 0\n           ~~^~~\n'
    typed = '  File "<stdin>", line 1, in f\n  [Previous line repeated 9 more times]\n'
    begin, end = "Traceback (most recent call last):\n", "ZeroDivisionError: division by zero\n"
    assert own_frames(begin + ours + frozen + own + ours + end) == begin + own + ours + end
    twice = f"it fails:\n{begin}{ours}{own}{end}\nDuring handling\n\n{begin}{ours}{typed}{end}more"
    assert own_frames(twice) == f"it fails:\n{begin}{own}{end}\nDuring handling\n\n{begin}{typed}{end}more"
    for text in (begin + ours + frozen + end, f"no frames: {begin}", 'text\n  File "/home/me/risk.py", line 1', ""):
        assert own_frames(text) == text
