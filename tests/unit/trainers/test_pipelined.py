"""A Hugging Face model whose forward runs through a pipeline: gradients of the plain model, in float64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe import Plan
from terapipe.hf import UnsupportedModelError
from terapipe.trainers import PipelineConfig, pipelined
from tests.support.ranks import Ranks
from tests.unit.trainers import runs

pytestmark = pytest.mark.usefixtures("quiet_models")
ROWS, TOKENS = 3, 29


def ids() -> Tensor:
    return torch.randint(3, 128, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def padded(left: bool) -> dict[str, Tensor]:
    """Rows of different lengths."""
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    for row in range(ROWS):
        cut = 4 * row
        mask[row, : cut if left else 0] = 0
        mask[row, TOKENS - cut :] = 0
    labels = ids().masked_fill(mask == 0, -100)
    labels[range(ROWS), mask.argmax(1)] = -100  # nothing comes before
    return {"input_ids": ids(), "attention_mask": mask, "labels": labels}


def packed() -> dict[str, Tensor]:
    """As collators that flatten make them: one row, positions begin again."""
    lengths = (11, 1, 30, 8)
    row = torch.randint(3, 128, (1, sum(lengths)), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = row.masked_fill(positions == 0, -100)
    return {"input_ids": row, "position_ids": positions, "labels": labels, "use_cache": False}


def batches() -> dict[str, dict[str, Any]]:
    return {
        "whole": {"input_ids": ids(), "labels": ids()},
        "padded on the right": padded(left=False),
        "padded on the left": padded(left=True),
        "packed": packed(),
        "of all accumulated": {"input_ids": ids(), "labels": ids(), "num_items_in_batch": torch.tensor(200)},
        "logits": {"input_ids": ids()},
    }


def loss_of(model: Any, batch: dict[str, Any]) -> Tensor:
    found = model(**batch)
    return found.loss if "labels" in batch else found.logits[:, 3:].square().sum()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def piped(name: str, slices: int) -> tuple[float, dict[str, Tensor]]:
    with runs.as_under_torchrun():
        model = runs.model()
        pipelined(model, slices)
        loss = loss_of(model, batches()[name])
        loss.backward()
        return loss.item(), gradients(model)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", batches())
def test_gradients(name: str, size: int, ranks: Callable[[int], Ranks]) -> None:
    model = runs.model()
    wanted = loss_of(model, batches()[name])
    wanted.backward()
    found = [piped(name, 5)] if size == 1 else ranks(2)(piped, name, 5)
    assert {key for _, part in found for key in part} == gradients(model).keys()
    largest = max(g.abs().max().item() for g in gradients(model).values())
    for loss, part in found:
        assert loss == pytest.approx(wanted.item(), rel=1e-6)  # transformers computes it in float32
        for key, gradient in part.items():
            assert (gradient - gradients(model)[key]).abs().max().item() / largest < 2e-7, key


def test_values_are_where_the_caller_knows_them(sliced: Any) -> None:
    """Also those of rows that were moved over their padding."""
    batch = padded(left=True)
    del batch["labels"]
    with torch.no_grad():
        found, wanted = sliced(**batch).logits, runs.model()(**batch, use_cache=False).logits
    real = batch["attention_mask"].bool()
    assert torch.allclose(found[real], wanted[real])


def test_the_model_generates_is_saved_and_comes_back(tmp_path: Any) -> None:
    model, whole = runs.model(), runs.model()
    made = pipelined(model, 4)
    first = model.generate(ids()[:1], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(first, whole.generate(ids()[:1], max_new_tokens=5, do_sample=False, pad_token_id=0))
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids()).logits, whole(input_ids=ids()).logits)
        assert model(input_ids=ids(), labels=ids()).logits is not None
    model.save_pretrained(tmp_path)
    made.remove()
    assert "forward" not in model.__dict__
    model(input_ids=ids(), labels=ids()).loss.backward()


def test_a_copy_has_no_pipeline() -> None:
    model = runs.model()
    pipelined(model, 4)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        next(copied.parameters()).zero_()
        assert not torch.allclose(copied(input_ids=ids()).logits, model(input_ids=ids()).logits)
    copied(input_ids=ids(), labels=ids()).loss.backward()
    assert not gradients(model)
    copied.zero_grad()
    assert not gradients(copied)


def trained_by_hand() -> dict[str, Tensor]:
    with runs.as_under_torchrun():
        model = runs.model()
        made = pipelined(model, 4)
        optimizer = torch.optim.SGD(made.pipe.parameters(), lr=0.1)
        for _ in range(2):
            model(input_ids=ids(), labels=ids(), use_cache=True).loss.backward()
            optimizer.step()
            model.zero_grad()
        if made.pipe.transport.size > 1:
            with pytest.raises(ValueError, match="gather"):
                model.generate(ids()[:1], max_new_tokens=2, pad_token_id=0)
        made.gather()
        model.generate(ids()[:1], max_new_tokens=2, pad_token_id=0)
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_loop_of_ones_own(ranks: Callable[[int], Ranks]) -> None:
    wanted = trained_by_hand()
    for found in ranks(2)(trained_by_hand):
        assert all(torch.allclose(found[name], weight) for name, weight in wanted.items())


def test_accumulation_and_zero_grad() -> None:
    model = runs.model()
    pipelined(model, 4)
    for _ in range(2):
        model(input_ids=ids(), labels=ids()).loss.backward()
    twice = copy.deepcopy(gradients(model))
    model.zero_grad()
    assert not gradients(model)
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert all(torch.allclose(g / 2, gradients(model)[name]) for name, g in twice.items())


REFUSED = [
    ({"inputs_embeds": torch.zeros(1, 4, 32)}, "a pipeline takes input_ids"),
    ({}, "needs input_ids"),
    ({"input_ids": ids(), "attention_mask": torch.ones(1, 1, 4, 4)}, "4 dimensions"),
    ({"input_ids": ids(), "attention_mask": (torch.arange(TOKENS) != 5).expand(ROWS, -1)}, "not inside"),
    ({**padded(left=False), "labels": ids()}, "labels count at places"),
    ({"input_ids": ids(), "position_ids": torch.arange(3, 3 + TOKENS)[None]}, "count from 0"),
    ({"input_ids": ids(), "output_hidden_states": True}, "output_hidden_states"),
    ({"input_ids": ids(), "labels": ids(), "fused_lm_head": True}, "not that of TRL's add_fused_lm_head"),
]


@pytest.fixture(scope="module")
def sliced() -> Any:
    model = runs.model()
    pipelined(model, 4)
    return model


@pytest.mark.parametrize(("batch", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(batch: dict[str, Any], reason: str, sliced: Any) -> None:
    model = sliced
    with pytest.raises((ValueError, UnsupportedModelError), match=reason):
        model(**batch)
    model(input_ids=ids(), labels=ids()).loss.backward()  # goes on


def test_left_padding_of_learned_positions_is_refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_layer=2, n_embd=16, n_head=2, vocab_size=128, attn_pdrop=0.0)
    )
    pipelined(model, 4)
    with pytest.raises(UnsupportedModelError, match="padding_side"):
        model(**padded(left=True))
    model(**padded(left=False)).loss.backward()


def mixture() -> Any:
    from terapipe.hf.verify.small_model import small_model
    from tests.support.hf_models import small_config

    config = small_config("mixtral")
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    return small_model(config)


def test_losses_of_routers(ranks: Callable[[int], Ranks]) -> None:
    """A step and an evaluation have them; padding, which transformers leaves out, is refused."""
    model, batch = mixture(), {"input_ids": ids() % 60, "labels": ids() % 60}
    made = pipelined(model, 4)
    whole = mixture()
    wanted = whole(**batch).loss
    wanted.backward()
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert made.step(batch, lambda counted: counted).item() == pytest.approx(wanted.item(), rel=1e-6)
    largest = max(g.abs().max().item() for g in gradients(whole).values())
    for name, gradient in gradients(whole).items():
        assert (gradient - gradients(model)[name]).abs().max().item() / largest < 1e-6, name
    mask = torch.ones_like(ids())
    mask[0, -3:] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    with pytest.raises(ValueError, match="without padding"):
        made.step({**batch, "attention_mask": mask, "labels": labels}, lambda counted: counted)


def test_configurations() -> None:
    with pytest.raises(ValueError, match="slices are short for a config"):
        pipelined(torch.nn.Linear(2, 2), slices=4, config=PipelineConfig(slices=8))
    with pytest.raises(ValueError, match="give one of them"):
        PipelineConfig(slices=4, plan="auto")
    with pytest.raises(ValueError, match="at least 1"):
        PipelineConfig(slices=0)
    with pytest.raises(ValueError, match="need plan='auto'"):
        PipelineConfig(tile=8)
    with pytest.raises(ValueError, match="unknown order 'sideways'"):
        PipelineConfig(order="sideways")
    with pytest.raises(ValueError, match="they need plan='auto'"):
        PipelineConfig(seq_len=64)
    with pytest.raises(ValueError, match="says recompute already"):
        PipelineConfig(plan=Plan((1,), ((8,),), (0, 4)), recompute="full")
    with pytest.raises(ValueError, match="needs 6 processes, got 4"):
        PipelineConfig(dp=2, pp=3).layout(4)
    with pytest.raises(ValueError, match="how long sequences are"):
        pipelined(runs.model(), config=PipelineConfig(plan="auto"))


def test_planned(tmp_path: Any) -> None:
    model = runs.model(torch.float32)
    config = PipelineConfig(plan="auto", seq_len=64, profile_seconds=1.0, memory="1GiB")
    made = pipelined(model, config=config)
    assert made.pipe.plan.seq_len == 64
    model(input_ids=ids(), labels=ids()).loss.backward()


def backward_twice() -> tuple[float, dict[str, Tensor]]:
    with runs.as_under_torchrun():
        model = runs.model()
        pipelined(model, 5)
        loss = loss_of(model, batches()["whole"])
        loss.backward(retain_graph=True)
        with pytest.raises(ValueError, match=r"backward\(\) of these values ran already"):
            loss.backward()
        model.zero_grad()
        loss = loss_of(model, batches()["whole"])
        loss.backward()
        return loss.item(), gradients(model)


@pytest.mark.parametrize("size", [1, 2])
def test_a_second_backward_leaves_the_model_usable(size: int, ranks: Callable[[int], Ranks]) -> None:
    """As exact as ``test_gradients`` says: the same bits as without the second backward."""
    call = ranks(2) if size == 2 else lambda function, *arguments: [function(*arguments)]
    for (loss, wanted), (again, found) in zip(call(piped, "whole", 5), call(backward_twice), strict=True):
        assert loss == again
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def other_width() -> str:
    with runs.as_under_torchrun():
        model = runs.model(head_dim=8 if torch.distributed.get_rank() == 0 else 16)
        with pytest.raises(ValueError, match="all processes must make the same model") as refused:
            pipelined(model, 5)
        return str(refused.value)


def test_weights_of_another_shape_are_refused(ranks: Callable[[int], Ranks]) -> None:
    """The first process's weights are sent to the others, which could not take them."""
    for answer in ranks(2)(other_width):
        assert "(64, 32) torch.float64 on rank 1, (32, 32) torch.float64 on rank 0" in answer
