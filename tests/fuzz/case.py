"""A case: a model, plans and options, as data that prints as a program."""

from dataclasses import dataclass, fields
from typing import Any

from terapipe import Plan

LEAST = Plan((1,), ((1,),), (0, 1))
Documents = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Gpt:
    """The library's own model, of 16 features and a vocabulary of 19. Lists of layers repeat.

    Args:
        kv_heads: Heads of keys and values, for 4 of queries.
        tied: Whether the head has the embedding's weight.
        windows: Of the layers; 0 sees all.
        head_dim: Features of a head, if they are not a quarter of all.
    """

    kv_heads: int = 4
    tied: bool = False
    windows: tuple[int, ...] = (0,)
    head_dim: int | None = None


@dataclass(frozen=True)
class Own:
    """A model of one's own, see ``own.py``.

    Args:
        layers: Kinds of layers, which repeat.
        tied: Whether the head has the embedding's weight.
        balance: What the auxiliary loss of layers is computed over: "", "microbatch", "batch" or "replicas".
    """

    layers: tuple[str, ...] = ("attention",)
    tied: bool = False
    balance: str = ""


@dataclass(frozen=True)
class HuggingFace:
    """A small copy of a type of transformers, of four layers.

    Args:
        type: Its name there.
        lora: Whether it is frozen but for adapters of peft.
    """

    type: str = "llama"
    lora: bool = False


@dataclass(frozen=True)
class Step:
    """A batch.

    Args:
        seed: Of its tokens.
        ignored: Whether many labels count for nothing.
        documents: Where documents begin in each row, of all replicas.
        plan: Another way to cut it, of the same stages.
    """

    seed: int = 0
    ignored: bool = False
    documents: Documents | None = None
    plan: Plan | None = None


@dataclass(frozen=True)
class Case:
    """What is computed twice: by the plain model, and by a pipeline.

    Args:
        model: What is trained.
        plan: How it is cut.
        steps: Batches, whose gradients add up.
        objective: A name of ``plain.py``.
        dtype: Of the weights.
        autocast: Whether steps run under ``torch.autocast`` to bfloat16.
        replicas: Each has rows of its own.
        ranks: "turns": all in one process; else processes with gloo: "tensor parallel" or "sharded" over two.
        frozen: Parts of names of parameters that are not trained.
        training: Whether the model is in training mode ...
        switches: ... and whether the mode changes between forward and backward, where the caller does both.
        evaluates: Whether the loss of each batch is evaluated first.
        fused: Whether gradients of weights are added in place.
        verifies: Whether the pipeline checks the model first.
    """

    model: Gpt | Own | HuggingFace = Gpt()
    plan: Plan = LEAST
    steps: tuple[Step, ...] = (Step(),)
    objective: str = "cross-entropy"
    dtype: str = "float64"
    autocast: bool = False
    replicas: int = 1
    ranks: str = "turns"
    frozen: tuple[str, ...] = ()
    training: bool = True
    switches: bool = False
    evaluates: bool = False
    fused: bool = True
    verifies: bool = False


def program(case: Case) -> str:
    """The case as a program that runs it."""
    return (
        "from terapipe import Plan\n"
        "from tests.fuzz.case import Case, Gpt, HuggingFace, Own, Step\n"
        "from tests.fuzz.check import show\n\n"
        f"show({text(case)})\n"
    )


def text(value: Any, depth: int = 0) -> str:
    """A value as an expression: fields that have their default are left out, long ones go on lines of their own."""
    if not isinstance(value, Case | Gpt | Own | HuggingFace | Step | Plan):
        if isinstance(value, tuple) and any(isinstance(item, Step) for item in value):
            return f"({', '.join(text(item, depth + 1) for item in value)},)"
        return repr(value)
    changed = {}
    for field in fields(value):
        item = getattr(value, field.name)
        if item != field.default:
            changed[field.name] = text(item, depth + 1)
    parts = [f"{name}={item}" for name, item in changed.items()]
    line = f"{type(value).__name__}({', '.join(parts)})"
    if depth or len(line) < 110:
        return line
    inner = "".join(f"    {part},\n" for part in parts)
    return f"{type(value).__name__}(\n{inner})"
