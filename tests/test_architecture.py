"""Who may import whom, and what must never be loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import terapipe

SOURCE = Path(terapipe.__file__).parent

# A room imports rooms with a smaller number, and itself. Nothing else.
LEVELS = {
    "extras": 0, "files": 0,
    "planning": 1,  # what to cut, and what it costs
    "scheduling": 2,  # in what order
    "search": 3, "modeling": 3,  # which plan; slices of a model
    "losses": 4, "published": 4,
    "runtime": 5,  # one step
    "hf": 6, "reporting": 6,
    "api": 7,
    "trainers": 8, "launch": 8,
    "training": 9, "doctor": 9,
    "cli": 10,
}  # fmt: skip
LEVELS |= {"__init__": LEVELS["api"] + 1, "__main__": LEVELS["cli"] + 1}
# Imported inside functions only. Timelines and results have methods that draw them, and what draws imports them.
LAZY = {"scheduling/timeline.py": {"reporting"}, "search/result.py": {"reporting"}}
TORCH_FREE = {"extras", "files", "planning", "scheduling", "search", "published", "reporting", "__init__"}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def is_torch_free(path: Path) -> bool:
    return room(path) in TORCH_FREE or path == SOURCE / "training" / "config.py"


def imports(path: Path, *, lazy: bool = True) -> set[str]:
    """What a module imports; without ``lazy``, at its top level only."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            if node.module == "terapipe":
                names |= {f"terapipe.{alias.name}" for alias in node.names}
    return names


def entered(path: Path, *, lazy: bool = True) -> set[str]:
    """The other rooms that a module imports from."""
    names = {f"{name}." for name in imports(path, lazy=lazy)}
    return {name.split(".")[1] for name in names if name.startswith("terapipe.")} - {room(path), ""}


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_respect_the_rooms(path: Path) -> None:
    here, relative = room(path), path.relative_to(SOURCE).as_posix()
    above = {name for name in entered(path) if LEVELS[name] >= LEVELS[here]}
    assert above <= LAZY.get(relative, set())
    assert not above & entered(path, lazy=False)
    loads_torch = any(name.split(".")[0] == "torch" for name in imports(path))
    assert not (loads_torch and is_torch_free(path))
    if here == "modeling":  # knows of tensors in parts, never of sending and receiving
        known = ("torch.distributed.tensor", "torch.distributed.device_mesh")
        assert all(name.startswith(known) for name in imports(path) if name.startswith("torch.distributed"))


def test_training_enters_the_runtime_by_its_doors() -> None:
    """``terapipe train`` is a client: what it needs of the runtime must be a public name of it."""
    doors = {"terapipe.runtime", "terapipe.runtime.checkpoint"}
    names = set().union(*(imports(path) for path in FILES if room(path) == "training"))
    assert {name for name in names if name.startswith("terapipe.runtime")} <= doors


def test_only_one_module_reads_the_environment() -> None:
    readers = {p.relative_to(SOURCE).as_posix() for p in FILES if "os.environ" in p.read_text()}
    assert readers == {"runtime/comm/environment.py"}


def test_what_decides_and_shows_does_not_load_torch() -> None:
    rooms = [p for p in FILES if is_torch_free(p) and p.name != "__init__.py"]
    modules = [".".join(("terapipe", *p.relative_to(SOURCE).with_suffix("").parts)) for p in rooms]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_public_name_is_there() -> None:
    assert all(getattr(terapipe, name) is not None for name in terapipe.__all__)
    assert set(terapipe.__all__) <= set(dir(terapipe))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        terapipe.nonsense  # noqa: B018
