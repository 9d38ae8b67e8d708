"""Losses over tokens: a slice's part of a sum, in float32, without the labels that do not count."""

import pytest
import torch
import torch.nn.functional as F

from terapipe.losses.tokens import cross_entropy, distillation, labels_of, token_entropies, token_log_probs

LOGITS = torch.randn(2, 6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([[1, 2, 3, -100, 5, 6], [0, 10, -100, -100, 4, 4]])


def test_log_probs_are_zero_where_labels_do_not_count() -> None:
    log_probs = token_log_probs(LOGITS, {"labels": LABELS})
    assert torch.equal(log_probs == 0, LABELS == -100)
    torch.testing.assert_close(log_probs[0, 0], LOGITS[0, 0].log_softmax(-1)[1])


def test_half_precision_is_widened_before_the_softmax() -> None:
    assert token_log_probs(LOGITS.bfloat16(), LABELS).dtype == torch.float32
    assert token_entropies(LOGITS.bfloat16()).dtype == torch.float32


def test_entropies_are_those_of_torch() -> None:
    torch.testing.assert_close(token_entropies(LOGITS), torch.distributions.Categorical(logits=LOGITS).entropy())


def test_sums_over_slices_are_the_sum_over_the_sequence() -> None:
    """What a step relies on: it calls the loss for each slice, and adds."""
    loss_fn = cross_entropy(label_smoothing=0.1, z_loss=1e-2)
    weights = torch.rand(2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = loss_fn(LOGITS, {"labels": LABELS, "weights": weights})
    parts = [loss_fn(LOGITS[:, s], {"labels": LABELS[:, s], "weights": weights[:, s]}) for s in (slice(4), slice(4, 6))]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole[0])
    torch.testing.assert_close(sum(metrics["z_loss"] for _, metrics in parts), whole[1]["z_loss"])


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    targets = {"labels": LABELS, "teacher_logits": LOGITS}
    assert float(distillation(temperature=2.0)(LOGITS, targets)[0]) == pytest.approx(0.0, abs=1e-12)
    half, _ = distillation(alpha=0.5)(LOGITS, targets)
    hard = F.cross_entropy(LOGITS.flatten(0, 1), LABELS.flatten(), reduction="sum")
    torch.testing.assert_close(half, hard / 2)


def test_a_teacher_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"take a teacher with the same vocabulary"):
        distillation()(LOGITS, {"labels": LABELS, "teacher_logits": LOGITS[..., :7]})


def test_targets_without_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \['mask'\]"):
        labels_of({"mask": LABELS})
