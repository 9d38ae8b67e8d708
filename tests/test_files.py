"""A crash at any moment leaves the old folder or the new one."""

from pathlib import Path

import pytest

from terapipe import files as folders
from terapipe.files import beside, put_in_place


def make(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "what").write_text(text)
    return folder


def test_the_new_replaces_the_old(tmp_path: Path) -> None:
    folder = make(tmp_path / "saved", "old")
    put_in_place(folder, make(beside(folder, "partial"), "new"))
    assert (folder / "what").read_text() == "new"
    assert [f.name for f in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("moment", range(1, 4))
def test_a_crash_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Stopped before any of its renames and deletions, the next attempt finds the old or the new one whole."""
    folder = make(tmp_path / "saved", "old")
    partial = make(beside(folder, "partial"), "new")
    calls = 0

    def crash(plain: object) -> object:
        def stand_in(*arguments: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls == moment:
                raise KeyboardInterrupt
            return plain(*arguments, **named)  # type: ignore[operator]

        return stand_in

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", crash(Path.rename))
        patched.setattr(folders.shutil, "rmtree", crash(folders.shutil.rmtree))
        with pytest.raises(KeyboardInterrupt):
            put_in_place(folder, partial)
    folders.recover(folder)
    assert (folder / "what").read_text() in ("old", "new")


def test_two_processes_may_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a script wrote a report beside under one name: the second to rename it found nothing there."""
    path, plain = tmp_path / "report.html", Path.replace

    def replace(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", plain)
        folders.write(path, "second")  # between the first one's write and its rename
        return plain(part, target)

    monkeypatch.setattr(Path, "replace", replace)
    folders.write(path, "first")
    assert path.read_text() == "first"
    assert [f.name for f in tmp_path.iterdir()] == ["report.html"]


def test_what_cannot_be_written_leaves_nothing_beside(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match="report"):
        folders.write(tmp_path / "report.html", "text")
    assert [f.name for f in tmp_path.iterdir()] == ["report.html"]
