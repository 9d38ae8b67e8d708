"""Actions in words."""

from terapipe.planning.slices import Slice
from terapipe.scheduling.actions import Action, Op

NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "backward, inputs", Op.W: "backward, weights"}
TRANSFERS = {
    Op.SEND_F: "send output",
    Op.RECV_F: "receive input",
    Op.SEND_B: "send gradient",
    Op.RECV_B: "receive gradient",
}


def in_words(action: Action) -> str:
    """ "forward: stage 1, microbatch 0, slice 3 (256 tokens after 512)"."""
    name = NAMES.get(action.op) or TRANSFERS[action.op]
    s = action.slice
    return f"{name}: stage {action.stage}, microbatch {s.microbatch}, slice {s.number} ({_tokens(s)})"


def count(number: int, noun: str) -> str:
    """ "1 slice", "2 slices"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _tokens(s: Slice) -> str:
    return count(s.length, "token") + (f" after {s.context}" if s.context else "")
