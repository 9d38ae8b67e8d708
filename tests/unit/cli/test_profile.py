"""``terapipe profile`` says when its figures are not to be trusted."""

from dataclasses import replace

import pytest

from terapipe.cli.profile import _warn_if_unreliable
from tests.unit.planning.test_profile import made


def test_a_profile_that_is_far_off_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    """An error of 40 % on held-out points was printed like any other figure."""
    good = made()
    good = replace(good, machine={**good.machine, "points": 1})
    noisy = [s._replace(seconds=tuple(1.4 * t for t in s.seconds)) if s.held_out else s for s in good.samples]
    _warn_if_unreliable(good)
    assert capsys.readouterr().out == ""
    _warn_if_unreliable(replace(good, samples=tuple(noisy)))
    assert "Measure again on a quiet machine" in capsys.readouterr().out
