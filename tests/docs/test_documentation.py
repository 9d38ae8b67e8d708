"""The documentation keeps to the code: files, names, messages, links, commands, run files and pictures."""

import inspect
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import terapipe
from terapipe import hf, losses, trainers
from terapipe.api import CompareCall, PlanCall, explain
from terapipe.cli import parser
from terapipe.training import config
from tests.support.commands import options_of_verbs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("README.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def fenced(page: Path, *languages: str) -> list[str]:
    return re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


# Files


def test_architecture_names_no_file_that_is_gone() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", page)
    assert named
    assert [name for name in named if not ((ROOT / name).exists() or (ROOT / "src/terapipe" / name).exists())] == []


ROOMS = sorted((ROOT / "src/terapipe").glob("*/README.md"))


@pytest.mark.parametrize("page", ROOMS, ids=lambda page: page.parent.name)
def test_a_room_names_no_file_that_is_gone(page: Path) -> None:
    """Its own files by name, those of other rooms by their paths below the package."""
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/]+\.py\b", text))
    assert named
    places = (page.parent, page.parents[1], ROOT, *(folder for folder in page.parent.iterdir() if folder.is_dir()))
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_architecture_links_every_room_that_has_a_page() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert [room.parent.name for room in ROOMS if f"[{room.parent.name}](../src/terapipe/" not in page] == []


# The API reference


def test_the_overview_lists_every_public_name() -> None:
    """It says that what it does not list is not public."""
    page = (DOCS / "api/index.md").read_text(encoding="utf-8")
    public = {"": terapipe.__all__, "hf.": hf.__all__, "trainers.": trainers.__all__, "losses.": losses.__all__}
    names = [f"`{prefix}{name}`" for prefix, exported in public.items() for name in exported]
    assert [name for name in names if name not in page] == []


def public_classes() -> list[tuple[str, type]]:
    packages = {"terapipe": terapipe, "terapipe.hf": hf, "terapipe.trainers": trainers, "terapipe.losses": losses}
    names = [
        (f"{package}.{name}", getattr(module, name)) for package, module in packages.items() for name in module.__all__
    ]
    return [(name, value) for name, value in names if inspect.isclass(value)]


@pytest.mark.parametrize(("name", "kind"), public_classes(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_public_method_is_in_the_reference(name: str, kind: type) -> None:
    """The site shows a class's own methods. Those of a base class of ours are shown if the base class is public, or if
    the page asks for inherited members."""
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    if f"::: {name}\n    options:\n      inherited_members: true\n" in text:
        return
    documented = {other for _, other in public_classes()}
    bases = [c for c in kind.__mro__ if c.__module__.startswith("terapipe.") and c not in documented]
    assert [n for c in bases for n in vars(c) if not n.startswith("_") and n not in vars(kind)] == []


def test_the_reference_explains_every_option_of_planning() -> None:
    """The site cannot show arguments that are made from a dataclass."""
    page = (DOCS / "api/planning.md").read_text(encoding="utf-8")
    options = {entry.name: explain(entry) for kind in (PlanCall, CompareCall) for entry in fields(kind)}
    assert [name for name, text in options.items() if f"| `{name}` | {text}" not in page] == []


# Links


def anchor(heading: str) -> str:
    """As GitHub and the site make it from a heading."""
    words = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return words.replace(" ", "-")


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", [*PAGES, *BENCHMARKS, *ROOMS], ids=lambda p: str(p.relative_to(ROOT)))
def test_local_links_lead_somewhere(page: Path) -> None:
    for path, _, fragment in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(#([^)\s]*))?\)", prose(page)):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}"
        is_on_site = target.suffix in (".md", ".cff", "") or target.is_relative_to(DOCS) or "examples" in target.parts
        assert is_on_site, f"{page.name} links to {path}, which the site has not; write it as code"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE)
            assert fragment in map(anchor, headings), f"{page.name} links to {path}#{fragment}"


@each_page
def test_text_is_wrapped(page: Path) -> None:
    """Tables and links cannot be."""
    lines = prose(page).splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|") and "](" not in line] == []


# Commands


def commands(page: Path) -> Iterator[str]:
    """Command lines in blocks of code; a backslash continues one."""
    text = page.read_text(encoding="utf-8")
    blocks = [*fenced(page, "bash", "console"), *re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)]
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        found = re.match(r"\s*(?:\$ )?(?:torchrun .*-m |python -m )?terapipe (.*)", line)
        if found:
            yield found[1].split("  #")[0].split(" # ")[0]


@each_page
def test_commands_are_understood(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command)
        if words == ["--version"]:
            continue
        try:
            parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{page.name}: terapipe {command}")


@each_page
def test_options_in_the_text_exist(page: Path) -> None:
    """``terapipe plan --save`` in a sentence is not a whole command, but its verb and its options are real."""
    verbs = options_of_verbs()
    for verb, rest in re.findall(r"`terapipe (\w+)([^`]*)`", prose(page)):
        assert verb in verbs, f"{page.name}: terapipe {verb}"
        known = {option for action in verbs[verb] for option in action.option_strings}
        assert set(re.findall(r"--[\w-]+", rest)) <= known, f"{page.name}: terapipe {verb}{rest}"


@each_page
def test_run_files_are_read(page: Path) -> None:
    for text in fenced(page, "toml"):
        config.parse(text)


@each_page
def test_keys_of_run_files_exist(page: Path) -> None:
    """``data.seq_len`` in a sentence, or as an override of a command."""
    run = config.RunConfig()
    sections = "|".join(vars(run))
    for section, key in re.findall(rf"`({sections})\.(\w+)(?: = [^`]*)?`", prose(page)):
        known = (getattr(run, section), terapipe.Plan, terapipe.Profile)
        is_file = key in ("json", "py", "toml")
        assert is_file or any(hasattr(x, key) for x in known), f"{page.name}: {section}.{key}"
    for command in commands(page):
        overrides = re.findall(r" (\w+\.\w+)=", command)
        assert all(hasattr(getattr(run, s), k) for s, k in (o.split(".") for o in overrides)), command


@each_page
def test_python_is_whole(page: Path) -> None:
    for code in fenced(page, "python"):
        compile(code, page.name, "exec")


def test_there_is_something_to_check() -> None:
    """The tests above find commands, run files and code by patterns that could come to match nothing."""
    assert sum(len(list(commands(page))) for page in PAGES) >= 20
    assert sum(len(list(fenced(page, "toml"))) for page in PAGES) >= 1
    assert sum(len(list(fenced(page, "python"))) for page in PAGES) >= 8


# Reference and pictures


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    packages = {"terapipe": terapipe, "terapipe.hf": hf, "terapipe.trainers": trainers, "terapipe.losses": losses}
    public = {f"{package}.{name}" for package, module in packages.items() for name in module.__all__}
    assert set(listed) == public
    assert len(listed) == len(public)


def test_pictures_are_what_the_script_draws() -> None:
    script = runpy.run_path(str(DOCS / "pictures.py"))
    for name, timelines in script["pictures"]().items():
        drawn = script["draw"](timelines)
        assert (script["FOLDER"] / name).read_text(encoding="utf-8") == drawn, "run: python docs/pictures.py"


# Messages


def source_text() -> str:
    """All text of the source with pieces of one message joined."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_troubleshooting_quotes_messages_that_exist() -> None:
    """Numbers and names in a message differ from case to case; the words between them are in the source."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]
    assert len(quotes) >= 15
    source = source_text()
    pieces = {quote: [p.strip() for p in re.split(r"\d+|\.\.\.|\S*\.\S*|: .*|->", quote)] for quote in quotes}
    assert [quote for quote, words in pieces.items() if any(len(w) > 2 and w not in source for w in words)] == []
