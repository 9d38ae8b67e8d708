"""``python -m tests.peers [KIND ...]``: all cases, or those of some trainers. The last line is one JSON object."""

import json
import sys
import time
import warnings
from collections import Counter

import torch

from tests.peers.cases import KINDS, all_cases
from tests.peers.report import ALONE, EQUAL, REFUSED, WRONG, Finding, counts, findings
from tests.support.ranks import Ranks


class Groups:
    """Processes that stay for all cases, started anew where one left them unusable."""

    def __init__(self) -> None:
        self._group: Ranks | None = None

    def __call__(self, size: int) -> Ranks:
        if self._group is None or not self._group.usable:
            self.close()
            self._group = Ranks(size)
        return self._group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


def show(finding: Finding) -> None:
    if finding.kind != EQUAL:
        print(f"{finding.kind}: {finding.case}\n    {finding.reason[:400]}", flush=True)


def main(kinds: tuple[str, ...]) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begun, groups = time.monotonic(), Groups()
    found = []
    try:
        for kind in kinds:
            here = time.monotonic()
            found += findings(all_cases((kind,)), groups, show)
            mine = counts([finding for finding in found if finding.case.kind == kind])
            print(f"{kind}: {', '.join(f'{n} {what}' for what, n in mine.items())} in {time.monotonic() - here:.0f} s")
    finally:
        groups.close()
    total, seconds = counts(found), round(time.monotonic() - begun)
    reasons = Counter(finding.reason for finding in found if finding.kind == REFUSED)
    for reason, number in reasons.most_common():
        print(f"{number} x {reason[:300]}")
    print(f"{len(found)} combinations: {', '.join(f'{n} {what}' for what, n in total.items())} in {seconds} s")
    names = {EQUAL: "equal", REFUSED: "refused", WRONG: "wrong", ALONE: "not_comparable"}
    print(json.dumps({"combinations": len(found), **{names[k]: n for k, n in total.items()}, "seconds": seconds}))
    return min(total[WRONG], 1)


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or KINDS))
