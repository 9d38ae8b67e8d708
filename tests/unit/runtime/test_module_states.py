"""What modules were told at a forward comes back for its backward, and goes again. (Trainers: test_states.py there.)"""

import torch
from torch import nn

from terapipe.runtime.module_states import ModuleStates, Snapshot, is_plain


class Adapter(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.active = ["default"]
        self.scale = torch.tensor(1.0)


def test_what_was_switched_comes_back_for_a_while() -> None:
    module = nn.Sequential(Adapter(), nn.Dropout(0.1))
    states = ModuleStates([module])
    assert states.is_current()
    module[0].active.append("other")  # in place: the container itself is the same
    module[0].new = 1
    module.eval()
    assert not states.is_current()
    with states.restored():
        assert module[0].active == ["default"]
        assert not hasattr(module[0], "new")
        assert module[1].training
        assert states.is_current()
    assert module[0].active == ["default", "other"]
    assert module[0].new == 1
    assert not module[1].training


def test_what_is_frozen_since_gets_no_gradient() -> None:
    module = Adapter()
    states = ModuleStates([module])
    module.weight.requires_grad_(False)
    module.weight.grad = earlier = torch.ones(2, 2)
    with states.restored():
        module(torch.ones(1, 2)).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad is not earlier
    assert not module.weight.requires_grad
    assert module.weight.grad is earlier


def test_another_tensor_with_the_same_number_is_another() -> None:
    """Python's == of two dictionaries takes them for equal."""
    module = Adapter()
    snapshot = Snapshot(module)
    module.scale = torch.tensor(1.0)
    assert not snapshot.is_current()
    assert snapshot.differences() == ["scale"]
    snapshot.update("scale")
    assert snapshot.is_current()


def test_weights_stay_when_attributes_are_switched() -> None:
    module = Adapter()
    snapshot = Snapshot(module)
    module.weight = replaced = nn.Parameter(torch.zeros(2, 2))
    module.active = []
    assert snapshot.switch() == {"active": []}
    assert module.weight is replaced
    assert module.active == ["default"]


def test_plain_values_are_switches() -> None:
    assert is_plain({"a": [1, "x", None], "b": (True, 2.0)})
    assert not is_plain([torch.zeros(1)])
