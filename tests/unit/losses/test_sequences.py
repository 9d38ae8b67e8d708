"""Losses over sequences: their sums and averages, pairs, and the last token of each."""

import pytest
import torch
import torch.nn.functional as F

from terapipe.losses.sequences import at_last, dpo, interleave, last_tokens, sequence_average, sequence_sum

LABELS = torch.tensor([[1, 2, -100, 4], [-100, -100, -100, -100]])
VALUES = torch.tensor([[1.0, 2.0, 30.0, 6.0], [7.0, 7.0, 7.0, 7.0]])


def test_only_labels_that_count_are_summed() -> None:
    assert sequence_sum(VALUES, LABELS).tolist() == [9.0, 0.0]
    assert sequence_average(VALUES, LABELS).tolist() == [3.0, 0.0]  # no division by zero without labels


def test_pairs_follow_each_other() -> None:
    assert interleave(torch.tensor([[1], [2]]), torch.tensor([[3], [4]])).flatten().tolist() == [1, 3, 2, 4]
    with pytest.raises(ValueError, match=r"must have the same shape, got \(1, 2\) and \(1, 3\); pad the shorter"):
        interleave(torch.zeros(1, 2), torch.zeros(1, 3))


def test_dpo_is_the_papers_formula() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]], dtype=torch.float64)
    targets = {"labels": torch.ones(2, 2, dtype=torch.int64), "reference": torch.tensor([-2.5, -5.0])}
    loss, metrics = dpo(beta=0.5).fn(log_probs, targets)
    chosen, rejected = 0.5 * (-3.0 + 2.5), 0.5 * (-4.0 + 5.0)
    assert float(loss) == pytest.approx(-float(F.logsigmoid(torch.tensor(chosen - rejected, dtype=torch.float64))))
    assert metrics["rewards/accuracies"] == 0
    with pytest.raises(ValueError, match=r"even number of sequences"):
        dpo().fn(log_probs[:1], {name: x[:1] for name, x in targets.items()})


def test_the_last_token_stands_before_the_padding() -> None:
    ids = torch.tensor([[5, 6, 0, 0], [5, 0, 7, 8]])  # a padding token inside of a text is none
    last = last_tokens(ids, 0)
    assert last.tolist() == [1, 3]
    assert last_tokens(ids, None).tolist() == [3, 3]
    assert at_last(VALUES[..., None], {"last": last}).flatten().tolist() == [2.0, 7.0]
    with pytest.raises(ValueError, match=r"must be padded on the right"):
        last_tokens(torch.tensor([[0, 5]]), 0)
