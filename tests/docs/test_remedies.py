"""A message that tells what to do names what exists: options, arguments, keys of run.toml, functions and methods."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import terapipe
from terapipe.training.config import RunConfig, keys_of
from tests.support.commands import options_of_verbs

SOURCE = Path(terapipe.__file__).parent
ERRORS = re.compile(r"\w*(Error|Exception|Refused|Failure)\w*$")
HOLE = "\N{REPLACEMENT CHARACTER}"  # stands for what an f-string fills in

# Options, arguments and names of other programs, which messages may name, too.
OTHERS = {
    "optim",  # TrainingArguments
    "--force-reinstall", "--nproc-per-node", "--local-dir",  # pip, torchrun, hf download
    "retain_graph",  # Tensor.backward
    "num_labels", "output_router_logits", "router_aux_loss_coef", "trust_remote_code",  # models of transformers
    "gradient_checkpointing", "gradient_accumulation_steps", "save_only_model",  # TrainingArguments
    "torch_compile", "optimizers",  # TrainingArguments, Trainer
    "fused_lm_head",  # TRL
}  # fmt: skip


@cache
def messages() -> tuple[tuple[str, str], ...]:
    """Every text in a ``raise``, with the place where it stands."""
    return tuple(
        (f"{path.relative_to(SOURCE)}:{node.lineno}", text)
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and node.exc is not None
        for text in texts(node.exc)
    )


def texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        parts = (str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values)
        yield "".join(parts)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


@cache
def names() -> frozenset[str]:
    """Functions, classes, methods, arguments, fields and public attributes of the library."""
    seen: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                seen.add(node.name)
            elif isinstance(node, ast.arg):
                seen.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                seen.add(node.target.id)
    return frozenset(seen)


def options() -> set[str]:
    return {option for actions in options_of_verbs().values() for a in actions for option in a.option_strings}


def keys() -> dict[str, set[str]]:
    return {part.name: {entry.name for entry in keys_of(part.default)} for part in fields(RunConfig)}


def test_messages_are_found() -> None:
    assert len(messages()) > 400
    assert any("--cluster" in text for _, text in messages())


def test_options_exist() -> None:
    known = options() | OTHERS
    wrong = [
        (where, option)
        for where, text in messages()
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)
        if option not in known
    ]
    assert wrong == []


def test_arguments_exist() -> None:
    """Written as ``name=``, where a value or dots follow."""
    wrong = [
        (where, name)
        for where, text in messages()
        for name in re.findall(rf"(?<![\w.'\"-])([a-z_]+)=(?=['\"\w.{HOLE}\[(])", text)
        if name not in names() | OTHERS
    ]
    assert wrong == []


def test_keys_of_the_file_exist() -> None:
    sections = keys()
    wrong = [
        (where, f"{section}.{key}")
        for where, text in messages()
        for section, key in re.findall(r"(?<![\w./])([a-z]+)\.([a-z_]+)\b(?!\()", text)
        if section in sections and key not in sections[section] and key not in ("json", "toml", "py")
    ]
    assert wrong == []


def test_functions_and_methods_exist() -> None:
    """Written in backquotes, with parentheses, or as an attribute of the library or of one of its classes."""
    patterns = (
        r"`+([\w.]+)(?:\(.*?\))?`+",  # in backquotes
        r"(?<![\w.])((?:[A-Z]\w+|tp|terapipe|pipe|pipeline|model)\.[a-z_]\w*)",
    )
    wrong = [
        (where, name)
        for where, text in messages()
        for pattern in patterns
        for name in re.findall(pattern, text)
        if name.split(".")[0] not in ("torch", "transformers", "trl", "peft", "nn", "dist")
        and not set(name.split(".")[1:] or [name]) <= names() | set(dir(terapipe)) | modules()
    ]
    assert wrong == []


def modules() -> set[str]:
    return {path.stem for path in SOURCE.rglob("*.py")} | {path.name for path in SOURCE.rglob("*") if path.is_dir()}
