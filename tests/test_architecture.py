"""Who may import whom, and what must never be loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import terapipe

SOURCE = Path(terapipe.__file__).parent

# Each room and the rooms it may enter; a room may always enter itself.
ALLOWED = {
    "extras": set(),
    "files": set(),
    "recompute": set(),
    "presets": {"recompute"},
    "planning": {"files", "presets", "recompute"},
    "scheduling": {"planning", "recompute"},
    "search": {"files", "presets", "planning", "recompute", "scheduling"},
    "paper": {"presets", "planning", "search"},
    "reporting": {"files", "extras", "planning", "recompute", "scheduling", "search"},
    "modeling": {"files", "presets", "recompute"},
    "losses": {"modeling"},
    "runtime": {"files", "presets", "planning", "recompute", "scheduling", "modeling", "losses"},
    "launch": {"planning", "runtime"},
    "doctor": {"api", "launch", "modeling", "planning", "presets", "reporting", "runtime"},
    "config": {"files", "planning", "presets"},
    "training": {
        "api", "extras", "files", "presets", "config", "planning", "scheduling", "search", "reporting",
        "modeling", "runtime", "launch", "hf", "losses", "recompute",
    },
    "cli": {
        "api", "extras", "files", "presets", "config", "planning", "scheduling", "search", "paper", "reporting",
        "modeling", "runtime", "launch", "doctor", "training", "verify_types", "recompute",
    },
    "api": {"presets", "planning", "recompute", "scheduling", "search", "modeling", "runtime"},
    "__init__": {"api", "presets", "planning", "recompute", "scheduling", "search", "modeling", "runtime"},
    "hf": {"api", "losses", "planning", "modeling", "recompute", "runtime", "scheduling", "search"},
    "verify_types": {"planning", "modeling", "runtime", "launch"},
    "__main__": {"cli"},
}  # fmt: skip
# Imported inside functions only. Timelines and results have methods that draw them, and what draws imports them.
LAZY = {"scheduling/timeline.py": {"reporting", "files"}, "search/result.py": {"reporting"}}
TORCH_FREE = {
    "extras",
    "files",
    "presets",
    "recompute",
    "config",
    "planning",
    "scheduling",
    "search",
    "paper",
    "reporting",
    "__init__",
}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


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
    here = room(path)
    assert entered(path) <= ALLOWED[here] | LAZY.get(path.relative_to(SOURCE).as_posix(), set())
    assert entered(path, lazy=False) <= ALLOWED[here]
    loads_torch = any(name.split(".")[0] == "torch" for name in imports(path))
    assert not (loads_torch and here in TORCH_FREE)
    if here == "modeling":  # knows of tensors in parts, never of sending and receiving
        known = ("torch.distributed.tensor", "torch.distributed.device_mesh")
        assert all(name.startswith(known) for name in imports(path) if name.startswith("torch.distributed"))


def test_only_one_module_reads_the_environment() -> None:
    readers = {p.relative_to(SOURCE).as_posix() for p in FILES if "os.environ" in p.read_text()}
    assert readers == {"runtime/environment.py"}


def test_what_decides_and_shows_does_not_load_torch() -> None:
    rooms = [p for p in FILES if room(p) in TORCH_FREE and p.name != "__init__.py"]
    modules = [".".join(("terapipe", *p.relative_to(SOURCE).with_suffix("").parts)) for p in rooms]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_public_name_is_there() -> None:
    assert all(getattr(terapipe, name) is not None for name in terapipe.__all__)
    assert set(terapipe.__all__) <= set(dir(terapipe))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        terapipe.nonsense  # noqa: B018
