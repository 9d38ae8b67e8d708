"""What a step is given is checked on all ranks, and refused with everything as it was."""

from collections.abc import Callable

import torch
from torch import Tensor

from terapipe import Pipeline, Plan, next_token_labels
from tests.support.models import TINY, make_batch, make_model
from tests.support.ranks import Ranks

PLAN = Plan((1, 1), ((9, 1, 12, 7), (20, 9)), (0, 1, 4))


def refused(function: Callable[[], object]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def test_labels_that_were_not_shifted_are_refused() -> None:
    """Hugging Face takes ``labels=input_ids`` and shifts them; here that trained a model to copy."""
    pipe = Pipeline(make_model(TINY), Plan((2,), ((9, 20),), (0, 4)))
    ids, _ = make_batch(TINY, 2, 29, ignored=False)
    masked = ids.clone()
    masked[0, :20] = -100
    for labels in (ids, ids.clone(), masked):
        assert "next_token_labels" in refused(lambda labels=labels: pipe.step(ids, labels))
    pipe.step(ids, next_token_labels(ids))
    alike = torch.full_like(ids, 5)
    pipe.step(alike, alike.clone())  # every token is the one after it, too


def from_its_end(ids: Tensor) -> list[str]:
    """Token ids on the first rank only and labels on the last only."""
    pipe = Pipeline(make_model(TINY), PLAN, timeout=300.0)
    good = next_token_labels(ids)
    said = [refused(lambda: pipe.step(ids if pipe.is_first else None, ids if pipe.is_last else None))]
    said.append(refused(lambda: pipe.step(ids if pipe.is_first else None, good if pipe.is_last else None)))
    return said


def test_unshifted_labels_on_another_rank_are_noticed(ranks: Callable[[int], Ranks]) -> None:
    for wrong, right in ranks(2)(from_its_end, make_batch(TINY, 2, 29, ignored=False)[0]):
        assert "got the input_ids themselves" in wrong
        assert right == ""


def misused() -> list[tuple[str, bool]]:
    """What each misuse says on this rank, and whether gradients were left alone; then a good step."""
    pipe = Pipeline(make_model(TINY), PLAN, vary="replan", timeout=300.0)
    ids, labels = make_batch(TINY, 2, 29, ignored=True)
    pipe.step(ids, labels)
    before = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    mine = pipe.rank == 1
    high, low = ids.clone(), labels.clone()
    high[1, 3], low[0, 2] = 19, -7
    other = Plan((2,), ((20, 9),), PLAN.boundaries)
    said = []
    for misuse in (
        lambda: pipe.step(high, labels),
        lambda: pipe.step(ids, low),
        lambda: pipe.evaluate(ids.to(torch.int32), labels),
        lambda: pipe.step(ids, labels, ((0, 5), (0,)) if mine else None),
        lambda: pipe.step(ids, labels, plan=other if mine else None),
        lambda: pipe.step(ids[:1], labels[:1]) if mine else pipe.step(ids, labels),
        lambda: pipe.evaluate(ids, labels) if mine else pipe.step(ids, labels),
        lambda: pipe.step(ids, labels, 5 if mine else None),  # type: ignore[arg-type]
        lambda: pipe.step(ids, torch.full_like(labels, -100)),
        lambda: pipe.next_token_logits(ids if mine else ids[:1]),
        lambda: pipe.next_token_logits(high),
        *(lambda total=total: pipe.step(ids, labels, total=total) for total in (0, -1, float("nan"), float("inf"))),
    ):
        text = refused(misuse)
        alone = all(torch.equal(p.grad, before[name]) for name, p in pipe.named_parameters() if p.grad is not None)
        said.append((text, alone))
    pipe.zero_grad()
    pipe.step(ids, labels)
    said.append(("", all(torch.equal(p.grad, before[name]) for name, p in pipe.named_parameters())))
    return said


def test_a_refused_batch_leaves_everything_as_it_was(ranks: Callable[[int], Ranks]) -> None:
    """One rank's refusal used to end the pipeline, with the earlier gradients gone; and documents, plans or shapes that
    differ between ranks gave wrong losses or crashed a process."""
    words = [
        "input_ids must be tokens of the model's vocabulary, 0 to 18, got 19 at row 1, place 3",
        "labels must be tokens of the model's vocabulary, 0 to 18, or -100 to leave a place out, got -7 at row 0",
        "torch.int64",
        *["must call the same method with the same plan, documents and shape of batch: rank 0 has"] * 4,
        "documents must be, for each of the 2 sequences, the rising places",
        "at least one label of a batch must count",
        "must call the same method",
        "input_ids must be tokens of the model's vocabulary",
        *["total must be a positive finite number"] * 4,
        "",
    ]
    for account in ranks(2)(misused):
        assert len(account) == len(words)
        for (text, alone), expected in zip(account, words, strict=True):
            assert expected in text
            assert bool(text) == bool(expected)
            assert alone, f"gradients changed: {text}"
