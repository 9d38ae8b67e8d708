"""A Hugging Face Llama in slices on one process, against the same model unsliced: time of a step, and memory."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.harness import Contender, arguments, best, pin, race, report
from benchmarks.memory.measure import SavedBytes
from terapipe import Pipeline, Plan
from terapipe.hf import Decoder

TOKENS, LAYERS = 2048, 4


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=256, max_position_embeddings=TOKENS,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def whole(ids: Tensor) -> tuple[Contender, list[Tensor]]:
    model = llama()  # with torch's own attention, as transformers chooses it

    def step() -> None:
        logits = model(input_ids=ids, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        model.zero_grad()

    return step, list(model.parameters())


def sliced(ids: Tensor, slices: int) -> tuple[Contender, list[Tensor], Pipeline]:
    pipe = Pipeline(
        Decoder(llama()), Plan.uniform(batch_size=1, seq_len=TOKENS, num_slices=slices, boundaries=(0, LAYERS))
    )

    def step() -> None:
        pipe.step(ids, ids.roll(-1, 1))
        pipe.zero_grad()

    return step, list(pipe.parameters()), pipe


def saved(step: Contender, parameters: list[Tensor]) -> int:
    counter = SavedBytes(parameters)
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda held: held.x):
        step()
    return counter.peak


def stores() -> int:
    """Keys, values and a gradient of each, which the cache holds beside what autograd saves."""
    return LAYERS * 4 * TOKENS * 4 * 32 * 4


def main() -> None:
    rounds = 3 if arguments(__doc__ or "").quick else 20
    pin(0)
    ids = torch.randint(256, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    step, parameters = whole(ids)
    contenders, memory = {"unsliced": step}, {"unsliced": saved(step, parameters)}
    for slices in (8, 16):
        cut, held, _ = sliced(ids, slices)
        contenders[f"{slices} slices"], memory[f"{slices} slices"] = cut, saved(cut, held) + stores()
    times = best(race(contenders, rounds))
    figures = {f"time_{n}": times[f"{n} slices"] / times["unsliced"] for n in (8, 16)}
    figures |= {f"memory_{n}": memory[f"{n} slices"] / memory["unsliced"] for n in (8, 16)}
    rows = [[n, t, t / times["unsliced"], memory[n] / 2**20, memory[n] / memory["unsliced"]] for n, t in times.items()]
    report(__doc__ or "", ("model", "best s", "over unsliced", "MiB kept", "over unsliced"), rows, figures)
