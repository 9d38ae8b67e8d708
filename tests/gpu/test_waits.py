"""The counter of waits sees what would make the host wait, and nothing else."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.pretend.waits import Wait, counting_waits

X = torch.arange(6.0, device="cuda").view(2, 3)
HOST, PINNED = torch.ones(2, 3), torch.ones(2, 3).pin_memory()
MASK = X > 2
PLACES = torch.arange(2, device="cuda")


def kinds(function: Callable[[], object]) -> list[str]:
    with counting_waits() as found:
        function()
    return [wait.kind for wait in found]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda: X[0, 0].item(), "_local_scalar_dense"),
        (lambda: bool(X.any()), "_local_scalar_dense"),
        (lambda: int(X.sum()), "_local_scalar_dense"),
        (lambda: X.nonzero(), "nonzero"),
        (lambda: torch.equal(X, X), "equal"),
        (lambda: X.masked_select(MASK), "masked_select"),
        (lambda: X[MASK], "nonzero"),
        (lambda: X.clone().index_put_((MASK,), torch.ones(3, device="cuda")), "index by a mask"),
        (lambda: X[[1, 0]], "copy from pageable memory"),
        (lambda: X.clone().index_put_((HOST[0].long(),), X[:1]), "index on the host"),
        (lambda: X.unique(), "_unique2"),
        (lambda: PLACES.repeat_interleave(PLACES), "repeat_interleave"),
        (lambda: X.cpu(), "copy to the host"),
        (lambda: X.tolist(), "copy to the host"),
        (lambda: HOST.clone().copy_(X, non_blocking=True), "copy to the host"),
        (lambda: PINNED.copy_(X), "copy to the host"),
        (lambda: HOST.to("cuda"), "copy from pageable memory"),
        (lambda: HOST.to("cuda", non_blocking=True), "copy from pageable memory"),
        (lambda: torch.tensor([1, 2], device="cuda"), "copy from pageable memory"),
        (lambda: PINNED.to("cuda"), "copy from the host"),
        (lambda: torch.empty_like(X).copy_(HOST), "copy from pageable memory"),
        (lambda: torch.cuda.synchronize(), "torch.cuda.synchronize"),
        (lambda: torch.accelerator.synchronize(), "torch.accelerator.synchronize"),
        (lambda: torch.cuda.current_stream().synchronize(), "Stream.synchronize"),
        (lambda: torch.cuda.current_stream().record_event().synchronize(), "Event.synchronize"),
    ],
)
def test_what_waits(function: Callable[[], object], kind: str) -> None:
    assert kinds(function) == [kind]


@pytest.mark.parametrize(
    "function",
    [
        lambda: X @ X.T + X.sum(),
        lambda: PINNED.to("cuda", non_blocking=True),
        lambda: PINNED.copy_(X, non_blocking=True),
        lambda: X.to("cpu", non_blocking=True),
        lambda: X.to(torch.bfloat16),
        lambda: X.to("cuda:1"),
        lambda: X.clone().masked_fill_(MASK, 0.0),
        lambda: X.clone().__setitem__(MASK, 0.0),
        lambda: X[torch.arange(2, device="cuda")],
        lambda: X[0, 1:],
        lambda: torch.arange(9, device="cuda"),
        lambda: torch.full((2,), 3.0, device="cuda"),
        lambda: HOST.sum().item(),
        lambda: HOST[HOST > 0],
        lambda: torch.cuda.current_stream().wait_stream(torch.cuda.Stream()),
        lambda: torch.cuda.current_stream().record_event().query(),
        lambda: PLACES.repeat_interleave(PLACES, output_size=1),
    ],
)
def test_what_does_not(function: Callable[[], object]) -> None:
    assert kinds(function) == []


def test_waits_inside_a_backward() -> None:
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * grad.sum().item()

    x = X.clone().requires_grad_()
    assert kinds(lambda: Careless.apply(x).sum().backward()) == ["_local_scalar_dense"]
    x = X.clone().requires_grad_()
    y = checkpoint(lambda x: x.sin(), x, use_reentrant=False)
    assert kinds(lambda: y.sum().backward()) == []


def test_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "terapipe" / "runtime"
    folder.mkdir(parents=True)
    (folder / "made_up.py").write_text("def read(x):\n    return x.item()\n")
    scope: dict[str, Callable[[Tensor], float]] = {}
    path = folder / "made_up.py"
    exec(compile(path.read_text(), str(path), "exec"), scope)
    with counting_waits() as found:
        scope["read"](X[0, 0])
        X[0, 0].item()
    assert found == [
        Wait("_local_scalar_dense", "terapipe/runtime/made_up.py:2"),
        Wait("_local_scalar_dense", "elsewhere"),
    ]


def test_nothing_is_counted_outside() -> None:
    with counting_waits() as found:
        with counting_waits() as inner:
            X.sum().item()
        X.sum().item()
    X.sum().item()
    assert (len(inner), len(found)) == (1, 2)


def test_timeouts_of_works_are_waits() -> None:
    from tests.pretend.channel import Work

    work = Work("SEND", 1, [X], timedelta(seconds=60))
    work.operation.end()
    assert kinds(work.wait) == []
    assert kinds(lambda: work.wait(timedelta(seconds=1))) == ["Work.wait(timeout)"]
