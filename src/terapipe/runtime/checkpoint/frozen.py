"""Frozen weights that checkpoints leave out because the model's files have them, and how another base is noticed."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from terapipe.modeling.quantized import parts_of
from terapipe.modeling.stage import WeightSource
from terapipe.modeling.weight_grads import to_local
from terapipe.runtime.comm.mesh import ALL
from terapipe.runtime.comm.transport import Transport

Digests = dict[str, str]  # shape, dtype and checksum of whole weights, by their names in the whole model


class FrozenBase:
    """The frozen weights of a pipeline that can be read again, such as the base of an adapter.

    An adapter has a thousandth of its base's bytes, and the base does not change: saving it again and again is a waste.
    To leave it out is safe for two reasons. A weight is left out only after the model's source was read once more and
    gave the same bits: what never came from files, or was changed since, is saved like what is trained. And a
    checkpoint has a digest of each weight that it leaves out, the same in any layout: another base is refused.

    Both take a reading of all frozen weights. That is done at the first save; later ones compare a sum of each weight,
    taken on its device, and only if one has changed (peft merges adapters into it, say) is everything done anew.

    Args:
        source: where the model's weights came from; None if they came from no files, and nothing is left out.
        layers: the first and the last of each stage of this rank.
        transport: of the pipeline.
    """

    def __init__(self, source: WeightSource | None, layers: Sequence[tuple[int, int]], transport: Transport) -> None:
        self._source, self._layers, self._transport = source, layers, transport
        self._sums: dict[str, int] = {}  # of this rank's parts, when ``_left_out`` was chosen
        self._left_out: Digests = {}

    @property
    def source(self) -> str:
        """The name of the source, for messages and for the checkpoint."""
        return str(self._source)

    def choose_left_out(self, weights: Mapping[str, Tensor]) -> Digests:
        """Chooses the weights that a checkpoint leaves out. All ranks call it together and get the same answer.

        Args:
            weights: of this rank, by their names in the whole model.

        Returns:
            The digests of what all ranks leave out.
        """
        candidates = {} if self._source is None else weights
        frozen = {
            name: x for name, x in candidates.items() if isinstance(x, torch.nn.Parameter) and not x.requires_grad
        }
        sums = local_sums(frozen)
        if any(self._transport.gather(sums != self._sums, ALL)):
            self._left_out = self._agree(weights, digests_of(frozen))
            self._sums = sums
        return self._left_out

    def _agree(self, weights: Iterable[str], digests: Digests) -> Digests:
        """Gathers what each rank can leave out, less what any rank must save: of tied weights each stage has a copy,
        and all copies must equal the source."""
        asks = self._transport.dp_rank == self._transport.tp_rank == 0  # the others hold the same
        with ThreadPoolExecutor(1) as thread:
            work = thread.submit(self._in_source, digests if asks else {})
            self._transport.until_all(lambda span: bool(wait([work], span).done))
        mine = work.result()
        others = [name for name in weights if name not in mine] if asks else []
        answers = self._transport.gather((mine, others), ALL)
        saved = {name for _, names in answers for name in names}
        return {name: x for digests, _ in answers for name, x in digests.items() if name not in saved}

    def _in_source(self, digests: Digests) -> Digests:
        """Reads the source again. Returns the weights of which it gives the same bits; none if it cannot be read, and
        then all are saved."""
        if self._source is None or not digests:
            return {}
        same: Digests = {}
        for first, last in self._layers:
            try:
                read = self._source.read(first, last, digests)
            except Exception:  # files may be gone, or of another kind: transformers raises whatever it likes
                return {}
            same |= {name: digests[name] for name, x in read.items() if digest_of(x) == digests[name]}
        return same

    def check(self, folder: Path, left_out: Digests, source: str, weights: Mapping[str, Tensor]) -> None:
        """Refuses a checkpoint that left out other weights than are here, with the same words on all ranks.

        Args:
            folder: of the checkpoint, for the message.
            left_out: the digests in the checkpoint.
            source: of the weights that it left out, for the message.
            weights: of this rank.
        """
        here = digests_of({name: x for name, x in weights.items() if name in left_out})
        wrong = [name for name, digest in here.items() if digest != left_out[name]]
        answers = self._transport.gather((wrong, list(here)), ALL)
        there = {name for _, names in answers for name in names}
        strange = sorted({name for names, _ in answers for name in names} | (left_out.keys() - there))
        if strange:
            more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
            raise ValueError(
                f"the checkpoint {folder} leaves out frozen weights of {source}, which must be as they were when it "
                f"was saved, got {'another' if strange[0] in there else 'no'} {strange[0]}{more}; make the model from "
                "the weights that the checkpoint was trained with"
            )


def digests_of(weights: Mapping[str, Tensor]) -> Digests:
    """Computes the digest of each whole weight. All ranks that hold parts of a weight call it together, with the same
    names in the same order, because parts are gathered."""
    return {name: digest_of(x.full_tensor() if isinstance(x, DTensor) else x) for name, x in weights.items()}


def digest_of(tensor: Tensor) -> str:
    """Returns shape, dtype and a checksum of a tensor. Of all its bits, not of a sample: in an embedding that was made
    larger, only a few new rows may differ. Of a quantized weight, with the bits of its scales."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts_of(tensor):
        digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"{tuple(tensor.shape)} {tensor.dtype} {digest.hexdigest()}"


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def local_sums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Sums the bits of this rank's part of each weight, as integers, with those of a quantized weight's scales. The
    host waits for the device once, for all of them together."""
    if not weights:
        return {}
    sums = [torch.stack([_bit_sum(part) for part in parts_of(x)]).sum() for x in weights.values()]
    return dict(zip(weights, torch.stack(sums).tolist(), strict=True))


def _bit_sum(tensor: Tensor) -> Tensor:
    """The sum of the bits of this rank's part of a tensor, as integers."""
    part = to_local(tensor).detach().contiguous().flatten()
    return part.view(_INTEGERS[part.element_size()]).sum(dtype=torch.int64)
