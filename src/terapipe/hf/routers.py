"""Losses of routers in a mixture of experts: load balancing, as transformers adds it with ``output_router_logits``, and
the z-loss.

Both are functions of sums over all tokens and layers, see modeling/stage.py. With c(e) the number of times that
expert e was chosen, p(e) the sum of its probabilities, and n the number of tokens times layers, of E experts,

    load balancing = coefficient * E * sum over e of c(e) / n * p(e) / n,   z-loss = coefficient * mean of lse(logits)^2

Neither is a sum over tokens, so no slice can compute its own loss. Each slice adds up c, p and n of its tokens instead,
stages and ranks add up theirs, and the loss is computed once from the totals. Its gradient to p(e) is the same for all
tokens, so it goes back to every slice as one vector. A stage's sums of one slice, as ``add`` makes them:

    router logits of each layer   (rows * tokens, E)
        balance   [c(0) .. c(E-1), p(0) .. p(E-1), n]      2 E + 1 numbers in float64
        z         [sum of lse^2, n]                        2 numbers
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.structure import text_config
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import AuxiliaryLoss, SumsOver
from terapipe.modeling.weight_grads import to_local

FLAG = "output_router_logits"
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # names in models
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "top_k", "moe_k", "moe_top_k")
CAPACITY = ("expert_capacity", "capacity_factor", "moe_capacity_factor", "train_capacity_factor")
BALANCE, Z = "router_aux_loss", "router_z_loss"


@dataclass(frozen=True)
class RouterLosses:
    """The coefficients of a model's losses of routers, and what the losses are computed over.

    Args:
        experts: Of a layer.
        chosen: How many of them each token visits.
        balance: The coefficient of load balancing; 0 for none.
        z: The coefficient of the z-loss; 0 for none.
        over: What the sums are over: each "microbatch", the whole "batch", or the batches of all "replicas".
    """

    experts: int
    chosen: int
    balance: float = 0.0
    z: float = 0.0
    over: SumsOver = "microbatch"

    @property
    def auxiliary_losses(self) -> dict[str, AuxiliaryLoss]:
        """By name, how many sums each loss needs and how to compute it from them: what a Stage says of its losses."""
        losses: dict[str, AuxiliaryLoss] = {}
        if self.balance:
            losses[BALANCE] = AuxiliaryLoss(2 * self.experts + 1, self._balance, self.over)
        if self.z:
            losses[Z] = AuxiliaryLoss(2, lambda sums: self.z * sums[0] / sums[1], self.over)
        return losses

    def _balance(self, sums: Tensor) -> Tensor:
        counts, probabilities, rows = torch.split(sums, [self.experts, self.experts, 1])
        return self.balance * self.experts * (counts / rows * probabilities / rows).sum()

    def add(self, router_logits: Iterable[Tensor], cache: SliceCache) -> None:
        """Adds the sums of a slice's tokens to the cache, layer by layer.

        Sums are in float64: load balancing divides counts by their total, and whole numbers must stay whole.

        Args:
            router_logits: What the model returns with ``output_router_logits``: one tensor for each layer of the stage.
            cache: Of the slice.
        """
        for logits in router_logits:
            logits = to_local(logits).flatten(0, -2)
            rows = logits.new_full((1,), len(logits), dtype=torch.float64)
            if self.balance:
                cache.add_sums(BALANCE, torch.cat([*self._shares(logits), rows]))
            if self.z:
                squares = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square().sum()
                cache.add_sums(Z, torch.cat([squares.double()[None], rows]))

    def _shares(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """How often each expert was chosen, and the sum of its probabilities."""
        if logits.shape[-1] != self.experts:
            raise UnsupportedModelError(
                f"routers of {self.experts} experts were expected, got logits of shape {tuple(logits.shape)}"
            )
        probabilities = torch.softmax(logits, -1)
        chosen = probabilities.detach().topk(self.chosen, -1).indices.flatten()
        ones = torch.ones_like(chosen, dtype=torch.float64)
        counts = torch.zeros(self.experts, dtype=torch.float64, device=logits.device).scatter_add_(0, chosen, ones)
        wide = probabilities.to(torch.promote_types(logits.dtype, torch.float32))
        return counts, wide.sum(0).double()


def router_losses(model: PreTrainedModel, z: float = 0.0, over: SumsOver = "microbatch") -> RouterLosses | None:
    """The losses that a model trains with: load balancing, if its configuration asks for it, and the z-loss.

    Args:
        model: Which may have no routers: the result is None then.
        z: The coefficient of the z-loss, which transformers has not; refused for a model without routers.
        over: See ``RouterLosses``.
    """
    config = text_config(model.config)
    asked = bool(getattr(config, FLAG, False))
    balance = _number(COEFFICIENTS, model, config) if asked else 0.0
    if not balance and not z:
        return None
    experts, chosen = (int(_number(names, model, config)) for names in (EXPERTS, CHOSEN))
    if not experts or not chosen:
        if z:
            raise UnsupportedModelError(f"{type(model).__name__} has no routers that a z-loss could be added for")
        return None
    return RouterLosses(experts, chosen, balance, z, over)


def with_router_logits(config: PretrainedConfig, asked: bool) -> PretrainedConfig:
    """A copy that asks for the routers' loss, or does not. The same configuration if its model has no routers.

    Args:
        config: Of a model.
        asked: What ``output_router_logits`` is to be.
    """
    if not hasattr(text_config(config), FLAG):
        return config
    config = copy.deepcopy(config)
    setattr(text_config(config), FLAG, asked)
    return config


def with_balance(model: PreTrainedModel, coefficient: float = 1.0) -> PreTrainedModel:
    """The model, changed to this coefficient, however small its own is: errors then show.

    Args:
        model: A small copy.
        coefficient: Of load balancing.
    """
    for place in (model, text_config(model.config)):
        for name in COEFFICIENTS:
            if hasattr(place, name):
                setattr(place, name, coefficient)
    return model


def _number(names: Iterable[str], *places: Any) -> float:
    """The first of several attributes that is a number, in the first place that has one; 0 if there is none."""
    values = (getattr(place, name, None) for place in places for name in names)
    return next((float(x) for x in values if isinstance(x, int | float) and not isinstance(x, bool)), 0.0)


def refuse_capacity(model: PreTrainedModel) -> None:
    """Refuses experts with a capacity: it is a share of the tokens of one call, so slices would drop other tokens than
    whole sequences.

    Args:
        model: Whose configuration is read.
    """
    config = text_config(model.config)
    limited = [name for name in CAPACITY if getattr(config, name, None)]
    if limited:
        raise UnsupportedModelError(
            f"experts of {type(model).__name__} have a capacity ({', '.join(limited)}), which depends on the number of "
            "tokens in a call: slices would drop other tokens; set it to None, or train without slices"
        )
