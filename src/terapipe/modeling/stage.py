"""What the runtime asks of a model: that it can be taken apart into stages, and what a stage can do."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terapipe.modeling.slice_cache import SliceCache

IGNORE = -100  # labels with this value count for nothing, as in torch.nn.functional.cross_entropy


class TensorParallel(NamedTuple):
    """The tensor parallel ranks of a stage, and whether operators between matrices are sequence parallel: less is kept
    and sent, but then the length of every slice must be a multiple of the number of ranks."""

    mesh: DeviceMesh
    sequence_parallel: bool = False


@runtime_checkable
class Stage(Protocol):
    """Some consecutive layers of a model, as an ``nn.Module``."""

    def make_cache(self, size: int, seq_len: int) -> SliceCache:
        """A place for what must outlive a slice, for one microbatch of ``size`` sequences of ``seq_len`` tokens."""

    def __call__(self, x: Tensor, cache: SliceCache) -> Tensor:
        """From token ids (first stage) or the hidden states of the stage before, those of this stage."""

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Last stage only: the sum of the losses of all labels that are not ``IGNORE``."""

    def hidden_shape(self, size: int, length: int) -> tuple[int, ...]:
        """The shape of the hidden states of one slice, which every stage but the first receives."""

    @property
    def blocks(self) -> list[nn.Module]:
        """Its layers, each of which is gathered and reduced as a whole where replicas share their state."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names they have in the whole model."""


@runtime_checkable
class Predictor(Protocol):
    """What a last stage may also be, for generating text."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores of all tokens to come next, at each place: (size, length, vocabulary), in float32 or wider. Where
        operators are split, it may be a DTensor."""


@runtime_checkable
class HasHead(Protocol):
    """What a last stage may also be, for losses that multiply by the head themselves."""

    def before_head(self, hidden: Tensor) -> tuple[Tensor, nn.Module]:
        """What the head would be called with, and the head. Refused where logits are more than what the head makes."""


@runtime_checkable
class HasVocabulary(Protocol):
    """What a stage may also be, so that tokens outside the vocabulary are refused before anything is computed."""

    @property
    def vocabulary(self) -> tuple[int | None, int | None]:
        """Token ids must be below the first number, labels below the second."""


class WeightSource(Protocol):
    """Where the weights of a model can be read again. As a string, a name of it for messages."""

    def read(self, first: int, last: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of the named weights that it has, as they are there, for a stage of these layers."""


@runtime_checkable
class HasSource(Protocol):
    """What a whole model may also be, so that checkpoints leave out what is frozen and can be read again."""

    def weight_source(self) -> WeightSource | None: ...


@runtime_checkable
class Splittable(Protocol):
    """A whole model that a ``Pipeline`` can take apart into stages: ``GPT``, ``hf.Decoder``, or a class of your own
    with the three members below. Nothing need be inherited. It may also have

    - ``check_slices(shortest, recompute)``, which refuses, with a ValueError, slices as short as that or these modes of
      recomputation ("block", "full");
    - ``check_step(documents=, training=, padded=)``, which refuses a step with packed documents, in training mode, or
      of batches that are filled up;
    - ``is_verified``: True says that slices of it are known to be exact, and ``Pipeline`` need not check them;
    - ``weight_source()``, which returns where its weights can be read again (see ``HasSource``), so that checkpoints
      leave out what is frozen;
    - ``traits()``, a dictionary of what must be equal on all ranks for theirs to be the same model; by default its
      ``config``, if that is a dataclass, a dictionary or has ``to_dict()``, or else its ``planning_spec()``.
    """

    @property
    def num_layers(self) -> int:
        """The layers that a plan's boundaries count."""

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of parameters that both the first and the last stage hold, each its own copy."""

    def stage(self, first: int, last: int, device: torch.device, tp: TensorParallel | None = None) -> nn.Module:
        """The layers ``first`` to ``last`` on the device, as a ``Stage``; made real there from a model on meta.

        Asked to split its operators, the stage's parameters become DTensors on that mesh, all of them; or it refuses
        with a ValueError. What it takes and gives stay ordinary tensors, of the shape ``hidden_shape`` tells."""


def fill_batch(input_ids: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """A batch of so many rows, as a plan wants it, from one of fewer, even of none: the added rows count for nothing.

    For the last batch of an epoch, which may also leave replicas with different numbers of sequences.
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
    """Labels for predicting the next token: at each place the token after it, ``IGNORE`` at the end of a sequence."""
    labels = torch.full_like(input_ids, IGNORE)
    labels[:, :-1] = input_ids[:, 1:]
    return labels
