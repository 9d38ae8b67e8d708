"""Optional dependencies that are missing."""

from pathlib import Path

import pytest

import terapipe
from terapipe.extras import import_extra

ROOT = Path(__file__).parents[2]


def test_a_missing_module_is_named_with_its_extra() -> None:
    with pytest.raises(ValueError, match=r"a picture needs no_such_module, which .*; in a clone .* '\.\[png\]'"):
        import_extra("no_such_module", "png", "a picture")


def test_nobody_is_told_to_install_a_package_that_is_not_ours() -> None:
    """The name is not registered on the package index: whoever takes it could put anything there."""
    folders = (Path(terapipe.__file__).parent, ROOT / "docs", ROOT / "examples")
    texts = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md")]
    wrong = ("pip install terapipe[", "pip install 'terapipe[", "pip install terapipe\n", "pip install terapipe ")
    for path in [*texts, *ROOT.glob("*.md")]:
        text = path.read_text(encoding="utf-8").replace("pip install 'terapipe[hf,data] @ file:", "")
        assert not any(words in text for words in wrong), path
