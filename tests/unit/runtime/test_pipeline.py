"""What a user calls: step, evaluate, norms, accumulation, and what is said when something does not fit."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from terapipe import GPT, Op, Pipeline, Plan, Timeline
from terapipe.modeling.stage import IGNORE
from terapipe.runtime.comm.environment import local_device
from tests.support.models import TINY, gradients, make_batch, make_model, piped, plain, variant, worst_error
from tests.support.ranks import Ranks

PLAN = Plan((1, 1), ((9, 1, 12, 7), (15, 14)), (0, 1, 4), "terapipe")
FOLDED = replace(PLAN, boundaries=(0, 1, 2, 3, 4), order="terapipe-v", chunks=2)  # both ends on the first rank


def batch(ignored: bool = True, seed: int = 0) -> tuple[Tensor, Tensor]:
    return make_batch(TINY, PLAN.batch_size, PLAN.seq_len, ignored, seed)


def everything(plan: Plan) -> dict[str, object]:
    """One rank's account of a few steps."""
    pipe = Pipeline(make_model(TINY), plan, timeout=300.0)
    ids, labels = batch()
    evaluated = pipe.evaluate(ids, labels).item()
    untouched = all(p.grad is None for p in pipe.parameters())
    loss = pipe.step(ids, labels).item()
    norms = {kind: pipe.grad_norm(kind).item() for kind in (1.0, 2.0, float("inf"))}
    timeline = pipe.timeline()
    again = pipe.step(*batch(seed=1)).item()
    accumulated = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    before = pipe.clip_grad_norm_(0.01).item()
    after = pipe.grad_norm().item()
    pipe.zero_grad()
    return {
        "evaluated": evaluated, "untouched": untouched, "loss": loss, "norms": norms, "timeline": timeline,
        "again": again, "accumulated": accumulated, "before": before, "after": after,
        "zeroed": all(p.grad is None for p in pipe.parameters()), "names": list(pipe.state_dict()),
    }  # fmt: skip


@pytest.fixture(scope="module", params=[PLAN, FOLDED], ids=["looped", "folded"])
def accounts(ranks: Callable[[int], Ranks], request: pytest.FixtureRequest) -> list[Mapping[str, object]]:
    return ranks(2)(everything, request.param)


def truth(seed: int = 0) -> tuple[float, dict[str, Tensor]]:
    return plain(TINY, *batch(seed=seed), torch.float64)


def test_every_rank_gets_the_loss(accounts: list[dict[str, float]]) -> None:
    assert accounts[0]["loss"] == accounts[1]["loss"] == pytest.approx(truth()[0], rel=1e-12)


def test_evaluation_is_the_same_loss_without_gradients(accounts: list[dict[str, float]]) -> None:
    for account in accounts:
        assert account["evaluated"] == pytest.approx(account["loss"], rel=1e-12)
        assert account["untouched"]


def test_norms_are_those_of_the_whole_model(accounts: list[dict[str, dict[float, float]]]) -> None:
    gradients = list(truth()[1].values())
    for account in accounts:
        for kind, norm in account["norms"].items():
            assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients, kind).item(), rel=1e-12)


def test_gradients_accumulate_over_steps_tied_ones_too(accounts: list[dict[str, dict[str, Tensor]]]) -> None:
    first, second = truth()[1], truth(seed=1)[1]
    wanted = {name: first[name] + second[name] for name in first}
    assert worst_error((1.0, wanted), [(1.0, a["accumulated"]) for a in accounts], TINY) < 1e-12


def test_clipping(accounts: list[dict[str, float]]) -> None:
    for account in accounts:
        assert account["before"] > 0.01
        assert account["after"] == pytest.approx(0.01, rel=1e-3)
        assert account["zeroed"]


def test_parameters_keep_the_names_of_the_whole_model(accounts: list[dict[str, list[str]]]) -> None:
    names = {name for account in accounts for name in account["names"]}
    assert names == set(GPT(TINY).state_dict())


def test_the_timeline_holds_every_computation_in_order(accounts: list[dict[str, Timeline]]) -> None:
    timeline = accounts[0]["timeline"]
    assert timeline == accounts[1]["timeline"]
    plan = timeline.plan
    found = sorted((e.rank, e.action.to_text()) for e in timeline.computations)
    ops = "FIW" if plan.chunks == 2 else "FB"
    stages = range(plan.num_stages)
    assert found == sorted((plan.rank_of(k), f"{op} {k} {s}") for k in stages for s in plan.slices for op in ops)
    ends = {e.action: e.end for e in timeline.computations}
    for e in timeline.computations:
        if e.action.op is Op.F and e.action.stage:
            assert ends[e.action._replace(stage=e.action.stage - 1)] <= e.start
    assert 0.0 < timeline.idle < 1.0


def test_one_process_needs_no_process_group() -> None:
    plan = Plan((1, 1), PLAN.lengths, (0, 4), "terapipe-1f1b")
    found = piped(TINY, plan, *batch(), torch.float64)
    assert worst_error(truth(), [found], TINY) < 1e-12


def described(plan: Plan) -> tuple[float, float, dict[str, Tensor]]:
    with torch.device("meta"):
        model = GPT(TINY, seed=3)
    pipe = Pipeline(model, plan, timeout=300.0)
    loss, norm = pipe.step(*batch()).item(), pipe.grad_norm().item()
    return loss, norm, gradients(pipe)


@pytest.mark.parametrize("plan", [replace(PLAN, chunks=2), FOLDED], ids=["one rank", "folded over two"])
def test_a_described_model_is_made_real_stage_by_stage(ranks: Callable[[int], Ranks], plan: Plan) -> None:
    """The first and the last stage on one rank, each with its own copy of the tied weight."""
    found = [described(plan)] if plan.num_ranks == 1 else ranks(2)(described, plan)
    model = GPT(TINY, seed=3)
    ids, labels = batch()
    expected = model.loss(model(ids), labels) / (labels != IGNORE).sum()
    expected.backward()
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for loss, norm, _ in found:
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert norm == pytest.approx(total, rel=1e-5)
    grads = found[0][2]
    assert torch.equal(grads["embedding.weight"], grads["head.weight"])
    torch.testing.assert_close(grads["head.weight"], model.embedding.weight.grad)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan((1,), ((8,),), (0, 3)), "splits 3 layers, the model has 4"),
        (Plan((1,), ((8,),), (0, 1, 4)), r"for 2 ranks \(2 stages, 1 per rank\), got 1 processes; start 2"),
        (Plan((1,), ((65,),), (0, 4)), "positions for 64 tokens"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline(GPT(TINY), plan).step(*make_batch(TINY, plan.batch_size, plan.seq_len, ignored=False))


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        (None, torch.zeros(1, 8, dtype=torch.int64), r"input_ids on rank 0 must be \(1, 8\) of torch.int64.*got None"),
        (torch.zeros(1, 9, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64), r"input_ids .* got \(1, 9\)"),
        (torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.int64), "got .* of torch.float32"),
        (torch.zeros(1, 8, dtype=torch.int64), None, r"labels on rank 0 must be"),
        (torch.zeros(1, 8, dtype=torch.int64), torch.full((1, 8), IGNORE), "at least one label of a batch must count"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(ids: Tensor | None, labels: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline(GPT(TINY), Plan((1,), ((8,),), (0, 4))).step(ids, labels)


def other_plans(lengths: list[tuple[int, ...]]) -> str:
    import torch.distributed as dist

    try:
        Pipeline(make_model(TINY), Plan((1,), (lengths[dist.get_rank()],), (0, 2, 4)), timeout=300.0)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_ranks_must_agree_on_the_plan(ranks: Callable[[int], Ranks]) -> None:
    answers = ranks(2)(other_plans, [(4, 4), (5, 3)])
    words = "all ranks must have the same model, plan and options, rank 1 differs from rank 0 in plan.lengths "
    assert answers == [f"{words}([[5, 3]] instead of [[4, 4]])"] * 2


def on_mesh() -> tuple[float, dict[str, Tensor]]:
    """Two pipelines of two ranks side by side."""
    mesh = init_device_mesh(local_device().type, (2, 2), mesh_dim_names=("group", "stage"))
    with pytest.raises(ValueError, match=r"are dp, pp and tp, got \('group', 'stage'\)"):
        Pipeline(make_model(TINY), PLAN, mesh=mesh)
    pipe = Pipeline(make_model(TINY), PLAN, mesh=mesh["stage"], timeout=300.0)
    loss = pipe.step(*batch(seed=mesh["group"].get_local_rank()))
    return loss.item(), gradients(pipe)


def test_a_pipeline_may_be_one_dimension_of_a_mesh(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(4)(on_mesh)
    assert worst_error(truth(seed=0), found[:2], TINY) < 1e-12
    assert worst_error(truth(seed=1), found[2:], TINY) < 1e-12


def test_the_logits_of_no_two_slices_exist_together() -> None:
    config = variant(vocab=997)
    alive: Counter[int] = Counter()
    most = 0

    class Held:
        def __init__(self, x: Tensor) -> None:
            nonlocal most
            self.x = x
            if x.shape == (8, config.vocab):
                alive[x.data_ptr()] += len(x)
                most = max(most, sum(alive.values()))

        def __del__(self) -> None:
            if self.x.data_ptr() in alive:
                del alive[self.x.data_ptr()]

    pipe = Pipeline(GPT(config), Plan((1,), ((8, 8, 8, 8),), (0, 4)))
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.x):
        pipe.step(*make_batch(config, 1, 32, ignored=False))
    assert 0 < most <= 2 * 8, "one slice's logits and their softmax, not four slices'"


def trained(plan: Plan, steps: int) -> tuple[list[float], float]:
    """Losses of a few optimizer steps, and how far the two copies of the tied weight drift apart."""
    pipe = Pipeline(make_model(variant()), plan, timeout=300.0)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        losses.append(pipe.step(*batch(seed=step)).item())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    tied = [p.detach() for name, p in pipe.named_parameters() if name in ("embedding.weight", "head.weight")]
    total = sum((p.double().sum().item() for p in tied), 0.0)
    return losses, total


def test_training_follows_the_plain_model(ranks: Callable[[int], Ranks]) -> None:
    model = make_model(variant())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = []
    for step in range(5):
        ids, labels = batch(seed=step)
        loss = model.loss(model(ids), labels) / (labels != IGNORE).sum()
        loss.backward()
        wanted.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    (losses, first), (others, last) = ranks(2)(trained, PLAN, 5)
    assert losses == others
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert first == last


def test_a_transport_says_where_a_pipeline_computes() -> None:
    """A device, mesh or timeout given beside it was ignored."""
    plan = Plan((1,), ((8,),), (0, TINY.layers))
    transport = Pipeline(make_model(TINY), plan).transport
    with pytest.raises(ValueError, match="a transport has its mesh, device and timeout"):
        Pipeline(make_model(TINY), plan, transport=transport, device="cpu")
    with pytest.raises(ValueError, match="got timeout= beside transport="):
        Pipeline(make_model(TINY), plan, transport=transport, timeout=5.0)
    Pipeline(make_model(TINY), plan, transport=transport)
