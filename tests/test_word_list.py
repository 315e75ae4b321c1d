"""The word list of ``make check``: finds planted words in prose and names only."""

import string

import pytest
from hypothesis import given, settings, strategies

from tests import word_list

ALPHABET = string.ascii_lowercase + " -"

PLANTED = '''"""What several kernels take up, of rows that lie in memory anyway and that nobody else has any use for."""


def again(how_many):
    # Blocks are dealt out to the
    # multiprocessors.
    nobody = "whoever reads strings beside code"  # strings are not prose
    return nobody, how_many
'''


def test_python():
    found = {(f.line, f.found) for f in word_list.check("planted.py", PLANTED)}
    assert found == {
        (1, "What ..."),
        (1, "What several kernels take up, ..."),
        (1, "take up"),
        (1, "nobody"),
        (4, "again"),
        (4, "how_many"),
        (5, "dealt out"),
        (6, "multiprocessors"),
        (7, "nobody"),
    }


def test_messages_say_where_and_what_to_write():
    (finding,) = word_list.check("docs/page.md", "# A page\n\nOne block per\nmultiprocessor.\n")
    assert str(finding) == "docs/page.md:4: 'multiprocessor': write SM, SMs"


def test_a_phrase_may_break_across_lines():
    (finding,) = word_list.check("page.md", "The second-level\ncache holds it.\n")
    assert (finding.line, finding.found, finding.write) == (1, "second-level cache", "L2")


def test_markdown_code_is_not_prose():
    page = (
        "Prose with `nobody` in code and a [link](whoever.md).\n\n```text\nrank 1 <- behind the others\n```\n\n"
        "    nobody in an indented block\n\nEnd.\n"
    )
    assert word_list.check("page.md", page) == []


def test_c_comments():
    text = 'int n = 0;  // nobody waits\n/* of all\n * multiprocessors */\nconst char* s = "whoever";\n'
    found = [(f.line, f.found) for f in word_list.check("kernel.cuh", text)]
    assert found == [(1, "nobody"), (3, "multiprocessors")]


@pytest.mark.parametrize("row", word_list.WORDS, ids=lambda row: row.pattern)
def test_every_row_finds_what_its_pattern_says(row):
    """The search for stems hides no match, on a page or in a comment."""

    @settings(max_examples=5, deadline=None)
    @given(strategies.from_regex(row.pattern, fullmatch=True, alphabet=ALPHABET))
    def planted(words):
        assert word_list.check("page.md", f"It is {words}.\n")
        assert word_list.check("module.py", f"# It is {words}.\n")

    planted()
