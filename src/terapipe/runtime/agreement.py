"""What the ranks tell each other before a step: whether each can take what it was given, and that it is the same.

One message of a few numbers. A batch that any rank refuses is refused by all of them, before anything is computed or
sent: gradients, caches and the pipeline stay as they were, and training can go on.
"""

import hashlib
from typing import NamedTuple

from torch import Tensor

from terapipe.runtime.failures import in_words
from terapipe.runtime.transport import ALL, Transport


class Terms(NamedTuple):
    """One rank's numbers, each within an int64. Zero where a rank has nothing to say."""

    refused: int
    replica: int
    work: int  # checksum of what all ranks of a pipeline must be given alike
    ids: int = 0  # checksum of token ids, and ...
    labels: int = 0  # ... of labels, where a rank has only one of the two
    counted: int = 0  # labels that are not ignored
    tied: int = 0  # copies of the parameter that the first and the last stage share, and ...
    trained: int = 0  # ... how many of them are not frozen


def agree(transport: Transport, mine: Terms, error: Exception | None, description: str) -> list[Terms]:
    """Every rank's terms, if all accept; ``description`` is what ``work`` is the checksum of, in words."""
    found = [Terms(*numbers) for numbers in transport.gather_numbers(mine, ALL)]
    if any(terms.refused for terms in found):
        reasons = transport.gather("" if error is None else in_words(error), ALL)
        if error is not None:
            raise error
        rank = next(i for i, terms in enumerate(found) if terms.refused)
        raise ValueError(f"{transport.name(rank)} refused what it was given: {reasons[rank]}")
    if _differ(found):
        descriptions = transport.gather(description, ALL)
        raise ValueError(_difference(transport, found, descriptions))
    if {(t.replica, t.ids) for t in found if t.ids} & {(t.replica, t.labels) for t in found}:
        raise ValueError(NOT_SHIFTED)
    return found


NOT_SHIFTED = (
    "labels must be the tokens to predict, got the input_ids themselves: labels[b, t] is the token after "
    "input_ids[b, t]; make them with terapipe.next_token_labels(input_ids), and set those to leave out to -100"
)


def _differ(found: list[Terms]) -> bool:
    return len({(terms.replica, terms.work) for terms in found}) > len({terms.replica for terms in found})


def _difference(transport: Transport, found: list[Terms], descriptions: list[str]) -> str:
    """Names the first two ranks of a pipeline that differ."""
    for i, terms in enumerate(found):
        first = next(j for j, other in enumerate(found) if other.replica == terms.replica)
        if terms.work != found[first].work:
            return (
                "all ranks of a pipeline must call the same method with the same plan, documents and shape of batch: "
                f"{transport.name(first)} has {descriptions[first]}, {transport.name(i)} has {descriptions[i]}"
            )
    raise AssertionError("no two ranks differ")


def checksum(data: str | Tensor) -> int:
    """Of 63 bits, never zero."""
    raw = data.encode() if isinstance(data, str) else data.cpu().contiguous().numpy().tobytes()
    return (int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") >> 1) or 1
