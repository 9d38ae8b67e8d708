"""Hooks of mkdocs: pages from outside ``docs/``, with links that work in the repository and on the site.

The front page is ``README.md``. Links are written for the repository, where ``docs/`` is one folder among others; the
site has the pages of that folder at its top.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CITATION.cff",
    "LICENSE",
    "benchmarks/README.md",
    "benchmarks/*/README.md",
    "examples/*.py",
    "examples/*.toml",
    "src/terapipe/*/README.md",
)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]*)")


def on_files(files: Any, config: Any) -> Any:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            place = _place(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        return "](" + posixpath.relpath(_place(target), posixpath.dirname(_place(source)) or ".")

    return LINK.sub(moved, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings announce a block of code by ``::``, as in reStructuredText; Markdown needs no such mark."""
    return html.replace("<p>::</p>\n", "")


def _place(path: str) -> str:
    """Where the site has a file of the repository."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")
