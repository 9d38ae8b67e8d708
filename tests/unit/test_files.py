"""A crash at any moment leaves the old folder or the new one."""

import os
import resource
from pathlib import Path

import pytest

from terapipe import files as folders
from terapipe.files import replace_folder, sibling


def make(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "what").write_text(text)
    return folder


def test_the_new_replaces_the_old(tmp_path: Path) -> None:
    folder = make(tmp_path / "saved", "old")
    replace_folder(folder, make(sibling(folder, "partial"), "new"))
    assert (folder / "what").read_text() == "new"
    assert [f.name for f in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("moment", range(1, 4))
def test_a_crash_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Stopped before any of its renames and deletions, the next attempt finds the old or the new one whole."""
    folder = make(tmp_path / "saved", "old")
    partial = make(sibling(folder, "partial"), "new")
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
            replace_folder(folder, partial)
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


def test_a_pipe_or_a_device_is_no_file(tmp_path: Path) -> None:
    """Reading the one waits for ever, the other has no end; a file renamed to a device's name takes its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, kind in ((pipe, "a named pipe"), (Path("/dev/zero"), "a device")):
        for use in (folders.read, lambda path: folders.write(path, "text")):
            with pytest.raises(ValueError, match=f"{path} must be a file, got {kind}; name a file"):
                use(path)
    with pytest.raises(ValueError, match=f"{pipe} must be a file"):
        folders.check_kinds(tmp_path)


@pytest.mark.parametrize(
    "name", ["../other", "/etc/hostname", "a/../../b", "C:\\x", "\\\\host\\x", "", "a\0b", None, 3]
)
def test_an_index_names_files_of_its_own_folder(name: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must lie in it"):
        folders.inside(tmp_path, name)
    assert folders.inside(tmp_path, "a/b.json") == tmp_path / "a/b.json"


def test_a_link_may_lead_elsewhere_only_where_that_is_usual(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "blob").touch()
    (tmp_path / "folder/link").symlink_to(tmp_path / "blob")
    assert folders.inside(tmp_path / "folder", "link").is_file()  # as in the cache of the Hugging Face Hub
    with pytest.raises(ValueError, match="must lie in it"):
        folders.inside(tmp_path / "folder", "link", links=False)


def test_json_that_is_nested_without_end_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"deep\.json must be JSON, got lists or objects inside each other"):
        folders.read_json(path)


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    """The error of a write does not know it; what was there stays, and no part of the new one is left."""
    path = tmp_path / "plan.json"
    folders.write(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match=r"plan\.json") as caught:
            folders.write(path, "new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
