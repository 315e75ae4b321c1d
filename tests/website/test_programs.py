"""Pages that are programs: outputs, notebooks, and the tool that writes outputs."""

import json

import pytest

from website import programs

PAGE = """# A page

```python
x = 2
print(x + 1)
```

```text title="Output"
3
```

Prose.

```python
print("took 1.5 ms")
```

```text title="Output, as measured on one machine"
took 9 ms
```

```py
not run
```
"""


def test_outputs_are_compared():
    first, second = programs.run(PAGE, "page.md")
    assert first.printed == "3\n" and first.agrees()
    assert second.agrees()
    (wrong, _) = programs.run(PAGE.replace("\n3\n", "\n4\n"), "page.md")
    assert not wrong.agrees()
    (_, other) = programs.run(PAGE.replace("took 9", "lasted 9"), "page.md")
    assert not other.agrees()


@pytest.mark.parametrize("shown, agrees", [("a ... c\n", True), ("...\n", True), ("a\n", False), ("", False)])
def test_an_ellipsis_stands_for_any_text(shown, agrees):
    assert programs.Ran("", shown, "Output", "a b\nd c\n").agrees() == agrees


def test_outputs_are_written_and_kept():
    stale = PAGE.replace("\n3\n", "\n4\n")
    assert programs.written(stale, "page.md") == PAGE, "what is measured stays, what is stale is replaced"
    bare = programs._BLOCK.sub(lambda m: f"```python\n{m['code']}```\n", PAGE)
    assert '```text title="Output"\n3\n```' in programs.written(bare, "page.md")


def test_lines_count_on_from_block_to_block():
    with pytest.raises(ZeroDivisionError) as caught:
        programs.run("```python\nx = 0\n```\n\n```python\n\n1 / x\n```\n", "4-errors.md")
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == ("errors.py", 3)


def test_a_notebook_has_the_blocks_in_order():
    notebook = json.loads(programs.notebook(PAGE))
    assert notebook["nbformat"] == 4
    kinds = [cell["cell_type"] for cell in notebook["cells"]]
    assert kinds == ["markdown", "code", "markdown", "code", "markdown"]
    assert notebook["cells"][1]["source"] == "x = 2\nprint(x + 1)"
    assert len({cell["id"] for cell in notebook["cells"]}) == 5
    assert not any("Output" in cell["source"] for cell in notebook["cells"])
