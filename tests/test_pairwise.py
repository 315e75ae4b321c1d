"""Tables in which every pair of values appears."""

import itertools

import pytest

from tests.pairwise import pairwise


@pytest.mark.parametrize("sizes, rows", [((2, 2, 2), 4), ((17, 2, 3), 51), ((6, 3, 2), 18), ((3,) * 4, 9)])
def test_every_pair_appears(sizes, rows):
    table = pairwise(*map(range, sizes))
    assert rows <= len(table) < 1.4 * rows  # no table has fewer than `rows`
    for i, j in itertools.combinations(range(len(sizes)), 2):
        met = {(row[i], row[j]) for row in table}
        assert met == set(itertools.product(range(sizes[i]), range(sizes[j])))
    assert table == pairwise(*map(range, sizes))
