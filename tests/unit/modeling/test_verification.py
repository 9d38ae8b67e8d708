"""Plausible mistakes in a model of one's own: each is named with its layer; what is right is left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terapipe as tp
from examples import own_model
from examples.own_model import HEADS, HIDDEN, LAYERS, Attention, Decoder
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.verification import StageCheck

CPU = torch.device("cpu")


def project(layer: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = layer.qkv(x).unflatten(-1, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
    return q, k, v


class PlainAttention(Attention):
    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        mixed = F.scaled_dot_product_attention(*project(self, x), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class ChangedInPlace(Attention):
    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        mixed = tp.attend(*project(self, x), cache, self.number)
        mixed *= 2
        return self.out(mixed.transpose(1, 2).flatten(2))


class SharedName(Attention):
    def __init__(self, number: int) -> None:
        super().__init__(0)


class Mixer(nn.Module):
    """A linear layer and something that mixes tokens."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(HIDDEN, HIDDEN)


class Convolution(Mixer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        return self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class Branch(Mixer):
    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        y = self.linear(x)
        return y if y.mean() > 0 else 2 * y


class RunningSum(Mixer):
    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        return self.linear(x.cumsum(1))


class LocalPositions(Mixer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.positions = nn.Embedding(64, HIDDEN)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        return self.linear(x + self.positions(torch.arange(x.shape[1])))


class Lstm(Mixer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        return self.lstm(x)[0]


class BatchNorm(Mixer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        return self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2))


class BatchNormBesideDropout(BatchNorm):
    """Dropout that is no module: gradients cannot be compared in training mode."""

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        return F.dropout(super().forward(x, cache), 0.1, self.training)


class SpectralNorm(Mixer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        nn.utils.parametrizations.spectral_norm(self.linear)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        return self.linear(x)


class OwnGenerator(Mixer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        y = self.linear(x)
        return y * (torch.rand(y.shape, generator=self.generator) > 0.1) if self.training else y


class CarriedMean(Mixer):
    """Hands a state on, but ``leave`` does it wrongly."""

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        before = self.take(cache)
        total = x.cumsum(1) if before is None else x.cumsum(1) + before[:, None]
        self.leave(cache, total[:, -1])
        return self.linear(total / 10)

    def take(self, cache: SliceCache) -> Tensor | None:
        return cache.get_state(self.number)

    def leave(self, cache: SliceCache, state: Tensor) -> None:
        cache.set_state(self.number, state)


class DetachedState(CarriedMean):
    def leave(self, cache: SliceCache, state: Tensor) -> None:
        cache.set_state(self.number, state.detach())


class StateOfItsOwn(CarriedMean):
    def take(self, cache: SliceCache) -> Tensor | None:
        return self.__dict__["state"] if cache.context else None

    def leave(self, cache: SliceCache, state: Tensor) -> None:
        self.__dict__["state"] = state


class Dropped(Attention):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        return self.dropout(F.dropout(super().forward(x, cache), 0.1, self.training))


class Changed(Decoder):
    """The example's model with other layers in some places; stages share its modules."""

    def __init__(self, layer: Callable[[int], nn.Module] | None = None, places: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        for i in places if layer is not None else ():
            self.layers[str(i)] = layer(i)  # type: ignore[misc]

    def stage(self, first: int, last: int, device: torch.device, tp: Any = None) -> "Changed":
        part = Changed.__new__(type(self))
        nn.Module.__init__(part)
        part.layers = nn.ModuleDict({str(i): self.layers[str(i)] for i in range(first, last)})
        part.embedding = self.embedding if first == 0 else None
        part.head = self.head if last == LAYERS else None
        return part.to(device)


class MeanLoss(Changed):
    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class LossThatFails(Changed):
    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        raise RuntimeError("no loss today")


class DrawnAnew(Changed):
    def stage(self, first: int, last: int, device: torch.device, tp: Any = None) -> Decoder:
        torch.seed()
        part = super().stage(first, last, device)
        part.layers = nn.ModuleDict({name: Attention(int(name)) for name in part.layers})
        return part


class WrongLayers(Changed):
    def stage(self, first: int, last: int, device: torch.device, tp: Any = None) -> Decoder:
        part = super().stage(first, last, device)
        if first > 0:
            part.layers = nn.ModuleDict(reversed(list(part.layers.items())))
        return part


class Detached(Changed):
    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        return super().forward(x, cache).detach()


SLICES = [
    (PlainAttention, "layers.1 (PlainAttention)", "call tp.attend"),
    (ChangedInPlace, "layers.1", "changed in place"),
    (Convolution, "layers.1.conv (Conv1d)", "a convolution over tokens"),
    (Branch, "layers.1 (Branch)", "branches on the values"),
    (RunningSum, "layers.1 (RunningSum)", "tokens are mixed"),
    (LocalPositions, "layers.1 (LocalPositions)", "cache.positions"),
    (Lstm, "layers.1.lstm (LSTM)", "a recurrence begins anew"),
    (BatchNorm, "layers.1.norm", "changes the buffer 'running_mean'"),
    (BatchNormBesideDropout, "layers.1.norm", "changes the buffer 'running_mean'"),
    (SpectralNorm, "layers.1.linear.parametrizations.weight.0", "changes the buffer '_u'"),
    (DetachedState, "", "without its gradient"),
    (StateOfItsOwn, "Changed", "keeps a tensor of an earlier slice"),
]


@pytest.mark.parametrize(("layer", "where", "reason"), SLICES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_in_a_layer_is_named(layer: Any, where: str, reason: str) -> None:
    result = tp.verify(Changed(layer))
    assert not result.exact
    assert result.recompute_modes == ()
    assert where in result.problems[0].where
    assert reason in result.problems[0].reason
    assert reason in str(result)


def test_two_layers_with_one_cache_name_are_named() -> None:
    (problem,) = tp.verify(Changed(SharedName, (0, 2))).problems
    assert "layers.0 and layers.2 use the cache under the same name 0" in problem.reason


@pytest.mark.parametrize(
    ("model", "where", "reason"),
    [
        (MeanLoss, "MeanLoss.loss", "reduction='sum'"),
        (LossThatFails, "LossThatFails", "no loss today"),
        (DrawnAnew, "layers.0", "drawn anew"),
        (WrongLayers, "", "stages one after the other"),
        (Detached, "layers.0.qkv.weight", "output has no gradient"),
    ],
)
def test_a_mistake_of_the_model_is_named(model: Any, where: str, reason: str) -> None:
    result = tp.verify(model())
    assert not result.exact
    assert where in result.problems[-1].where
    assert reason.replace("drawn anew", "draw them anew") in result.problems[-1].reason


def test_a_generator_of_its_own_forbids_recomputation_only() -> None:
    model = Changed(OwnGenerator)
    before = model.layers["1"].generator.get_state()
    result = tp.verify(model)
    assert result.exact
    assert result.recompute_modes == ("none",)
    assert "torch.Generator of its own" in result.problems[0].reason
    assert model.layers["1"].generator.get_state().equal(before)
    plan = tp.Plan((1,), ((20, 9),), (0, LAYERS))
    tp.Pipeline(model, plan)
    with pytest.raises(ValueError, match=r"recompute='full'.*Generator of its own"):
        tp.Pipeline(model, tp.Plan((1,), ((20, 9),), (0, LAYERS), "terapipe", 1, "full"))


@pytest.mark.parametrize("model", [own_model.Decoder, Changed, lambda: Changed(Dropped), lambda: Changed(CarriedMean)])
def test_what_is_exact_is_accepted(model: Callable[[], Any]) -> None:
    result = tp.verify(model())
    assert result.exact, str(result)
    assert result.recompute_modes == ("none", "light", "block", "full")
    assert max(result.errors.values()) < 1e-12
    assert set(result.errors) == {"slices", "light", "block", "full", "stages"}


def test_gpt_is_checked_once_it_is_changed() -> None:
    model = tp.GPT(tp.PRESETS["gpt-tiny"])
    assert model.is_verified
    nn.utils.parametrizations.spectral_norm(model.layers["0"].up)
    assert not model.is_verified
    with pytest.raises(ValueError, match=r"layers\.0\.up.*changes the buffer"):
        tp.Pipeline(model, tp.Plan((1,), ((9, 7),), (0, len(model.layers))))


def test_nothing_is_changed_by_the_check() -> None:
    model = Changed(BatchNorm)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.layers["0"].eval()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for own_loss in (True, False):
        StageCheck(model.stage(0, LAYERS, CPU), first=True, last=True, own_loss=own_loss).run()
    assert torch.rand(3).equal(expected)
    assert all(p.grad is not None and p.grad.eq(1).all() for p in model.parameters())
    assert all(x.equal(state[name]) for name, x in model.state_dict().items())
    assert [layer.training for layer in model.layers.values()] == [False, True, True, True]


def test_a_large_stage_is_checked_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terapipe.modeling.verification.COPIED", 0)
    model = Changed(Convolution)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    assert "convolution" in tp.verify(model).problems[0].reason
    assert tp.verify(Changed()).exact
    assert all(p.grad is not None and p.grad.eq(1).all() for p in model.parameters())
    assert all(x.equal(state[name]) for name, x in model.state_dict().items())


def test_a_pipeline_refuses_before_its_first_step() -> None:
    plan = tp.Plan((1,), ((20, 9),), (0, LAYERS))
    with pytest.raises(ValueError, match=r"layers\.1\.conv.*get_state.*verify=False"):
        tp.Pipeline(Changed(Convolution), plan)
    tp.Pipeline(Changed(Convolution), plan, verify=False)
    whole = tp.Pipeline(Changed(Convolution), tp.Plan((1,), ((29,),), (0, LAYERS)))  # cuts nothing
    ids = torch.zeros(1, 29, dtype=torch.int64)
    whole.step(ids, torch.ones_like(ids))
    with pytest.raises(ValueError, match="slices of this model were not checked"):
        whole.step(ids, torch.ones_like(ids), plan=plan)


class MultiplesOf8(Mixer):
    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        if x.shape[1] % 8:
            raise RuntimeError(f"{x.shape[1]} tokens are no multiple of 8")
        return self.linear(x)


def test_layers_that_need_long_slices_are_checked_with_those_of_the_plan() -> None:
    tp.Pipeline(Changed(MultiplesOf8), tp.Plan((1,), ((16, 8),), (0, LAYERS)))
    with pytest.raises(ValueError, match="no multiple of 8"):
        tp.Pipeline(Changed(MultiplesOf8), tp.Plan((1,), ((20, 9),), (0, LAYERS)))
    assert tp.verify(Changed(MultiplesOf8), slice_lengths=(16, 8)).exact


def test_attention_changed_in_place_is_noticed_in_recomputation_without_the_check() -> None:
    plan = tp.Plan((1,), ((20, 9),), (0, LAYERS), "terapipe", 1, "block")
    pipe = tp.Pipeline(Changed(ChangedInPlace), plan, verify=False)
    ids = torch.zeros(1, 29, dtype=torch.int64)
    with pytest.raises(Exception, match="changed in place"):
        pipe.step(ids, torch.ones_like(ids))


def test_a_loss_function_that_is_a_mean_is_refused() -> None:
    def mean(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model = tp.GPT(tp.PRESETS["gpt-tiny"])
    pipe = tp.Pipeline(model, tp.Plan((1,), ((9, 7),), (0, model.num_layers)), loss_fn=mean)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    labels = tp.next_token_labels(ids + 1)
    labels[:, :5] = -100  # a prompt
    with pytest.raises(ValueError, match="must be the sum over its tokens"):
        pipe.step(ids, labels)
