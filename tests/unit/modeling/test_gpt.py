from itertools import pairwise

import pytest
import torch

from terapipe import GPT, PRESETS, GPTConfig, next_token_labels
from terapipe.modeling.stage import IGNORE, PipelineModel, Stage
from tests.support.models import TINY, variant

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4), (0, 1, 2, 3, 4)])
def test_the_same_seed_gives_the_same_model_for_any_split(cuts: tuple[int, ...], tied: bool) -> None:
    config = variant(tied=tied)
    whole = dict(GPT(config, seed=5).named_parameters())
    with torch.device("meta"):
        described = GPT(config, seed=5)
    seen = set()
    for a, b in pairwise(cuts):
        for name, parameter in described.stage(a, b, CPU).named_parameters():
            name = "embedding.weight" if tied and name == "head.weight" else name
            assert torch.equal(parameter, whole[name])
            seen.add(name)
    assert seen == set(whole)
    assert all(p.is_meta for p in described.parameters())


def test_another_seed_gives_another_model() -> None:
    a, b = GPT(TINY, seed=1), GPT(TINY, seed=2)
    assert not torch.equal(a.embedding.weight, b.embedding.weight)
    assert not torch.equal(a.layers["0"].up.weight, a.layers["1"].up.weight)


def test_a_tied_model_on_one_stage_stays_tied() -> None:
    with torch.device("meta"):
        described = GPT(TINY)
    stage = described.stage(0, 4, CPU)
    assert stage.head.weight is stage.embedding.weight


def test_it_is_what_the_runtime_asks_for() -> None:
    assert isinstance(GPT(TINY), PipelineModel)
    assert isinstance(GPT(TINY), Stage)
    assert isinstance(GPT(TINY).stage(0, 2, CPU), Stage)


@pytest.mark.parametrize(
    ("preset", "billions"), [("gpt3-1b", 1.3), ("gpt3-13b", 12.9), ("gpt3-44b", 43.8), ("gpt3-175b", 174.6)]
)
def test_the_presets_have_the_sizes_of_the_paper(preset: str, billions: float) -> None:
    config = PRESETS[preset]
    assert config.parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("change", [{}, {"tied": False}, {"kv_heads": 2, "ffn": 24}])
def test_parameters_are_counted_right(change: dict[str, int]) -> None:
    config = variant(**change)
    assert sum(p.numel() for p in GPT(config).parameters()) == config.parameters


def test_the_largest_preset_can_be_described() -> None:
    with torch.device("meta"):
        model = GPT.from_preset("gpt3-175b")
    assert model.num_layers == 96


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"heads": 3}, "multiple of heads"), ({"kv_heads": 3}, "multiple of kv_heads"), ({"layers": 0}, "layers must be")],
)
def test_a_bad_shape_says_what_is_wrong(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{"layers": 2, "hidden": 16, "heads": 4, **wrong})


def test_what_a_stage_cannot_do_is_said() -> None:
    model = GPT(TINY)
    with pytest.raises(ValueError, match=r"some of the 4 layers, or one of the model.s ends alone, got 2 to 5"):
        model.stage(2, 5, CPU)
    with pytest.raises(ValueError, match="positions for 64 tokens, got sequences of 65"):
        model.make_cache(1, 65)
    with pytest.raises(ValueError, match="only the last stage has a head"):
        model.stage(0, 2, CPU).loss(torch.zeros(1, 1, 16), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="unknown preset 'gpt4'; the presets are gpt-tiny"):
        GPT.from_preset("gpt4")


def test_next_token_labels() -> None:
    assert next_token_labels(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, IGNORE]]
