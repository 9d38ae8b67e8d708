"""Checkpoints written while a GPU goes on: copied to pinned memory, which the host does not wait for."""

from pathlib import Path

import torch

from terapipe import GPT, GPTConfig, Pipeline, Plan, next_token_labels
from terapipe.runtime.checkpoint.writer import Staging
from tests.pretend.waits import counting_waits

GPU = torch.device("cuda", 0)
IDS = torch.arange(24)[None] % 19


def test_copies_do_not_wait() -> None:
    """Tensor by tensor into memory that is not pinned, 40 GB stopped training for ten seconds."""
    state = {"model": {"weight": torch.ones(3, device=GPU)}, "extra": {"host": torch.zeros(2)}}
    staging = Staging()
    with counting_waits() as waits:
        copy = staging.copy(state)
    assert waits == []
    staging.wait()
    state["model"]["weight"].fill_(5)
    assert copy["model"]["weight"].tolist() == [1, 1, 1]
    assert copy["model"]["weight"].is_pinned()
    again = staging.copy(state)
    assert again["model"]["weight"].data_ptr() == copy["model"]["weight"].data_ptr(), "pinning memory is slow"
    assert again["extra"]["host"].data_ptr() != state["extra"]["host"].data_ptr()


def pipeline() -> tuple[Pipeline, torch.optim.Optimizer]:
    config = GPTConfig(layers=2, hidden=16, heads=2, vocab=19, max_seq_len=24)
    pipe = Pipeline(GPT(config), Plan((1,), ((9, 15),), (0, 2)))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    pipe.step(IDS, next_token_labels(IDS))
    optimizer.step()
    return pipe, optimizer


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    pipe, optimizer = pipeline()
    saved = {name: p.detach().cpu().clone() for name, p in pipe.named_parameters()}
    saving = pipe.save_in_background(tmp_path / "saved", optimizer)
    optimizer.step()
    saving.result()
    assert not all(torch.equal(p.cpu(), saved[name]) for name, p in pipe.named_parameters())
    pipe.load(tmp_path / "saved", optimizer)
    assert all(torch.equal(p.cpu(), saved[name]) for name, p in pipe.named_parameters())
    assert all(p.device == GPU for p in pipe.parameters())


def test_random_states_of_the_gpu_are_put_back() -> None:
    """A forward that is computed again draws the same numbers as the first, and what follows is not changed by it."""
    from terapipe.runtime.random_state import RandomState

    state = RandomState.now(GPU)
    first = torch.rand(3, device=GPU)
    later = RandomState.now(GPU)
    with state.restored():
        assert torch.equal(torch.rand(3, device=GPU), first)
    follows = torch.rand(3, device=GPU)
    later.set()
    assert torch.equal(torch.rand(3, device=GPU), follows)
