"""The base classes of models and stages: what they refuse, and what they do by default."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terapipe as tp
from terapipe.modeling.stage import IGNORE

PLAN = tp.Plan((1,), ((2, 2),), (0, 2))


class Tiny(tp.Stage, tp.PipelineModel):
    """As little as a model may say."""

    num_layers, hidden_size = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

    def stage(self, first: int, last: int, device: torch.device, tp: object = None) -> "Tiny":
        return self

    def forward(self, x: Tensor, cache: tp.SliceCache) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def test_two_methods_are_a_model() -> None:
    pipe, ids = tp.Pipeline(Tiny(), PLAN), torch.tensor([[1, 2, 3, 4]])
    assert torch.isfinite(pipe.step(ids, tp.next_token_labels(ids)))


def test_defaults() -> None:
    model = Tiny()
    assert model.blocks == list(model.layers)
    assert model.hidden_shape(2, 7) == (2, 7, 3)
    assert model.offers("logits")
    assert not model.offers("before_head")
    hidden, labels = torch.randn(1, 4, 3), torch.tensor([[1, 2, IGNORE, 0]])
    wanted = F.cross_entropy(model.head(hidden)[0, [0, 1, 3]], labels[0, [0, 1, 3]], reduction="sum")
    torch.testing.assert_close(model.loss(hidden, labels), wanted)


def test_an_object_that_does_not_inherit_is_refused_by_the_name_of_the_base_class() -> None:
    class Lookalike:
        num_layers, tied, stage = 2, (), Tiny.stage

    for use in (lambda: tp.Pipeline(Lookalike(), PLAN), lambda: tp.verify(Lookalike())):
        with pytest.raises(ValueError, match=r"must inherit from terapipe\.PipelineModel, got Lookalike"):
            use()

    class Plain(tp.PipelineModel):
        num_layers = 2

        def stage(self, first: int, last: int, device: torch.device, tp: object = None) -> nn.Module:
            return nn.Linear(1, 1)

    for use in (lambda: tp.Pipeline(Plain(), PLAN), lambda: tp.verify(Plain())):
        with pytest.raises(ValueError, match=r"must return a terapipe\.Stage, got Linear; inherit from it"):
            use()


@pytest.mark.parametrize("name", ["num_layers", "hidden_size"])
def test_what_a_model_must_say_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Tiny, name)
    with pytest.raises(ValueError, match=rf"set {name} in Tiny"):
        tp.Pipeline(Tiny(), PLAN)


def test_an_objective_that_needs_what_a_stage_lacks_is_refused_before_a_step() -> None:
    class Headless(Tiny):
        logits = tp.Stage.logits

        def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
            return hidden.sum()

    with pytest.raises(ValueError, match=r"needs a last stage with a method logits\(hidden\), Headless has none"):
        tp.Pipeline(Headless(), PLAN, loss_fn=tp.losses.cross_entropy())
    with pytest.raises(ValueError, match=r"method before_head\(hidden\), Tiny has none"):
        tp.Pipeline(Tiny(), PLAN, loss_fn=tp.losses.HiddenLoss(lambda hidden, head, targets: hidden.sum()))
