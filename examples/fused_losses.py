"""Fused linear cross-entropy in a pipeline: the loss multiplies by the head itself, and never holds a slice's logits.

    python examples/fused_losses.py                                                # torch's own
    pip install cut-cross-entropy liger-kernel triton
    TRITON_INTERPRET=1 python examples/fused_losses.py cut-cross-entropy liger     # on a CPU; leave it out on a GPU

Each is a ``HiddenLoss``: it gets what the head would be called with, the head and the labels. Prints the largest
difference of any gradient from that of plain cross-entropy.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe import GPT, GPTConfig, Pipeline, Plan, losses, next_token_labels


def torchs_own(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
    return F.linear_cross_entropy(hidden.flatten(0, 1), head.weight, labels.flatten(), reduction="sum")


def cut_cross_entropy(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    impl = "cce" if hidden.is_cuda else "torch_compile"
    return linear_cross_entropy(hidden, head.weight, labels, reduction="sum", impl=impl)


def liger(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    bias, class_weights, ignored, z_loss, smoothing = None, None, -100, 0.0, 0.0
    found = Fused.apply(
        hidden.flatten(0, 1), head.weight, labels.flatten(), bias, class_weights, ignored, z_loss, smoothing, "sum"
    )
    return found[0] if isinstance(found, tuple) else found


KINDS = {"torch": torchs_own, "cut-cross-entropy": cut_cross_entropy, "liger": liger}
PLAN = Plan((2,), ((40, 8, 48, 32),), (0, 2))


def gradients(loss_fn: Any) -> dict[str, Tensor]:
    pipe = Pipeline(GPT(GPTConfig(layers=2, hidden=64, heads=4, vocab=500, max_seq_len=128)), PLAN, loss_fn=loss_fn)
    ids = torch.randint(500, (2, 128), generator=torch.Generator().manual_seed(0))
    pipe.step(ids, next_token_labels(ids))
    return {name: p.grad for name, p in pipe.named_parameters()}


def main() -> None:
    wanted = gradients(None)
    largest = max(g.abs().max() for g in wanted.values())
    for name in sys.argv[1:] or ["torch"]:
        found = gradients(losses.HiddenLoss(KINDS[name]))
        worst = max((found[n] - g).abs().max() / largest for n, g in wanted.items())
        print(f"{name}: largest relative difference {worst:.1e}")


if __name__ == "__main__":
    main()
