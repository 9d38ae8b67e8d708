"""Writes the list of modules into ``docs/architecture.md``, with the first sentence of each module's docstring.

python docs/modules.py
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "terapipe"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: written by docs/modules.py -->", "<!-- end of modules -->"


def first_sentence(path: Path) -> str:
    """Up to the first full stop that a space follows, or the whole first paragraph."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<=[.?!]) ", paragraph)[0]


def listing() -> str:
    """One list for each folder, its ``__init__.py`` first: that says what the folder is for."""
    paths = sorted(
        SOURCE.rglob("*.py"), key=lambda p: (p.parent.relative_to(SOURCE).parts, p.name != "__init__.py", p.name)
    )
    parts: list[str] = []
    for folder, members in groupby(paths, key=lambda p: p.parent):
        parts += ["", f"### `{folder.relative_to(SOURCE.parent).as_posix()}/`", ""]
        parts += [line for path in members for line in _item(path)]
    return "\n".join([BEGIN, *parts, "", END])


def _item(path: Path) -> Iterator[str]:
    text = f"- `{path.relative_to(SOURCE).as_posix()}`: {first_sentence(path)}"
    yield from textwrap.wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def updated(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name} must hold the lines {BEGIN!r} and {END!r}")
    return before + listing() + after


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
