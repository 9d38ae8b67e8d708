"""``python -m tests.support.figures``: how the house is built, in numbers. The last line is one JSON object.

A reader must open many files to follow one step, or few; prose explains code, or does not; a module has a test of its
own name, or must be looked for. None of these is a goal by itself. They are counted in the same way at every commit, so
that a change can be judged by them.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "terapipe"

# Bare participles as names of functions: they hide what is done, and by whom.
PARTICIPLE = re.compile(
    r"^_*(?:[a-z]+ed|found|made|known|given|kept|held|taken|begun|written|drawn|shown|told|seen|lost|put|cut|built|sent|"
    r"split_up|left|beaten|hidden|driven|chosen|bound|laid|led|met|read_back|run_by)$"
)
ALLOWED = {"interleaved", "seed", "need", "feed", "embed", "exceed", "proceed", "speed", "shared", "split", "need_grad"}


def trees() -> Iterator[tuple[Path, str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield path, text, ast.parse(text)


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """All functions, and whether each is a property or something else that is read like a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
            yield node, bool(names & {"property", "cached_property", "setter", "contextmanager"})


def count_prose(text: str, tree: ast.Module) -> int:
    """Lines of docstrings, without blank ones, and of comments on a line of their own."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            lines.add(token.start[0])
    written = text.splitlines()
    return sum(bool(written[number - 1].strip()) for number in lines)


def count_text() -> dict[str, float]:
    total = nonblank = prose = named = participles = found = longest = 0
    modules = small = 0
    for _, text, tree in trees():
        total += text.count("\n")
        nonblank += sum(bool(line.strip()) for line in text.splitlines())
        prose += count_prose(text, tree)
        found += len(re.findall(r"\bfound\s*(?::[^=\n]+)?=[^=]", text))
        modules += 1
        small += text.count("\n") < 45
        for node, is_value in functions(tree):
            named += 1
            longest = max(longest, (node.end_lineno or node.lineno) - node.lineno + 1)
            participles += not is_value and node.name not in ALLOWED and bool(PARTICIPLE.match(node.name))
    return {
        "lines": total,
        "modules": modules,
        "modules_under_45_lines": small,
        "functions": named,
        "longest_function": longest,
        "prose_per_100_lines": round(100 * prose / nonblank, 1),
        "participle_functions": participles,
        "participle_share": round(100 * participles / named, 2),
        "found_assignments": found,
    }


def count_tests() -> dict[str, int]:
    """Modules with a test file of their name, anywhere below tests."""
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    modules = [path.stem for path in SOURCE.rglob("*.py") if path.stem not in ("__init__", "__main__")]
    reaches = sum(
        len(re.findall(r"(?<!self)(?<!cls)\.(_[a-z]\w*)\b(?!_)", path.read_text(encoding="utf-8")))
        for path in (ROOT / "tests").rglob("test_*.py")
    )
    return {
        "modules_tested_by_name": sum(f"test_{name}" in tests for name in modules),
        "modules_to_test": len(modules),
        "private_reaches_in_tests": reaches,
    }


def files_of_a_step() -> list[str]:
    """The files of which a function runs between ``pipe.step`` and the end of ``optimizer.step``, on either of two
    ranks, for a small GPT."""
    from tests.support.ranks import Ranks

    group = Ranks(2)
    try:
        return sorted(set().union(*map(set, group(trace_step))))
    finally:
        group.close()


def trace_step() -> list[str]:
    import torch

    import terapipe as tp

    model = tp.GPT(tp.PRESETS["gpt-tiny"])
    plan = tp.Plan.uniform(batch_size=1, seq_len=64, num_slices=4, boundaries=(0, 1, model.num_layers))
    pipe = tp.Pipeline(model, plan)
    optimizer = torch.optim.AdamW(pipe.parameters())
    ids = torch.arange(64)[None]
    labels = tp.next_token_labels(ids)
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and str(SOURCE) in name:
            files.add(str(Path(name).relative_to(SOURCE)))

    sys.setprofile(note)
    import threading

    threading.setprofile(note)
    pipe.step(ids, labels)
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    sys.setprofile(None)
    return sorted(files)


def main() -> None:
    figures: dict[str, Any] = {**count_text(), **count_tests()}
    step = files_of_a_step()
    figures["files_on_a_step"] = len(step)
    print("files on the path of a step:", ", ".join(step))
    for name, value in figures.items():
        print(f"{name:28s} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
