"""Documents are found and read alike, whatever holds them."""

import gzip
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe.training.data.text_reader import PART, find_files, read_documents, split_text

TEXTS = ["first\r\nline", None, "zweites Stück", "", "第三", "long " * PART]


def documents(paths: Iterable[Path], field: str) -> list[str]:
    """Every document as one text."""
    texts = [""]
    for part in read_documents(paths, field):
        texts[-1] += part.text
        texts += [""] * part.is_last
    return texts[:-1]


def jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps({"id": 0, "text": text}) + "\n\n" for text in TEXTS))
    return path


def zipped(path: Path) -> Path:
    path.write_bytes(gzip.compress(jsonl(path.with_name("plain")).read_bytes()))
    return path


def parquet(path: Path) -> Path:
    pq.write_table(pa.table({"text": TEXTS, "id": range(len(TEXTS))}), path, row_group_size=4)
    return path


def dataset(folder: Path) -> Path:
    rows = Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})
    rows.save_to_disk(str(folder), num_shards=2)
    return folder


def selection(folder: Path) -> Path:
    """Saved as row numbers of a larger table, and in a format that is not plain Python."""
    rows = Dataset.from_dict({"text": ["not this", *reversed(TEXTS)]}).select(range(len(TEXTS), 0, -1))
    rows.with_format("numpy").save_to_disk(str(folder))
    return folder


@pytest.mark.parametrize(
    ("write", "name"),
    [(jsonl, "a.jsonl"), (zipped, "a.jsonl.gz"), (parquet, "a.parquet"), (dataset, "saved"), (selection, "selected")],
)
def test_every_kind_holds_the_same_documents(
    tmp_path: Path, write: Callable[[Path], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / name)
    monkeypatch.setattr("socket.socket.connect", None)  # a network call would fail
    before = sorted(tmp_path.rglob("*"))
    assert documents([path], "text") == [text for text in TEXTS if text]
    assert max(len(part.text) for part in read_documents([path], "text")) <= PART
    assert sorted(tmp_path.rglob("*")) == before, "nothing is cached beside the data"


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    long = "A line, ä.\r\n" * (PART // 4)
    paths = [tmp_path / name for name in ("a.txt", "b.MD", "c.txt.gz", "empty.txt")]
    for path in paths[:2]:
        path.write_bytes(b"\xef\xbb\xbf" + long.encode())  # with the mark that some editors set
    paths[2].write_bytes(gzip.compress(long.encode()))
    paths[3].touch()
    assert documents(paths, "text") == [long] * 3
    assert [p.is_last for p in read_documents(paths[:1], "")] == [False, False, False, True]


@settings(deadline=None)
@given(st.text(alphabet="ab \n", max_size=60), st.integers(2, 9))
def test_a_cut_text_is_whole(text: str, longest: int) -> None:
    parts = list(split_text(text, longest))
    assert "".join(parts) == text
    assert all(0 < len(part) <= longest for part in parts) or not text


@pytest.mark.parametrize(
    ("parts", "longest"),
    [(["one two", " three"], 8), (["by one", "  two"], 10), (["one\n", "two"], 6), (["onetwo", "three"], 6)],
)
def test_the_best_place_to_cut(parts: list[str], longest: int) -> None:
    assert list(split_text("".join(parts), longest)) == parts


def test_files_are_found_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "x[1].txt", "deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    dataset(tmp_path / "deep" / "saved")
    assert find_files(["b.txt", "*.txt", "./b.txt", str(tmp_path / "a.txt")]) == [
        Path(n) for n in ("a.txt", "b.txt", "x[1].txt")
    ]
    assert find_files(["x[1].txt", "deep/*"]) == [Path("deep/c.txt"), Path("deep/saved"), Path("x[1].txt")]
    assert find_files(["*"]) == [Path(n) for n in ("a.txt", "b.txt", "x[1].txt")]  # without the folder
    assert find_files(["**/*.txt"])[-2:] == [Path("deep/c.txt"), Path("x[1].txt")]
    with pytest.raises(ValueError, match=rf"'none\*.txt' matches none, seen from {tmp_path}"):
        find_files(["a.txt", "none*.txt"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x", r"end in \.txt, .*\.parquet.*got .*a\.csv"),
        ("a.txt", b"caf\xe9", r"must be UTF-8, .*a\.txt is not"),
        ("a.txt.gz", b"plain", r"a\.txt\.gz is damaged"),
        ("a.txt.gz", gzip.compress(b"x" * 99, mtime=0)[:-9], r"a\.txt\.gz is damaged"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl, line 2: every line must be JSON"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"body": "", "id": 1}',
            r"line 2: .*field 'text', .* has fields 'body', 'id'; set",
        ),
        ("a.jsonl", b"[1]", "line 1: .* has no fields"),
        ("a.jsonl", b'{"text": 7}', "line 1: 'text' must hold text, got 7"),
        ("a.parquet", b"x", r"a\.parquet is damaged"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        documents([tmp_path / name], "text")


def test_what_cannot_be_read_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = dataset(tmp_path / "plain")
    rows = Dataset.load_from_disk(str(plain))
    several = tmp_path / "several"
    DatasetDict({"train": rows, "test": rows}).save_to_disk(str(several))
    (tmp_path / "files").mkdir()
    for path, message in [
        (several, rf"several datasets; name one: {several}/train, {several}/test"),
        (tmp_path / "files", r"no state\.json; .* pattern: .*files/\*\.txt"),
        (parquet(tmp_path / "a.parquet"), "no column 'body', it has 'text', 'id'; set data.field"),
        (plain, "no column 'body', it has 'id', 'text'"),
    ]:
        with pytest.raises(ValueError, match=message):
            documents([path], "body")
    with pytest.raises(ValueError, match=r"plain: 'id' must hold text, got 0; set data\.field"):
        documents([plain], "id")
    (plain / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(ValueError, match=r"plain is damaged or incomplete: .*00000-of-00002[.]arrow.*; save"):
        documents([plain], "text")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path, library in ((tmp_path / "a.parquet", "pyarrow"), (plain, "datasets")):
        with pytest.raises(ValueError, match=rf"{path} needs {library}, .* pip install '\.\[data\]'"):
            documents([path], "text")


def test_half_characters_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"text": "a\ud800b \ud83d\ude00"}')
    assert documents([path], "text") == ["a\ufffdb 😀"]


def test_a_saved_dataset_names_its_own_files_only(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["a secret"]}).save_to_disk(str(tmp_path / "other"))
    Dataset.from_dict({"text": ["text"]}).save_to_disk(str(tmp_path / "saved"))
    state = json.loads((tmp_path / "saved/state.json").read_text())
    state["_data_files"] = [{"filename": "../other/data-00000-of-00001.arrow"}]
    (tmp_path / "saved/state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="must lie in it"):
        list(read_documents([tmp_path / "saved"], "text"))


def test_a_pipe_is_no_text(tmp_path: Path) -> None:
    """It was read, which waits for whoever writes to it."""
    os.mkfifo(tmp_path / "text.txt")
    with pytest.raises(ValueError, match="must be a file, got a named pipe"):
        find_files([str(tmp_path / "text.txt")])


def test_the_place_of_a_bad_byte_is_that_in_the_file(tmp_path: Path) -> None:
    """It was the place in the part of the file that was just decoded, or in a line."""
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_bytes("é".encode() * 200_001 + b"\xff" + b"a" * 9)
    with pytest.raises(ValueError, match=r"a\.txt is not: byte 0xff at place 400002 \(invalid start byte\)"):
        list(read_documents([text], "text"))
    lines.write_bytes(b'{"text": "a"}\n' * 3 + b'{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl is not: byte 0xe9 at place 55 "):
        list(read_documents([lines], "text"))
