"""What terapipe asks of a model: two base classes, with a default for all that a model need not say.

A model of your own inherits from both, in one class or in two::

    class MyModel(tp.PipelineModel):               class MyStage(tp.Stage):
        num_layers = 24                                hidden_size = 1024
        def stage(self, first, last, device,           def forward(self, x, cache): ...
                  tp=None): ...                        def logits(self, hidden): ...

``Pipeline`` asks the model for the stages of its rank, and a stage for all the rest. Whatever else a model may offer is
a method or an attribute below, so that there is one place to look it up and nothing is asked by ``hasattr``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terapipe.modeling.checkpointing import CheckpointedForward
from terapipe.modeling.linear import fuse_weight_grads, has_plain_products
from terapipe.modeling.offload import SavedTensors
from terapipe.modeling.recall import LayerNeeds
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.weight_grads import to_local
from terapipe.planning.presets import ModelSpec
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan

IGNORE = -100  # labels with this value count for nothing, as in torch.nn.functional.cross_entropy

SumsOver = Literal["microbatch", "batch", "replicas"]


class TensorParallel(NamedTuple):
    """How ``PipelineModel.stage`` is to split the operators of a stage.

    Attributes:
        mesh: The devices that share a stage, as a mesh of one dimension.
        sequence_parallel: Whether operators between matrices may be split by tokens. Less is then kept and sent, and
            every slice's length is a multiple of the number of devices.
    """

    mesh: DeviceMesh
    sequence_parallel: bool = False


@dataclass(frozen=True)
class AuxiliaryLoss:
    """A term of the loss that is a function of sums over layers and tokens, such as the load-balancing loss of a
    mixture of experts.

    A layer adds to the sums with ``cache.add_sums(name, sums)``. The forwards collect them over slices, layers and
    stages. The last stage computes the loss of the totals; its gradient is the same for all layers and slices, and goes
    back with the backwards. So the result is exact, whatever ``value`` makes of the sums.

    Args:
        size: The number of sums.
        value: Computes the loss, a scalar, from the totals, a vector in float64.
        over: What the totals are of: one "microbatch"; the "batch", for which all forwards must come before the first
            backward; or the batches of all "replicas". The step's loss has the mean over microbatches, weighted by
            their sequences.
    """

    size: int
    value: Callable[[Tensor], Tensor]
    over: SumsOver = "microbatch"

    def __post_init__(self) -> None:
        if self.over not in get_args(SumsOver):
            raise ValueError(f"over is one of {', '.join(get_args(SumsOver))}, got {self.over!r}")


class WeightSource(Protocol):
    """Where the weights of a model can be read again. As a string, a name of it for messages."""

    def read(self, first: int, last: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads those of the named weights that the source has.

        Args:
            first: The stage's first layer.
            last: The one after its last.
            names: Names of parameters, as the stage has them.
        """


class Stage(nn.Module):
    """Some consecutive layers of a model. Override ``forward``, and ``logits`` or ``loss``.

    The first stage takes token ids, the others what the stage before returned. Parameters must have the names that they
    have in the whole model: hold layers in an ``nn.ModuleDict`` by their number in the model, or override
    ``named_parameters`` and ``state_dict``.

    Attributes:
        hidden_size: The width of hidden states. ``hidden_shape`` uses it.
        vocabulary: Token ids must be below the first number, labels below the second. With None, they are not checked.
        auxiliary_losses: Losses of sums that layers add, by name; the same on all stages of a model.
        no_default_loss: Why cross-entropy of labels makes no sense for this model. Empty if it does.
    """

    hidden_size: int
    vocabulary: tuple[int | None, int | None] = (None, None)
    auxiliary_losses: Mapping[str, AuxiliaryLoss] = {}
    no_default_loss: str = ""

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of hidden states where nothing is autocast, and then also of messages: by default that of the
        stage's first parameter. Under autocast messages say their dtype themselves, see ``MessageFormat``."""
        return next(self.parameters()).dtype

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        """Computes the hidden states of one slice.

        Args:
            x: Token ids (first stage) or hidden states of the stage before, of the slice's tokens only.
            cache: What earlier slices of the same sequences left. Give it to ``attend``, or to ``get_state`` and
                ``set_state`` of the cache.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(x, cache)")

    def logits(self, hidden: Tensor) -> Tensor:
        """Last stage: computes the scores of all tokens to come next, at each place.

        Args:
            hidden: What ``forward`` of the last stage returned.

        Returns:
            A tensor of shape (size, length, vocabulary), in float32 or wider; it may be a DTensor where operators are
            split.
        """
        raise ValueError(
            f"{type(self).__name__} has no logits, which losses other than its own, log-probabilities and generation "
            "need; define logits(hidden)"
        )

    def before_head(self, hidden: Tensor) -> tuple[Tensor, nn.Module]:
        """Last stage: returns the head and what to call it with, for losses that multiply by the head themselves.

        Refuse it, with a ValueError, if logits are more than what the head makes (a scale, a softcap).

        Args:
            hidden: What ``forward`` of the last stage returned.
        """
        raise ValueError(
            f"{type(self).__name__} does not give its head, which losses of hidden states need; define "
            "before_head(hidden)"
        )

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Last stage: computes the sum, not the mean, of the losses of all labels that are not ``IGNORE``.

        A mean would be that of a slice; the step divides the sum of all slices by the number of labels in the batch. By
        default it is the cross-entropy of ``logits``, in float32 or wider.

        Args:
            hidden: What ``forward`` of the last stage returned, of one slice.
            labels: (size, length), those of the same tokens.
        """
        logits = self.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision is too coarse for a sum
        return to_local(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"))

    def make_cache(self, size: int, seq_len: int) -> SliceCache:
        """Makes the place for what must outlive a slice. Raise a ValueError for sequences that are too long.

        Args:
            size: Sequences of the microbatch.
            seq_len: Tokens of each sequence.
        """
        return SliceCache(seq_len)

    def hidden_shape(self, size: int, length: int) -> tuple[int, ...]:
        """The shape of what ``forward`` returns, and so of what every stage but the first receives.

        Args:
            size: Sequences of the slice.
            length: Its tokens.
        """
        return (size, length, self.hidden_size)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers: each is compiled, recomputed, or gathered and reduced by FSDP as a whole.

        By default what the stage's ``nn.ModuleList`` and ``nn.ModuleDict`` hold.
        """
        lists = (child for child in self.children() if isinstance(child, nn.ModuleList | nn.ModuleDict))
        return [block for child in lists for block in child.children()]

    def wrap_compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What to call in place of a block's compiled forward. Raise a ValueError if blocks cannot be compiled.

        Args:
            forward: A block's ``forward`` as ``torch.compile`` returned it.
        """
        return forward

    def offers(self, method: Literal["logits", "before_head"]) -> bool:
        """Whether the class defines an optional method, so that a step that needs it is refused before it begins.

        Args:
            method: One that this class defines only to refuse it.
        """
        return getattr(type(self), method) is not getattr(Stage, method)


class PipelineModel(ABC):
    """A whole model, which ``Pipeline`` takes apart into stages. Set ``num_layers`` and override ``stage``.

    It may be an ``nn.Module`` too, or even a ``Stage`` of all layers, but need not be.

    Attributes:
        num_layers: The layers that a plan's boundaries count.
        tied: Names of parameters that both the first and the last stage hold, each its own copy.
        config: What describes the model: a dataclass, a dictionary, or an object with ``to_dict()``. It must be equal
            on all ranks.
        has_auxiliary_losses: Whether its stages have ``auxiliary_losses``. ``terapipe train`` and the trainers log
            metrics then; a pipeline asks its stages.
        has_bare_ends: Whether ``stage`` takes ``embeds`` and ``has_head``, so that plans may have the embedding or
            the head alone on a stage.
    """

    num_layers: int
    tied: tuple[str, ...] = ()
    config: Any = None
    has_auxiliary_losses: bool = False
    has_bare_ends: bool = False

    @abstractmethod
    def stage(self, first: int, last: int, device: torch.device, tp: TensorParallel | None = None) -> Stage:
        """Makes the stage with layers ``first`` up to, not including, ``last``.

        Args:
            first: 0 for the stage that also embeds tokens.
            last: ``num_layers`` for the stage that also has the head.
            device: Where its parameters are to be. Those of a model on the meta device are made real here.
            tp: Split operators over these devices: all parameters of the stage become DTensors on the mesh, while what
                ``forward`` takes and returns stay ordinary tensors of ``hidden_shape``. A model that cannot do it
                raises a ValueError, or leaves the argument out.

        A model with ``has_bare_ends`` also takes ``embeds`` and ``has_head``, which say whether the stage embeds tokens
        and has the head where the numbers of its layers do not: of the boundaries (0, 0, 4), the first stage has no
        layers, and the second begins with layer 0, but does not embed. See ``ends_of``.
        """

    def make_stage(self, plan: Plan, k: int, device: torch.device, tp: TensorParallel | None = None) -> Stage:
        """Makes stage ``k`` of a plan.

        Args:
            plan: Of all stages.
            k: The number of the stage.
            device: As in ``stage``.
            tp: As in ``stage``. It is left out if there is none, since a model need not take it.
        """
        first, last = plan.boundaries[k : k + 2]
        split = () if tp is None else (tp,)
        if not plan.has_bare_ends:
            return require_stage(self.stage(first, last, device, *split))
        if not self.has_bare_ends:
            raise ValueError(
                f"the plan has a stage without layers, boundaries {list(plan.boundaries)}, which {type(self).__name__} "
                "does not offer; give every stage a layer, or set has_bare_ends and take embeds and has_head in stage()"
            )
        make: Any = self.stage
        ends = {"embeds": k == 0, "has_head": k == plan.num_stages - 1}
        return require_stage(make(first, last, device, *split, **ends))

    def fake_copy(self, device: torch.device) -> "PipelineModel":
        """A copy whose weights have shapes but no numbers, for dry runs. It is called where new tensors are fake. By
        default the model itself, which must be on the meta device.

        Args:
            device: Of the copy's weights.
        """
        return self

    def ends_of(self, first: int, last: int, embeds: bool | None, has_head: bool | None) -> tuple[bool, bool]:
        """Whether a stage embeds tokens, and whether it has the head, from the arguments of ``stage``.

        Without being told, a stage that begins with layer 0 embeds, and one that ends with the last layer has the head.
        Refuses numbers that are no stage.

        Args:
            first: The stage's first layer.
            last: The one after its last; equal to ``first`` for one of the model's ends alone.
            embeds: What the caller says, or None.
            has_head: What the caller says, or None.
        """
        embeds = first == 0 if embeds is None else embeds
        has_head = last == self.num_layers if has_head is None else has_head
        is_bare = first == last and ((embeds and first == 0) or (has_head and last == self.num_layers))
        if not (0 <= first < last <= self.num_layers or (is_bare and embeds != has_head)):
            raise ValueError(
                f"a stage is some of the {self.num_layers} layers, or one of the model's ends alone, got {first} to "
                f"{last}"
            )
        return embeds, has_head

    @property
    def is_verified(self) -> bool:
        """True says that slices of the model are known to be exact, so that ``Pipeline`` need not check them."""
        return False

    def check_plan(self, plan: Plan) -> None:  # noqa: B027
        """Raises a ValueError if the model cannot be run by the plan: slices too short, a mode of recomputation.

        Args:
            plan: The one that the pipeline is to run.
        """

    def check_step(self, *, documents: bool, training: bool, padded: bool) -> None:  # noqa: B027
        """Raises a ValueError if a step would not be exact. All ranks call it, before anything is sent.

        Args:
            documents: Whether rows are packed with several documents.
            training: Whether the stages are in training mode.
            padded: Whether batches may have been filled up to a longer length.
        """

    def planning_spec(self) -> ModelSpec | None:
        """What the planner must know of the model. With None, planning needs a measured ``Profile``."""
        return None

    def weight_source(self) -> WeightSource | None:
        """Where its weights can be read again, so that checkpoints leave out what is frozen. None: nowhere."""
        return None

    def traits(self) -> Mapping[str, Any]:
        """What must be equal on all ranks for theirs to be the same model. By default ``config``, or else
        ``planning_spec()``."""
        return {"config": self.config or self.planning_spec()}

    def whole_module(self) -> nn.Module | None:
        """The module with the whole model's weights, maybe on the meta device, to compare stages and ranks with.

        None if there is none. Its parameters have the names that the stages' have."""
        return self if isinstance(self, nn.Module) else None


def require_model(model: object) -> PipelineModel:
    """The model, or a ValueError that says what to inherit from and what to set.

    Args:
        model: What a user gave to ``Pipeline``.
    """
    if not isinstance(model, PipelineModel):
        raise ValueError(
            f"a model must inherit from terapipe.PipelineModel, got {type(model).__name__}; inherit from it, set "
            "num_layers and define stage(first, last, device, tp=None); for a Hugging Face model take hf.Decoder"
        )
    if not hasattr(model, "num_layers"):
        raise ValueError(f"a model must say its number of layers; set num_layers in {type(model).__name__}")
    return model


def require_stage(stage: object) -> Stage:
    """The stage, or a ValueError that says what to inherit from and what to set.

    Args:
        stage: What a model's ``stage`` returned.
    """
    if not isinstance(stage, Stage):
        raise ValueError(
            f"stage() must return a terapipe.Stage, got {type(stage).__name__}; inherit from it in place of nn.Module"
        )
    if type(stage).hidden_shape is Stage.hidden_shape and not hasattr(stage, "hidden_size"):
        raise ValueError(
            f"a stage must say the width of what it returns; set hidden_size in {type(stage).__name__}, or override "
            "hidden_shape"
        )
    return stage


# Batches


def fill_batch(input_ids: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """A batch of so many rows, as a plan wants it, from one of fewer, even of none: the added rows count for nothing.

    For the last batch of an epoch, which may also leave replicas with different numbers of sequences.

    Args:
        input_ids: (sequences, tokens).
        labels: Of the same shape.
        rows: Sequences that the plan wants.

    Returns:
        Ids filled up with zeros, and labels filled up with ``IGNORE``.
    """
    missing = rows - len(input_ids)
    if missing < 0 or input_ids.shape != labels.shape:
        raise ValueError(
            f"a batch can be filled up to {rows} rows from at most so many, with labels of the same shape, got "
            f"{tuple(input_ids.shape)} and {tuple(labels.shape)}"
        )
    ids = torch.cat([input_ids, input_ids.new_zeros(missing, *input_ids.shape[1:])])
    return ids, torch.cat([labels, labels.new_full((missing, *labels.shape[1:]), IGNORE)])


def next_token_labels(input_ids: Tensor) -> Tensor:
    """Labels for predicting the next token: at each place the token after it, ``IGNORE`` at the end of a sequence.

    Args:
        input_ids: (sequences, tokens).
    """
    labels = torch.full_like(input_ids, IGNORE)
    labels[:, :-1] = input_ids[:, 1:]
    return labels


# How a stage is computed


class SlicedStage:
    """Forwards and backwards of a stage's slices, the same for all stages, whoever wrote them.

    Args:
        stage: Linear layers and embeddings of it are given classes that add gradients in place.
        fused: Otherwise they are left alone, and gradients of weights come from autograd.
    """

    def __init__(self, stage: Stage, *, fused: bool = True) -> None:
        self.stage, self._fused = stage, fused
        # What the recomputation of each layer needs, by its number and by what is trained and how.
        self._needs: dict[tuple[int, Hashable], LayerNeeds] = {}
        self._traits: Hashable = None
        if fused:
            fuse_weight_grads(stage)

    def forward(
        self, x: Tensor, cache: SliceCache, *, recompute: Recompute = "none", saved: SavedTensors | None = None
    ) -> Tensor:
        """Computes the cache's current slice.

        Args:
            x: Token ids, or hidden states of the stage before.
            cache: Its ``begin`` has said which slice.
            recompute: What each layer computes again in the backward. "full" is the caller's to do: the stage is
                computed without gradients, and once more in the backward.
            saved: Takes what the slice keeps for its backward, if it is to be moved.
        """
        cache.current.saved = saved
        hooks = nullcontext() if saved is None else saved.hooks()
        checkpointed = nullcontext() if recompute in ("none", "full") else self._checkpointed(cache, recompute)
        with self.over(cache), hooks, checkpointed:
            cache.current.is_in_forward = True
            try:
                out: Tensor = self.stage(x, cache)
            except RuntimeError as error:
                if torch.is_grad_enabled() or "does not require grad" not in str(error):
                    raise
                raise ValueError(
                    "a layer must not differentiate (torch.autograd.grad in its forward) what was computed outside of "
                    f"torch.enable_grad(), since evaluation and recompute 'full' compute forwards without gradients: "
                    f"{error}; compute it from detached inputs under torch.enable_grad(), or recompute 'block' or "
                    "'none'"
                ) from error
            finally:
                cache.current.is_in_forward = False
        return out

    def backward(
        self, cache: SliceCache, out: Tensor, gradient: Tensor, others: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """Runs the backward of the cache's current slice.

        Args:
            cache: Its ``begin`` has said which slice.
            out: What ``forward`` returned.
            gradient: Its gradient.
            others: Further results with their gradients, see ``SliceCache.backward``.
        """
        with self.over(cache):  # layers may be computed again
            cache.backward(out, gradient, others)

    def check_modes(self, modes: Iterable[Recompute]) -> None:
        """Refuses light recomputation where the stage's linear layers are not those that can be recalled.

        Args:
            modes: Of a plan.
        """
        if "light" not in modes:
            return
        if not self._fused:
            raise ValueError(
                "recompute='light' recalls the outputs of linear layers that add gradients in place, got "
                "fused_weight_grads=False; leave that out, or take recompute 'none', 'block' or 'full'"
            )
        if any(getattr(block.forward, "_compiled_layer", False) for block in self.stage.blocks):
            raise ValueError(
                "recompute='light' cannot look into compiled layers, whose compiler chooses itself what is computed "
                "again; leave compiling off, or take recompute 'none', 'block' or 'full'"
            )

    @property
    def defers_weight_grads(self) -> bool:
        """Whether orders with split backwards find gradients of weights to put off. Compiled layers make them as
        autograd does: their backwards are one piece, and the halves that follow have nothing to do."""
        return self._fused and not has_plain_products(self.stage)

    def over(self, cache: SliceCache) -> SliceCache:
        """A context in which modules of the stage work on the cache's current slice; a last stage's head, too.

        Args:
            cache: Its ``begin`` has said which slice. It is the context manager that is returned.
        """
        cache.current.fuses = self._fused
        return cache

    @contextmanager
    def _checkpointed(self, cache: SliceCache, recompute: Recompute) -> Iterator[None]:
        """Inside, the forward of each block is checkpointed. Hooks of blocks, such as FSDP's, are outside of that."""
        blocks = self.stage.blocks
        plain = [(block, block.__dict__.get("forward")) for block in blocks]
        self.check_modes((recompute,))  # again: layers may have been compiled since
        traits = self._layer_traits(cache) if recompute == "light" else None
        try:
            for i, block in enumerate(blocks):
                needs = None if traits is None else (self._needs, (i, traits))
                block.__dict__["forward"] = CheckpointedForward(block.forward, cache, needs)
            yield
        finally:
            for block, forward in plain:
                if forward is None:
                    del block.__dict__["forward"]
                else:
                    block.__dict__["forward"] = forward

    def _layer_traits(self, cache: SliceCache) -> Hashable:
        """What the needs of a layer's recomputation may depend on: what is trained, what is cast, what is dropped, and
        whether a slice is the first one. Modules are asked once for each microbatch."""
        if cache.current.start == 0 or self._traits is None:
            trained = tuple(p.requires_grad for p in self.stage.parameters())
            self._traits = trained, tuple(module.training for module in self.stage.modules())
        device = next((p.device.type for p in self.stage.parameters()), "cpu")
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return self._traits, dtype, cache.current.start == 0, cache.has_documents


class Autocast(NamedTuple):
    """The state of ``torch.autocast`` where a step was called; all ranks must have the same.

    Only forwards are autocast, those that a backward begins with too. All else in a step (backwards, sums, transfers)
    runs without it, as torch recommends for ``backward()``.

    Attributes:
        device_type: As ``torch.autocast`` takes it.
        dtype: What it casts to; None where it is off.
    """

    device_type: str
    dtype: torch.dtype | None

    @classmethod
    def current(cls, device: torch.device) -> Self:
        """The present state.

        Args:
            device: The stage's.
        """
        enabled = torch.is_autocast_enabled(device.type)
        return cls(device.type, torch.get_autocast_dtype(device.type) if enabled else None)

    def on(self) -> AbstractContextManager[object]:
        """For a forward. torch keeps the casts of weights only if gradients are recorded: older versions take a cast
        that was made without them for one with them, and the weight's gradient is lost."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, cache_enabled=torch.is_grad_enabled())

    def off(self) -> AbstractContextManager[object]:
        """For what must run as without autocast: backwards, sums, transfers."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device_type, enabled=False)

    def forget_casts(self) -> None:
        """Casts of weights that torch keeps are of no use before a step or after it: weights change."""
        if self.dtype is not None:
            torch.clear_autocast_cache()

    def __str__(self) -> str:
        return "" if self.dtype is None else f" under autocast to {self.dtype}"


class RandomState(NamedTuple):
    """The state of torch's random generators, so that a forward that is computed again draws the same dropout masks.

    As in torch.utils.checkpoint, tensors of devices other than the stage's are not expected to draw.

    Attributes:
        device: The stage's.
        cpu: The state of the CPU's generator.
        accelerator: The state of the device's generator, if the stage runs elsewhere.
    """

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """The present state.

        Args:
            device: The stage's.
        """
        module = None if device.type == "cpu" else torch.get_device_module(device)
        return cls(device, torch.get_rng_state(), module and module.get_rng_state(device))

    @property
    def is_now(self) -> bool:
        """Whether nothing was drawn since."""
        now = RandomState.now(self.device)
        is_same = self.accelerator is None or now.accelerator is None or self.accelerator.equal(now.accelerator)
        return self.cpu.equal(now.cpu) and is_same

    def set(self) -> None:
        """Draws what follows from this state."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, random numbers are drawn from this state; outside, they go on as if nothing had been drawn."""
        outside = RandomState.now(self.device)
        self.set()
        try:
            yield
        finally:
            outside.set()
