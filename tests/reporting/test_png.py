"""PNG pictures: rendered with nothing from the system, neither fonts nor libraries."""

import struct
import sys
from pathlib import Path

import pytest

from terapipe.reporting import svg
from terapipe.reporting.png import write_png
from tests.reporting.test_drawings import TIMELINE


def size(path: Path) -> tuple[int, ...]:
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    return struct.unpack(">II", header[16:24])


def test_a_picture_is_rendered_to_scale(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    pytest.importorskip("font_roboto")
    picture = svg.timelines({"x": TIMELINE})
    for scale in (1.0, 2.0):
        write_png(tmp_path / "new" / "x.png", picture, scale)
        assert size(tmp_path / "new" / "x.png")[0] == 960 * scale


def test_text_is_drawn(tmp_path: Path) -> None:
    """The same picture without its words is another."""
    pytest.importorskip("resvg_py")
    pytest.importorskip("font_roboto")
    write_png(tmp_path / "a.png", svg.lines({"name": [1.0, 2.0]}, "label"))
    write_png(tmp_path / "b.png", svg.lines({"    ": [1.0, 2.0]}, "     "))
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("missing", ["resvg_py", "font_roboto"])
def test_a_missing_extra_is_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"pip install 'terapipe\[png\]'"):
        write_png(tmp_path / "x.png", svg.timelines({"x": TIMELINE}))
