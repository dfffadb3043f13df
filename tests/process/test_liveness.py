"""Signs of life: who is silent for longer than it may be is given up, nobody else, whatever holds up who watches."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.process.liveness import LOADING, Vigil, patience

SIGNS = st.lists(st.tuples(st.floats(0.01, 30.0), st.booleans()), max_size=60)


@settings(deadline=None)
@given(SIGNS, st.floats(0.1, 20.0))
def test_fault_58_given_up_are_those_who_are_silent_while_somebody_listens(
    passing: list[tuple[float, bool]], limit: float
) -> None:
    """Steps of the clock, with or without a sign: late exactly when the time listened to without one is over its
    limit and margin, where a pause of who listens counts as a second.
    """
    vigil, now, silent = Vigil(), 100.0, 0.0
    vigil.watch("w0")
    vigil.heard("w0", limit)
    assert vigil.late(now) == []
    for seconds, sign in passing:
        now += seconds
        if sign:
            vigil.heard("w0")
            silent = 0.0
        silent += min(Vigil.STEP, seconds)
        found = dict(vigil.late(now))
        assert ("w0" in found) == (silent > patience(limit) + 1e-9 or found.get("w0", 0) > patience(limit))
        assert abs(found.get("w0", silent) - silent) < 1e-6


def test_fault_58_loading_is_left_out_and_rest_is_rest() -> None:
    """Before a worker has said what it may take, it has ten minutes; who is not watched is never late."""
    vigil = Vigil()
    vigil.watch("w0")
    late, now = [], 0.0
    while not late:
        now += 0.5
        late = vigil.late(now)
    assert patience(LOADING) < now < patience(LOADING) + 2.0
    vigil.rest("w0")
    assert [vigil.late(now + i) for i in range(1000)] == [[]] * 1000
    vigil.watch("w0")
    vigil.heard("w0", 1.0)
    assert [bool(vigil.late(now + 1000 + i)) for i in range(9)] == [False] * 6 + [True] * 3
