"""What the workers of a run may spend together: never more than there is, and nearly all of it."""

from __future__ import annotations

import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gristmill.commit.allowance import Allowance
from gristmill.files.disk import LOCAL

STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["claim", "dies", "leaves"]), st.floats(0.001, 30)), max_size=40
)


@given(steps=STEPS)
def test_claims_are_within_the_total(tmp_path_factory: object, steps: list[tuple[int, str, float]]) -> None:
    """Whoever claims, dies and leaves in whatever order; each claim is as much as was asked for."""
    folder = str(tmp_path_factory.mktemp("g"))  # type: ignore[attr-defined]
    workers = [Allowance(folder, "r", LOCAL) for _ in range(4)]
    held = [0.0] * 4
    lost = 0.0
    for who, what, least in steps:
        if what == "claim":
            part = workers[who].claim(least, 100.0)
            assert part == 0 or part >= least
            assert part > 0 or sum(held) + lost + least > 100.0 - 1e-6
            held[who] += part
        elif what == "leaves" and held[who]:
            workers[who].give_back(held[who])
            held[who] = 0.0
        elif what == "dies":
            lost, held[who] = lost + held[who], 0.0
            workers[who] = Allowance(folder, "r", LOCAL)
        assert sum(held) + lost <= 100.0 + 1e-6
    assert Allowance(folder, "another", LOCAL).claim(100.0, 100.0) == 100.0


def test_many_at_once(tmp_path: Path) -> None:
    """Nothing is claimed twice, and what is left in the end is less than anybody asks for."""
    claimed: list[float] = []

    def work() -> None:
        own = Allowance(str(tmp_path), "r", LOCAL)
        while part := own.claim(0.5, 100.0):
            claimed.append(part)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 99.5 < sum(claimed) <= 100.0 + 1e-6
