"""Merkle trees, against the definition of RFC 6962 written down once more."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from gristmill.commit import merkle


def defined(leaves):
    """MTH of RFC 6962, section 2.1, over hashes of leaves."""
    if not leaves:
        return sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return sha256(b"\1" + defined(leaves[:k]) + defined(leaves[k:])).digest()


@given(st.lists(st.binary(max_size=4), max_size=40))
def test_the_root_is_that_of_the_rfc(data):
    """For any number of leaves, also none and one."""
    assert merkle.root([merkle.leaf(d) for d in data]) == defined([sha256(b"\0" + d).digest() for d in data])


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=40), st.data())
def test_a_path_leads_from_its_leaf_to_the_root_and_from_no_other(data, draw):
    """Climbing from each leaf gives the root; from another leaf, or with a step left out, something else."""
    leaves = [merkle.leaf(d) for d in data]
    at = draw.draw(st.integers(0, len(leaves) - 1))
    steps = merkle.path(leaves, at)
    assert merkle.climbed(leaves[at], steps) == merkle.root(leaves)
    assert merkle.climbed(merkle.leaf(b"another one"), steps) != merkle.root(leaves)
    if steps:
        assert merkle.climbed(leaves[at], steps[1:]) != merkle.root(leaves)
