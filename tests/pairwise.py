"""Tables of cases for axes that do not depend on each other."""

import itertools
from collections.abc import Hashable, Iterable


def pairwise(*axes: Iterable[Hashable]) -> list[tuple]:
    """Rows of one value per axis, such that any two values of two axes meet in one.

    The row with the most new pairs comes next, the first of several: the table is the same in each run.
    """
    rows = list(itertools.product(*axes))
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    left, chosen = set().union(*pairs), []
    while left:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & left))
        chosen.append(best)
        left -= pairs[best]
    return [rows[i] for i in sorted(chosen)]
