"""``torch.autocast`` around a step: the loss and gradients of the plain model under the same autocast.

The plain model is on the CPU, whatever the pipeline is on.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe import GPT, Layout, Pipeline, Plan, SliceCache
from terapipe.modeling.key_values import KeyValueStore
from terapipe.modeling.stage import IGNORE
from terapipe.modeling.weight_grads import accumulate_deferred
from terapipe.runtime.comm.channel import MessageFormat
from tests.support.models import TINY, make_batch, make_model, mesh_of, variant, whole
from tests.support.ranks import Ranks

KINDS = ("gpt", "llama", "gpt2")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of pipelines
ORDERS = ("terapipe", "terapipe-v", "terapipe-zb", *(("terapipe-1f1b", "terapipe-deferred") if DEVICE == "cpu" else ()))
SOME = ("gpt", "llama", pytest.param("gpt2", marks=pytest.mark.exhaustive))
Result = tuple[float, dict[str, Tensor]]


def plan_for(order: str, recompute: bool) -> Plan:
    folded = order == "terapipe-v"
    boundaries = (0, 1, 2, 3, 4) if folded else (0, 1, 4)
    return Plan((1, 2), ((9, 1, 12, 7), (20, 9)), boundaries, order, 2 if folded else 1, recompute)


def batch() -> tuple[Tensor, Tensor]:
    return make_batch(TINY, 3, 29, ignored=True)


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """The plain model, for one that knows nothing of slices too."""
    if kind == "gpt":
        return make_model(variant(tied=True), dtype)
    from terapipe.hf.verify.small_model import small_model
    from tests.support.hf_models import small_config

    return small_model(small_config(kind), dtype).train()


@cache
def split_model(kind: str, dtype: torch.dtype) -> Any:
    """Made once in a process: a Hugging Face model is first tried on a small copy."""
    if kind == "gpt":
        return model_of(kind, dtype)
    from terapipe.hf import Decoder

    return Decoder(model_of(kind, dtype), backend="attention")


def plain(kind: str, autocast: bool, dtype: torch.dtype = torch.float32) -> Result:
    model = model_of(kind, dtype)
    ids, labels = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if kind == "gpt":
            total = model.loss(model(ids), labels)
        else:
            logits = model(input_ids=ids, use_cache=False).logits
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        loss = total * (1.0 / (labels != IGNORE).sum().item())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def stepped(pipe: Pipeline) -> Result:
    pipe.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = pipe.step(*batch())
        assert pipe.evaluate(*batch()).item() == pytest.approx(loss.item(), rel=1e-6)
    return loss.item(), gradients_of(pipe)


def gradients_of(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: whole(p.grad).cpu().clone() for name, p in pipe.named_parameters() if p.grad is not None}


def account(kind: str, dtype: torch.dtype) -> dict[tuple[str, bool], Result]:
    found = {}
    for order in ORDERS:
        for recompute in (False, True):
            pipe = Pipeline(split_model(kind, dtype), plan_for(order, recompute), timeout=300.0)
            found[order, recompute] = stepped(pipe)
    return found


def merged(parts: list[Result], tied: dict[str, str]) -> Result:
    assert len({loss for loss, _ in parts}) == 1
    return parts[0][0], {tied.get(name, name): g for _, part in parts for name, g in part.items()}


TIED = {"gpt": {"head.weight": "embedding.weight"}, "gpt2": {"lm_head.weight": "transformer.wte.weight"}}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of all gradients together, relative to the size of the second."""
    assert a.keys() == b.keys()
    far = sum((a[name].double() - b[name].double()).square().sum().item() for name in b)
    return float((far / sum(b[name].double().square().sum().item() for name in b)) ** 0.5)


@pytest.fixture(scope="module", params=SOME)
def accounts(ranks: Callable[[int], Ranks], request: pytest.FixtureRequest) -> tuple[str, dict[Any, Result]]:
    kind: str = request.param
    first, second = ranks(2)(account, kind, torch.float32)
    return kind, {key: merged([first[key], second[key]], TIED.get(kind, {})) for key in first}


@pytest.mark.gpu_seldom("llama")
def test_gradients_are_as_good_as_the_plain_models(accounts: tuple[str, dict[Any, Result]]) -> None:
    """Slices are summed in another order, so they cannot be the same to the bit. But they may not be further from the
    gradients in float32 than twice what rounding does to the plain model, and must be close to that."""
    kind, found = accounts
    truth, rounded = plain(kind, autocast=False), plain(kind, autocast=True)
    error = distance(rounded[1], truth[1])
    assert error > 1e-3, "autocast must do something"
    for key, (loss, gradients) in found.items():
        assert abs(loss - truth[0]) <= 2 * abs(rounded[0] - truth[0]) + 1e-3 * abs(truth[0]), key
        assert distance(gradients, truth[1]) <= 2 * error, key
        assert distance(gradients, rounded[1]) <= 2 * error, key
        assert all(gradient.dtype == torch.float32 for gradient in gradients.values())


@pytest.mark.gpu_seldom("llama")
def test_recomputation_changes_nothing(accounts: tuple[str, dict[Any, Result]]) -> None:
    _, found = accounts
    for order in ORDERS:
        assert distance(found[order, True][1], found[order, False][1]) < 1e-6


@pytest.mark.skipif(DEVICE == "cuda", reason="attention on a GPU rounds otherwise than on the plain model's CPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
def test_in_one_slice_it_is_the_plain_model(kind: str, recompute: bool) -> None:
    """The same operators on the same numbers: what is left is the rounding of float32."""
    plan = Plan((3,), ((29,),), (0, 4), recompute=recompute)
    loss, gradients = stepped(Pipeline(split_model(kind, torch.float32), plan))
    wanted = plain(kind, autocast=True)
    assert loss == pytest.approx(wanted[0], rel=1e-6)
    assert distance(gradients, wanted[1]) < 1e-5


@pytest.mark.gpu_seldom
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_layers_that_compute_again_in_their_backward(kind: str) -> None:
    """In the backward autocast is off; torch.utils.checkpoint turns it on again for what it computes."""
    found = []
    for mode in ("none", "light", "block"):
        plan = Plan((3,), ((9, 20),), (0, 4), "terapipe-deferred", 1, mode)
        if kind == "gpt":
            model: Any = GPT(TINY, seed=3)
        else:
            from terapipe.hf import Decoder

            model = Decoder(model_of(kind), backend="attention")
        found.append(stepped(Pipeline(model, plan)))
    assert found[0][0] == found[1][0]
    assert distance(found[1][1], found[0][1]) < 1e-6


@pytest.mark.gpu_seldom
@pytest.mark.exhaustive_ids("^llama")
@pytest.mark.parametrize("kind", SOME)
def test_float64_is_left_alone(ranks: Callable[[int], Ranks], kind: str) -> None:
    """Autocast casts no float64, so all must be exact."""
    first, second = ranks(2)(account, kind, torch.float64)
    wanted = plain(kind, autocast=True, dtype=torch.float64)
    for key in first:
        loss, gradients = merged([first[key], second[key]], TIED.get(kind, {}))
        assert loss == pytest.approx(wanted[0], rel=1e-12)
        assert distance(gradients, wanted[1]) < 1e-12, key


def laid_out(layout: Layout, shard: bool) -> Result:
    plan = Plan((3,), ((10, 2, 12, 4),), (0, 4), "terapipe-deferred")
    pipe = Pipeline(
        make_model(variant(tied=True), torch.float32), plan, mesh=mesh_of(layout), shard=shard, timeout=300.0
    )
    ids, labels = make_batch(TINY, 3, 28, ignored=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = pipe.step(ids, labels)
    return loss.item(), gradients_of(pipe)


@pytest.mark.gpu_seldom("layout0")
@pytest.mark.parametrize(
    ("layout", "shard"), [(Layout(2, 1, 1), False), (Layout(2, 1, 1), True), (Layout(1, 1, 2), False)]
)
def test_replicas_and_tensor_parallel(ranks: Callable[[int], Ranks], layout: Layout, shard: bool) -> None:
    ids, labels = make_batch(TINY, 3, 28, ignored=True)

    def reference(autocast: bool) -> Result:
        model = make_model(variant(tied=True), torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model.loss(model(ids), labels) / (labels != IGNORE).sum()
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    truth, rounded = reference(autocast=False), reference(autocast=True)
    for loss, gradients in ranks(2)(laid_out, layout, shard):
        assert loss == pytest.approx(rounded[0], rel=1e-2)
        assert distance(gradients, truth[1]) <= 2 * distance(rounded[1], truth[1])


# What goes over the wire


class Narrow(GPT):
    """Whose layers end in half precision under autocast."""

    def forward(self, x: Tensor, cache: SliceCache | None = None) -> Tensor:
        x = super().forward(x, cache)
        return x.to(torch.bfloat16) if torch.is_autocast_enabled(DEVICE) else x


def narrow(order: str, evaluated: bool) -> tuple[list[torch.dtype], list[bool]]:
    """``evaluated``: whether forwards alone come first."""
    model = make_model(variant(tied=True), torch.float32)
    model.__class__ = Narrow
    stage = GPT.stage

    def narrowed(self: GPT, *args: Any) -> nn.Module:
        made = stage(self, *args)
        made.__class__ = Narrow
        return made

    GPT.stage = narrowed  # type: ignore[method-assign, assignment]
    sent: list[torch.dtype] = []
    pack = MessageFormat.pack

    def noted(self: MessageFormat, tensor: Tensor, boundary: int, extra: Tensor | None = None) -> Tensor:
        if type(self) is MessageFormat:  # not that of a warm-up
            sent.append(tensor.dtype)
            sent.append(pack(self, tensor, boundary, extra).dtype)
        return pack(self, tensor, boundary, extra)

    MessageFormat.pack = noted  # type: ignore[method-assign]
    try:
        pipe = Pipeline(model, plan_for(order, recompute=False), timeout=300.0)
        with torch.autocast(DEVICE, torch.bfloat16):
            _ = pipe.evaluate(*batch()) if evaluated else None
        results = [stepped(pipe), stepped(pipe)]
        pipe.zero_grad()
        loss = pipe.step(*batch()).item()
    finally:
        GPT.stage, MessageFormat.pack = stage, pack  # type: ignore[method-assign]
    same = [torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1]]
    return sent, [*same, results[0][0] == results[1][0], loss != results[0][0]]


@pytest.mark.gpu_seldom("True|terapipe-v")
@pytest.mark.parametrize("order", ["terapipe-1f1b", "terapipe-v"])
@pytest.mark.parametrize("evaluated", [False, True])
def test_hidden_states_are_sent_in_the_dtype_that_they_have(
    ranks: Callable[[int], Ranks], order: str, evaluated: bool
) -> None:
    """In the first run they tell it themselves; it makes no difference to the results."""
    for sent, same in ranks(2)(narrow, order, evaluated):
        assert all(same)
        tensors, messages = sent[::2], sent[1::2]
        assert set(tensors) == {torch.bfloat16, torch.float32}, "with autocast and without"
        told = messages.count(torch.uint8)
        assert told <= len(messages) / 3
        assert told or evaluated, "a rank that sends gradients only has nothing to tell after forwards alone"
        assert set(messages[:told]) <= {torch.uint8}
        assert messages[told:] == tensors[told:]


# A warm-up, whose messages are made up


def warmed_up(order: str) -> tuple[Result, Result, bool]:
    """A step after a warm-up under autocast, one without, and whether the wire knows more after the warm-up."""
    pipes = [Pipeline(split_model("gpt", torch.float32), plan_for(order, recompute=False)) for _ in range(2)]
    wire = pipes[0]._executors.message_format
    with torch.autocast(DEVICE, torch.bfloat16):
        pipes[0].warm_up()
    learned = any(wire._learned.values())
    pipes[1]._is_warm = True
    return stepped(pipes[0]), stepped(pipes[1]), learned


@pytest.mark.gpu_seldom("zb")
@pytest.mark.parametrize("order", ["terapipe-1f1b", "terapipe-zb"])
def test_nothing_is_learned_from_a_warm_up(ranks: Callable[[int], Ranks], order: str) -> None:
    """It died of its own messages, which have no dtype. Had it not, both ends of a boundary would have learned other
    dtypes from it, and posted messages of different sizes in the first step."""
    for first, second, learned in ranks(2)(warmed_up, order):
        assert not learned
        assert first[0] == second[0]
        assert distance(first[1], second[1]) == 0


def of_tokens(kind: str) -> Result:
    """A loss of the log-probabilities of tokens, the first thing that the pipeline does."""
    pipe = Pipeline(split_model(kind, torch.float32), plan_for("terapipe", recompute=False), timeout=300.0)
    pipe.zero_grad()  # the model was used before
    ids, labels = batch()
    with torch.autocast(DEVICE, torch.bfloat16):
        log_probs = pipe.token_outputs(ids, labels)
        loss = -log_probs.sum() / (labels != IGNORE).sum().item()
    loss.backward()
    return loss.item(), gradients_of(pipe)


@pytest.mark.gpu_seldom("llama")
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_values_of_tokens(ranks: Callable[[int], Ranks], kind: str) -> None:
    loss, gradients = merged(ranks(2)(of_tokens, kind), TIED.get(kind, {}))
    truth, rounded = plain(kind, autocast=False), plain(kind, autocast=True)
    assert loss == pytest.approx(rounded[0], rel=1e-2)
    assert distance(gradients, truth[1]) <= 2 * distance(rounded[1], truth[1])


def different() -> str:
    pipe = Pipeline(make_model(TINY, torch.float32), plan_for("terapipe", recompute=False), timeout=300.0)
    same = "must call the same method"
    with torch.autocast(DEVICE, torch.bfloat16, enabled=pipe.is_first), pytest.raises(ValueError, match=same) as caught:
        pipe.step(*batch())
    assert all(p.grad is None for p in pipe.parameters())
    pipe.step(*batch())
    return str(caught.value)


def test_all_ranks_must_have_the_same_autocast(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2)(different)
    assert first == second
    assert "under autocast to torch.bfloat16, rank 1 has" in first


# What torch keeps


def test_nothing_stale_is_kept_between_steps() -> None:
    """torch keeps the casts of weights until the outermost autocast ends, with or without gradients."""
    pipe = Pipeline(make_model(TINY, torch.float32), Plan((3,), ((9, 20),), (0, 4)))
    wanted = stepped(pipe)
    pipe.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16):
        with torch.no_grad():
            pipe.evaluate(*batch())
            pipe.next_token_logits(batch()[0])
        pipe.step(*batch())
        found = gradients_of(pipe)
        with torch.no_grad():
            for p in pipe.parameters():
                p.mul_(0.5)
        halved = pipe.step(*batch()).item()
    assert distance(found, wanted[1]) == 0
    with torch.autocast(DEVICE, torch.bfloat16):
        assert pipe.evaluate(*batch()).item() == pytest.approx(halved, rel=1e-6)
    assert halved != pytest.approx(wanted[0], rel=1e-3)


def test_backwards_and_sums_are_not_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipeline(make_model(TINY, torch.float32), Plan((3,), ((9, 20),), (0, 4), "terapipe-deferred"))
    seen: dict[str, set[bool]] = {"forward": set(), "backward": set(), "weights": set()}

    def extra(where: str) -> None:
        seen[where].add(torch.is_autocast_enabled(DEVICE))

    layer = pipe.get_submodule("layers.1.norm1")
    layer.register_forward_pre_hook(lambda *_: extra("forward"))
    layer.register_full_backward_pre_hook(lambda *_: extra("backward"))

    def noted(deferred: Iterator[Any]) -> None:
        extra("weights")
        accumulate_deferred(deferred)

    monkeypatch.setattr("terapipe.runtime.executor.accumulate_deferred", noted)
    with torch.autocast(DEVICE, torch.bfloat16):
        pipe.step(*batch())
        assert torch.is_autocast_enabled(DEVICE)
    assert seen == {"forward": {True}, "backward": {False}, "weights": {False}}


@pytest.mark.gpu_seldom
@pytest.mark.parametrize("kind", KINDS)
def test_this_file_can_fail(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Without the gradients that later slices have for keys and values of earlier ones."""
    pipe = Pipeline(split_model(kind, torch.float32), Plan((3,), ((9, 20),), (0, 4)))
    stepped(pipe)  # kernels test themselves when they are first used
    nothing = torch.zeros((), device=pipe.device)
    monkeypatch.setattr(KeyValueStore, "grad", lambda self, start, end: (nothing, nothing))
    _, gradients = stepped(pipe)
    truth, rounded = plain(kind, autocast=False), plain(kind, autocast=True)
    assert distance(gradients, truth[1]) > 2 * distance(rounded[1], truth[1])
