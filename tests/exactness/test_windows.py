"""Layers with windows and chunks keep less: every gradient equals the plain model's, in every order and mode."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe import ORDERS, Layout, Pipeline, Plan
from terapipe.hf import Decoder
from terapipe.hf.verify.small_model import small_model
from terapipe.modeling.key_values import KeyValueStore
from terapipe.planning.order import order_named
from terapipe.planning.recompute import MODES
from tests.exactness.test_layouts import BOUNDARIES, combinations
from tests.support.hf_models import (
    batch,
    gradients_of_documents,
    plain_gradients,
    small_config,
    worst_difference,
)
from tests.support.models import gradients, laid_out, make_batch, make_model, plain, variant, worst_error
from tests.support.ranks import Ranks

BOUND = 1e-12
LENGTHS = ((9, 1, 4, 3, 2, 3, 4, 3), (8, 8, 8, 5))
# Shorter than slices, as long as one, longer than several, and all tokens.
WINDOWS = (3, 8, 0, 13, 1, 4, 20, 2)
LAYOUTS = [Layout(1, 2, 1), Layout(1, 1, 1), Layout(1, 2, 2)]


def plan_for(layout: Layout, order: str, recompute: str, offload: bool) -> Plan:
    chunks = 2 if order_named(order).chunks == 2 or order == "interleaved" else 1
    boundaries = BOUNDARIES[layout.pp * chunks]
    lengths = ((6, 2, 4, 4, 2, 4, 4, 2), (8, 8, 8, 4)) if layout.tp > 1 else LENGTHS
    return Plan((1, 2), lengths, boundaries, order, chunks, recompute, offload, offload)


SLICED = sorted(name for name in ORDERS if order_named(name).sliced)


@pytest.mark.gpu_seldom("full|tp 2")
@pytest.mark.parametrize(("layout", "order", "recompute"), combinations(LAYOUTS, SLICED, MODES), ids=str)
def test_every_layout_order_and_mode(ranks: Callable[[int], Ranks], layout: Layout, order: str, recompute: str) -> None:
    plan = plan_for(layout, order, recompute, offload=order == "terapipe")
    config = variant(layers=plan.num_layers, kv_heads=2, windows=WINDOWS[: plan.num_layers])
    ids, labels = make_batch(config, plan.batch_size * layout.dp, plan.seq_len, ignored=True)
    results = ranks(layout.devices)(laid_out, config, layout, plan, ids, labels, torch.float64, False)
    assert worst_error(plain(config, ids, labels, torch.float64), results, config) < BOUND


def here(lengths: tuple[tuple[int, ...], ...] = LENGTHS, recompute: str = "none") -> Plan:
    """Two stages of four layers in this process."""
    return Plan((1, 1), lengths, (0, 1, 4), "terapipe", 2, recompute)


def test_half_precision_is_summed_in_float32() -> None:
    """As close to the plain model as with windows so long that all are seen."""
    errors = []
    for windows in ((5, 0, 9, 3), (0, 0, 0, 0)):
        config = variant(windows=windows)
        ids, labels = make_batch(config, 2, 29, ignored=False)
        wanted = plain(config, ids, labels, torch.float64)
        pipe = Pipeline(make_model(config, torch.bfloat16), here())
        loss = pipe.step(ids, labels)
        errors.append(worst_error(wanted, [(loss.item(), {k: g.double() for k, g in gradients(pipe).items()})], config))
    assert errors[0] < max(0.05, 2 * errors[1])


def test_gradients_that_do_not_move_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what later slices left in the room before, gradients are wrong and the loss is not."""
    config = variant(windows=(5, 0, 13, 3))
    ids, labels = make_batch(config, 2, 29, ignored=False)
    loss, wanted = plain(config, ids, labels, torch.float64)
    pipe = Pipeline(make_model(config), here())
    pipe.step(ids, labels)  # kernels test themselves, and would notice
    pipe.zero_grad()
    monkeypatch.setattr(KeyValueStore, "take_over", lambda self, before, keys: None)
    assert pipe.step(ids, labels).item() == pytest.approx(loss, rel=1e-12)
    assert worst_error((loss, wanted), [(loss, gradients(pipe))], config) > 1e-4


def test_forwards_alone_give_the_same_and_keep_less() -> None:
    config = variant(windows=(5, 0, 3, 3))
    ids, labels = make_batch(config, 2, 29, ignored=False)
    model = make_model(config)
    with torch.no_grad():
        whole = model(ids)
        wanted = model.logits(whole).log_softmax(-1).gather(2, labels[:, :, None])[:, :, 0]
    pipe = Pipeline(make_model(config), here())
    assert (pipe.log_probs(ids, labels) - wanted).abs().max() < BOUND
    most = _largest_pairs(lambda: pipe.log_probs(ids, labels))
    assert pipe.evaluate(ids, labels).item() == pytest.approx(-wanted.mean().item(), rel=1e-12)
    last = model.logits(whole[:, -1])
    assert (pipe.next_token_logits(ids) - last).abs().max() < BOUND
    assert most == {4 + 8, 29, 2 + 8}
    pipe.step(ids, labels)  # takes room for all tokens, which evaluation then uses
    assert (
        worst_error(plain(config, ids, labels, torch.float64), [(-wanted.mean().item(), gradients(pipe))], config)
        < 1e-11
    )
    assert (pipe.log_probs(ids, labels) - wanted).abs().max() < BOUND


def _largest_pairs(work: Callable[[], object]) -> set[int]:
    """The tokens of the largest keys and values of each store."""
    most: dict[KeyValueStore, int] = {}
    write = KeyValueStore.write

    def note(self: KeyValueStore, *args: Any) -> None:
        write(self, *args)
        assert self._pair is not None
        most[self] = max(most.get(self, 0), self._pair.shape[2])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyValueStore, "write", note)
        work()
    return set(most.values())


@pytest.mark.usefixtures("quiet_models")
@pytest.mark.exhaustive_ids("mistral-full|gpt_oss-block|gemma3_text-none|llama4_text-none|qwen2")
@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "mistral", "llama4_text"])
def test_models_of_hugging_face(name: str, recompute: str) -> None:
    """Their small copies have windows and chunks of 8: slices are shorter, as long, and longer."""
    config = small_config(name)
    config.attn_temperature_tuning = False  # of Llama 4: by places in the row, so refused with documents
    model, (ids, labels) = small_model(config), batch()
    decoder = Decoder(copy.deepcopy(model))
    lengths = ((9, 1, 12, 7), (8, 8, 8, 5))
    plan = Plan((1, 1), lengths, (0, 1, decoder.num_layers), "terapipe", 2, recompute)
    pipe = Pipeline(decoder, plan)
    assert any(decoder.planning_spec().config.windows)
    pipe.step(ids, labels)
    bound = 1e-6 if name in ("gemma3_text", "llama4_text") else 1e-12  # they have float32 in them
    assert worst_difference(gradients(pipe), plain_gradients(copy.deepcopy(model), ids, labels)) < bound
    documents = ((0, 3, 4, 20), (0, 10))
    pipe.zero_grad()
    pipe.step(ids, labels, documents)
    assert worst_difference(gradients(pipe), gradients_of_documents(model, ids, labels, documents)) < bound
    with torch.no_grad():
        wanted: Tensor = model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
    found = pipe.log_probs(ids, labels)
    assert (found - wanted.gather(2, labels[:, :, None])[:, :, 0]).abs().max() < 1e-5
