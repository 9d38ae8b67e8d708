"""A few words from the model, through the same pipeline that trains it."""

import torch
from torch import Tensor

from terapipe.runtime.pipeline import Pipeline

WINDOW = 256  # tokens that are looked back at


@torch.no_grad()
def continued(pipe: Pipeline, ids: list[int], count: int, temperature: float, seed: int, end: int) -> list[int]:
    """The tokens that follow, until the end of the text. All ranks call it together and get the same."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = []
    while len(found) < count and found[-1:] != [end]:
        window = torch.tensor([(ids + found)[-WINDOW:]])
        found.append(_drawn(pipe.next_token_logits(window)[0].float().cpu(), temperature, generator))
    return found


def _drawn(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator))
