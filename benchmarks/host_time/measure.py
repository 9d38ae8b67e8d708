"""What the host does for a layer of a slice and for an action, in Pipeline.step and in the plain model."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.harness import arguments, pin, summary, table
from benchmarks.host_time.counting import COPIES, Counts, Work, calls, operations
from terapipe import GPT, GPTConfig, Pipeline, Plan
from terapipe.hf import Decoder

HIDDEN, VOCAB, TOKENS = 64, 977, 8  # so small that the host's own time is what takes time; tokens of a slice
FEW, MANY = (4, 4), (8, 8)  # layers and slices


class Run(NamedTuple):
    """A step, and what makes the next one like it."""

    step: Work
    clear: Work


def device() -> torch.device:
    """A GPU, real or pretended (tests/pretend), if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype() -> torch.dtype:
    return torch.bfloat16 if device().type == "cuda" else torch.float32


def tokens(slices: int) -> Tensor:
    ids = torch.randint(VOCAB, (1, slices * TOKENS), generator=torch.Generator().manual_seed(0))
    return ids.to(device())


def llama(layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=512,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype())
    return model.to(device())  # type: ignore[no-any-return]


def gpt(layers: int) -> GPT:
    config = GPTConfig(layers=layers, hidden=HIDDEN, heads=4, kv_heads=2, vocab=VOCAB, max_seq_len=512)
    return GPT(config).to(device(), dtype())


def plain_llama(layers: int, slices: int) -> Run:
    model: Any = llama(layers)
    ids = tokens(slices)
    return Run(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward(), model.zero_grad)


def plain_gpt(layers: int, slices: int) -> Run:
    model, ids = gpt(layers), tokens(slices)

    def step() -> None:
        logits = model.logits(model(ids))
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    return Run(step, model.zero_grad)


def sliced(model: Any, layers: int, slices: int) -> Run:
    plan = Plan.uniform(batch_size=1, seq_len=slices * TOKENS, num_slices=slices, boundaries=(0, layers))
    pipe, ids = Pipeline(model, plan, device=device()), tokens(slices)
    labels = ids.roll(-1, 1)
    return Run(lambda: pipe.step(ids, labels), pipe.zero_grad)


def sliced_llama(layers: int, slices: int) -> Run:
    return sliced(Decoder(llama(layers), backend="attention"), layers, slices)


def sliced_gpt(layers: int, slices: int) -> Run:
    return sliced(gpt(layers), layers, slices)


def warm(run: Run) -> Run:
    for _ in range(3):
        run.step()
        run.clear()
    return run


def count(run: Run) -> Counts:
    """All but the time."""
    run.clear()
    python, c = calls(run.step)
    run.clear()
    names = operations(run.step).counts
    return Counts(python, c, names.total(), sum(names[name] for name in COPIES))


def timed(run: Run) -> float:
    """Of the host: on a GPU until all is queued, on a CPU whatever other programs do meanwhile."""
    now = time.perf_counter if device().type == "cuda" else time.process_time
    run.clear()
    start = now()
    run.step()
    seconds = now() - start
    if device().type == "cuda":
        torch.cuda.synchronize()
    return seconds * 1e6


Maker = Callable[[int, int], Run]


def of_layer_and_action(make: Maker, rounds: int) -> tuple[Counts, Counts]:
    """By differences between models with few and many layers, and steps with few and many slices:

    step = rest + layers * rest + slices * (2 * per action + layers * per layer)
    """
    (few_layers, few_slices), (many_layers, many_slices) = FEW, MANY
    sizes = [(layers, slices) for slices in (few_slices, many_slices) for layers in (few_layers, many_layers)]
    few, few_deeper, many, many_deeper = measure([warm(make(*size)) for size in sizes], rounds)
    slices = many_slices - few_slices
    layer = ((many_deeper - few_deeper) - (many - few)).over(slices * (many_layers - few_layers))
    return layer, ((many - few).over(slices) - layer.over(1 / few_layers)).over(2)


def of_plain_layer_and_action(make: Maker, rounds: int) -> tuple[Counts, Counts]:
    """A plain model has one slice, and all that is not its layers' is its actions', a forward and a backward."""
    (few_layers, _), (many_layers, _) = FEW, MANY
    few, many = measure([warm(make(layers, 1)) for layers in (few_layers, many_layers)], rounds)
    layer = (many - few).over(many_layers - few_layers)
    return layer, (few - layer.over(1 / few_layers)).over(2)


def measure(runs: Sequence[Run], rounds: int) -> list[Counts]:
    """The runs take turns; the best time counts."""
    counts = [count(run) for run in runs]
    times = [[timed(run) for run in runs] for _ in range(rounds)] or [[0.0] * len(runs)]
    return [c._replace(microseconds=min(mine)) for c, mine in zip(counts, zip(*times, strict=True), strict=True)]


def of_foreign_layer() -> tuple[Counts, Counts]:
    """What each layer of other stages adds to a forward of a first stage, and to the head of a last one."""
    few, many = (_calls_of_ends(layers) for layers in (4, 12))
    forward, head = ((b - a).over(12 - 4) for a, b in zip(few, many, strict=True))
    return forward, head


def _calls_of_ends(layers: int) -> tuple[Counts, Counts]:
    """Of a first stage's forward and a last stage's head, both with two of the layers."""
    decoder, ids = Decoder(llama(layers), backend="attention"), tokens(1)
    first, last = decoder.stage(0, 2, device()), decoder.stage(layers - 2, layers, device())
    cache = first.make_cache(1, TOKENS)
    cache.begin(0, TOKENS)
    hidden = torch.zeros(1, TOKENS, HIDDEN, dtype=dtype(), device=device())

    def forward() -> Tensor:
        return first(ids, cache)  # type: ignore[no-any-return]

    def head() -> Tensor:
        return last.loss(hidden, ids)

    for work in (forward, head):
        work()
    return Counts(*calls(forward)), Counts(*calls(head))


def on_vocabulary(make: Maker) -> float:
    """Operations of a slice whose result is as large as the embedding. ``index_add_`` touches only rows of tokens."""
    slices = MANY[1]
    run = warm(make(2, slices))
    names = operations(run.step, (VOCAB, HIDDEN)).on_matrix
    return sum(number for name, number in names.items() if name != "index_add_") / slices


def python_calls(make: Maker) -> float:
    """Of a whole step with 8 layers and 8 slices, for each layer of each slice."""
    layers, slices = MANY
    run = warm(make(layers, slices))
    return calls(run.step)[0] / (layers * slices)


def main() -> None:
    chosen = arguments(__doc__ or "", counts="leave times out, which mean nothing on pretended GPUs")
    rounds = 0 if chosen.counts else 10 if chosen.quick else 60
    pin(0)
    rows: list[list[object]] = []
    figures: dict[str, float] = {}
    for name, ours, plain in (("GPT", sliced_gpt, plain_gpt), ("Llama", sliced_llama, plain_llama)):
        both = of_layer_and_action(ours, rounds), of_plain_layer_and_action(plain, rounds)
        for part, mine, theirs in zip(("layer and slice", "action"), *both, strict=True):
            for what, a, b in zip(Counts._fields, mine, theirs, strict=True):
                if a or b:
                    key = f"{name.lower()}_{what}_per_{part.split()[0]}"
                    figures |= {key: a, f"{key}_plain": b}
                    rows.append([name, part, what, float(a), float(b), a / b if b else "-"])
        figures[f"{name.lower()}_python_of_a_step"] = python_calls(ours)
        figures[f"{name.lower()}_operations_on_vocabulary"] = on_vocabulary(ours)
    for part, counts in zip(("forward", "head"), of_foreign_layer(), strict=True):
        figures |= {f"foreign_layer_python_per_{part}": counts.python, f"foreign_layer_c_per_{part}": counts.c}
    table(__doc__ or "", ("model", "per", "what", "in slices", "plain", "ratio"), rows)
    print(f"{dtype()} on {device().type}, {TOKENS} tokens in a slice, hidden {HIDDEN}\n")
    summary(figures)
    sys.stdout.flush()
    os._exit(0)  # pretended GPUs have threads that nobody waits for


if __name__ == "__main__":
    main()
