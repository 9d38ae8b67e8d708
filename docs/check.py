"""Checks the built site: every public name is documented and in the API reference; the network is not used.

    python docs/check.py build/site

Links and anchors are checked by mkdocs itself (``--strict``). terapipe is read, not imported: torch is not needed.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocstrings import Inventory

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("terapipe", "terapipe.hf", "terapipe.trainers", "terapipe.losses")
# What a browser fetches by itself, as opposed to links that a reader follows.
FETCHED = re.compile(r"""<(?:script|img|iframe|source|video|audio)[^>]+src=["']?(?:https?:)?//[^"'\s>]+"""
                     r"""|<link[^>]+rel=["']?(?:stylesheet|icon|preconnect|preload)["']?[^>]+href=["']?(?:https?:)?//[^"'\s>]+"""
                     r"""|(?:@import|url\()\s*["']?(?:https?:)?//[^"')]+""")  # fmt: skip


def undocumented(site: Path) -> Iterator[str]:
    terapipe = griffe.load("terapipe", search_paths=[str(ROOT / "src")])
    with (site / "objects.inv").open("rb") as file:
        reference = Inventory.parse_sphinx(file)
    for package in PACKAGES:
        module = terapipe if package == "terapipe" else terapipe[package.removeprefix("terapipe.")]
        for name in sorted(str(export) for export in module.exports or ()):
            if not module[name].docstring:
                yield f"{package}.{name} has no docstring"
            if f"{package}.{name}" not in reference:
                yield f"{package}.{name} is not in the API reference; add it to a page in docs/api"


def foreign(site: Path) -> Iterator[str]:
    for path in sorted((*site.rglob("*.html"), *site.rglob("*.css"))):
        for found in FETCHED.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)} loads from the network: {found}"


def main(site: Path) -> int:
    faults = [*undocumented(site), *foreign(site)]
    print("\n".join(faults) or f"{site}: every public name is documented, nothing is loaded from the network")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
