"""What the TeraPipe paper leaves open."""

import pytest

from terapipe.published.studies import CASES, Setting, orders, outcome


def test_the_settings_are_those_of_the_published_table() -> None:
    settings = Setting.all()
    assert [setting.name.split()[0] for setting in settings] == [f"({n})" for n in range(1, 11)]
    assert {setting.seq_len for setting in settings} == {2048}
    assert not settings[0].source.ends


@pytest.mark.exhaustive
def test_the_open_question_in_one_setting() -> None:
    """Few sequences on many stages: 1F1B saves no time, and with fewer sequences than stages no memory either; slices
    save time."""
    by_name = {choice.name: choice for choice in orders(Setting.all()[7])}
    assert by_name["1f1b"].peak_bytes <= by_name["gpipe"].peak_bytes
    assert by_name["1f1b"].step_time > 0.95 * by_name["gpipe"].step_time
    assert by_name["terapipe-1f1b"].step_time < 0.6 * by_name["1f1b"].step_time


@pytest.mark.exhaustive
def test_what_if_cases_have_an_outcome() -> None:
    result = outcome(CASES[0])
    assert result.best_1f1b is not None
    assert result.whole is not None
    assert result.planned.step_time <= result.whole.step_time * 1.006  # but for preferring whole sequences
    assert result.whole.step_time <= result.best_1f1b.step_time
    assert result.planned.fits
    assert result.rival is not None
