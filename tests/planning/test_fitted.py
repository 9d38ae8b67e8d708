"""Costs fitted to measurements: a known truth is found again, noise and all."""

from dataclasses import replace

import numpy as np
import pytest

from terapipe.planning.cost import Part
from terapipe.planning.fitted import FittedCost
from terapipe.planning.profile import Profile, Sample, Transfer, typical
from terapipe.presets import PRESETS


def truth(size: int, length: int, context: int, scale: float = 1.0) -> float:
    scores = length * (context + length / 2)
    return scale * (1e-3 + 2e-4 * (context > 0) + size * (4e-6 * length + 2e-9 * scores + 1e-7 * context))


def made(noise: float = 0.0, sizes: tuple[int, ...] = (1, 2, 4)) -> Profile:
    random = np.random.default_rng(0)

    def taken(seconds: float) -> tuple[float, ...]:
        return tuple(seconds * (1 + noise * random.standard_normal(9)))

    samples = []
    for kind, scale in (("forward", 1.0), ("backward", 2.0)):
        for size in sizes:
            for length in (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048):
                samples.append(Sample(kind, size, length, 0, taken(truth(size, length, 0, scale))))
            for length in (64, 128, 512):
                for context in (256, 1024, 1536):
                    samples.append(Sample(kind, size, length, context, taken(truth(size, length, context, scale))))
        samples.append(Sample(kind, 1, 300, 900, taken(truth(1, 300, 900, scale)), True))
    samples.append(Sample("head", 1, 64, 0, (64e-6,)))
    samples.append(Sample("head", 1, 1024, 0, (1024e-6,)))
    samples.append(Sample("weights", 1, 64, 0, (64e-6,)))
    transfers = (Transfer(1 << 12, (1e-4,)), Transfer(1 << 20, (1e-3,)))
    return Profile(PRESETS["gpt-small"], 3, 2048, 2, tuple(samples), transfers, (1e-9,), {"memory": 2**33}, {})


@pytest.mark.parametrize(("noise", "allowed"), [(0.0, 0.01), (0.02, 0.04)])
def test_a_known_truth_is_found_again(noise: float, allowed: float) -> None:
    cost = FittedCost(made(noise))
    for size, length, context in ((1, 48, 0), (1, 200, 700), (3, 640, 300), (2, 1200, 800), (4, 100, 1900)):
        wanted = truth(size, length, context)
        assert cost.forward(Part(3), size, length, context) == pytest.approx(wanted, rel=allowed)
        assert cost.backward(Part(3), size, length, context) == pytest.approx(2 * wanted, rel=allowed)
    assert max(map(abs, cost.errors())) < allowed


def test_the_context_adds_nothing_where_there_is_none() -> None:
    cost = FittedCost(made(0.05))
    without = cost.forward(Part(3), 1, np.array([64.0, 512.0]), 0)
    measured = {s.length: s for s in cost.profile.samples if s.kind == "forward" and s.size == 1 and not s.context}
    assert without == pytest.approx([typical(measured[n].seconds) for n in (64, 512)])
    assert cost.forward(Part(3), 1, 64, 8) >= without[0]


def test_parts_scale_and_ends_are_added() -> None:
    cost = FittedCost(made())
    layer = cost.forward(Part(1), 1, 256, 0)
    assert cost.forward(Part(6), 1, 256, 0) == pytest.approx(6 * layer)
    assert cost.forward(Part(1, last=True), 1, 256, 0) == pytest.approx(layer + 256e-6)
    assert cost.weights(Part(3), 1, 64) == pytest.approx(64e-6)
    again = FittedCost(made(), recompute=True)
    assert again.backward(Part(1), 1, 256, 9) == cost.backward(Part(1), 1, 256, 9) + cost.forward(Part(1), 1, 256, 9)


def test_transfers_are_interpolated_and_the_optimizer_counted() -> None:
    cost = FittedCost(made())
    assert cost.transfer(0, 1, 1, 4) == pytest.approx(1e-4)  # 4 tokens of 256 floats
    assert cost.transfer(0, 1, 2, 512) == pytest.approx(1e-3)
    assert cost.once([Part(3)]) == pytest.approx(3 * PRESETS["gpt-small"].layer_parameters * 1e-9)
    assert FittedCost(made(), replicas=2).once([Part(3)]) > cost.once([Part(3)])


def test_one_interruption_spoils_nothing() -> None:
    assert typical([99.0] + [1.0] * 7) == 1.0
    assert typical([1.0, 2.0, 3.0, 4.0]) == 1.5
    assert typical([5.0]) == 5.0


def test_a_profile_survives_its_file() -> None:
    profile = made(0.01)
    assert Profile.from_json(profile.to_json()) == profile


def test_bad_profiles_are_refused() -> None:
    text = made().to_json()
    for damaged, said in (
        (text[: len(text) // 2], "cut off"),
        ("[]", "format 1"),
        ('{"format": 1}', "lacks or misnames"),
        (text.replace('"forward"', '"upward"', 1), "a sample's kind"),
        (text.replace('"optimizer": [', '"optimizer": [-1, ', 1), "at least 0"),
        (text.replace('"optimizer": [', '"optimizer": [NaN, ', 1), "finite"),
    ):
        with pytest.raises(ValueError, match=said):
            Profile.from_json(damaged)


def test_another_models_profile_is_refused() -> None:
    profile = made()
    profile.check_model(replace(PRESETS["gpt-small"], max_tokens=99))
    with pytest.raises(ValueError, match="another model: layers 6 and 4, hidden 256 and 64"):
        profile.check_model(PRESETS["gpt-tiny"])


def test_a_fit_needs_something_to_start_from() -> None:
    empty = replace(made(), samples=())
    with pytest.raises(ValueError, match="no forward without context"):
        FittedCost(empty)
