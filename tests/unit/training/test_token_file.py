"""Token files hold what a plain encoding gives, are written whole or not at all, and written anew when they must be."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from terapipe.training.config import DataConfig
from terapipe.training.data import prepare as preparing
from terapipe.training.data import token_file
from terapipe.training.data.prepare import prepare
from terapipe.training.data.text_reader import PART
from terapipe.training.data.token_file import TokenFile, open_data
from terapipe.training.data.tokenizer import ByteTokenizer, FastTokenizer, make_tokenizer

TEXTS = ["one two", "", "drei", "四" * 10, "a longer one, of many words"]


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(train=(write(tmp_path / "source.jsonl", TEXTS),), seq_len=4)


def built(config: DataConfig, folder: Path) -> tuple[list[int], list[int]]:
    """Tokens and starts of the training data."""
    prepare(config, folder)
    file = open_data(config, folder).train
    assert (len(file.tokens), len(file.starts)) == (file.num_tokens, file.num_documents)
    return file.tokens.tolist(), file.starts.tolist()


def plainly(texts: list[str]) -> tuple[list[int], list[int]]:
    found: list[int] = []
    starts = []
    for text in filter(None, texts):
        starts.append(len(found))
        found += [*text.encode(), 256]
    return found, starts


@pytest.mark.parametrize("batch", [1, 10, 10**6])
def test_tokens_are_those_of_the_texts(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(token_file, "BATCH", batch)
    texts = [*TEXTS, "word " * PART, TEXTS[0]]
    write(tmp_path / "source.jsonl", texts)
    assert built(config, tmp_path / "data") == plainly(texts)


def test_large_vocabularies_have_larger_numbers(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for vocab, bits in ((2**16, 16), (2**16 + 1, 32)):
        monkeypatch.setattr(ByteTokenizer, "vocab", vocab)
        monkeypatch.setattr(ByteTokenizer, "end", vocab - 1)
        found, _ = built(config, tmp_path / str(vocab))
        assert TokenFile.open(tmp_path / str(vocab) / "train").tokens.dtype == np.dtype(f"uint{bits}")
        assert found[7] == vocab - 1


def test_a_trained_tokenizer_and_evaluation_files(config: DataConfig, tmp_path: Path) -> None:
    other = write(tmp_path / "eval.jsonl", ["eins zwei"])
    config = replace(config, tokenizer="train", vocab=260, eval=(other,), eval_share=0.5)
    prepare(config, tmp_path / "data")
    data = open_data(config, tmp_path / "data")
    assert data.eval is not None
    assert data.tokenizer.decode(data.eval.tokens.tolist()) == "eins zwei"
    assert data.tokenizer.decode(data.train.tokens.tolist()) == "".join(TEXTS)
    assert 257 <= data.tokenizer.vocab <= 260


@pytest.mark.parametrize(
    ("lengths", "share", "parts"),
    [
        ([9] * 10, 0.2, ([10] * 8, [10] * 2)),
        ([9] * 10, 0.12, ([10] * 9, [10])),
        ([9] * 10, 0.03, ([10] * 9 + [8], [3])),  # no document is so short: the last one is cut
        ([99], 0.1, ([91], [10])),
        ([4, 94], 0.1, ([5, 86], [10])),
        ([89, 9], 0.1, ([90], [10])),
    ],
)
def test_a_share_for_evaluation(
    config: DataConfig, tmp_path: Path, lengths: list[int], share: float, parts: tuple[list[int], list[int]]
) -> None:
    texts = [chr(97 + i) * length for i, length in enumerate(lengths)]
    write(tmp_path / "source.jsonl", texts)
    config = replace(config, eval_share=share, packing="padded")
    prepare(config, tmp_path / "data")
    data = open_data(config, tmp_path / "data")
    files = (data.train, data.eval)
    assert all(file is not None for file in files)
    assert tuple(np.diff(f.starts, append=f.num_tokens).tolist() for f in files if f) == parts
    assert "".join(data.tokenizer.decode(f.tokens.tolist()) for f in files if f) == "".join(texts)
    assert all(f.tokens[[*f.starts[1:] - 1, -1]].tolist() == [256] * f.num_documents for f in files if f)


def test_nothing_is_done_twice_and_nothing_stale_is_kept(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    first = built(config, folder)
    with monkeypatch.context() as patched:
        patched.setattr(preparing, "_build", None)
        assert built(replace(config, seq_len=5, vocab=99, shuffle=False), folder) == first
    write(tmp_path / "source.jsonl", ["something else"])
    assert built(config, folder) == plainly(["something else"])
    write(tmp_path / "more.jsonl", ["more"])
    config = replace(config, train=(str(tmp_path / "*.jsonl"),))
    assert built(config, folder) == plainly(["more", "something else"])
    config = replace(config, eval_share=0.5)
    assert built(config, folder) != plainly(["more", "something else"])
    assert built(replace(config, eval_share=0.0), folder) == plainly(["more", "something else"])
    assert {f.name for f in folder.iterdir()} == {"train", "tokenizer", "turns.lock"}


def test_a_text_without_tokens_is_no_document(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, texts: [list(text.strip().encode()) for text in texts])
    write(tmp_path / "source.jsonl", [" ", "one", " ", "two", " "])
    assert built(config, tmp_path / "data") == plainly(["one", "two"])


def test_another_tokenizer_in_its_folder_is_seen(config: DataConfig, tmp_path: Path) -> None:
    config = replace(config, tokenizer=str(tmp_path / "tokenizer"))
    ByteTokenizer().save(tmp_path / "tokenizer")
    assert built(config, tmp_path / "data") == plainly(TEXTS)
    make_tokenizer("train", 300, lambda: iter(["one two, one two"]), tmp_path / "trained")
    FastTokenizer(tmp_path / "trained").save(tmp_path / "tokenizer")
    assert built(config, tmp_path / "data")[1][1] < plainly(TEXTS)[1][1]


def test_tokens_are_written_anew_if_they_are_not_the_tokenizers(config: DataConfig, tmp_path: Path) -> None:
    """As after a crash between the two."""
    folder = tmp_path / "data"
    prepare(config, folder)
    trained = replace(config, tokenizer="train", vocab=259)
    (tmp_path / "other").mkdir()
    prepare(trained, tmp_path / "other")
    (folder / "tokenizer").rename(tmp_path / "lost")
    (tmp_path / "other" / "tokenizer").rename(folder / "tokenizer")
    assert built(config, folder) == plainly(TEXTS)
    assert (folder / "tokenizer" / "made.json").read_bytes() == (tmp_path / "lost" / "made.json").read_bytes()


def test_a_crash_leaves_the_old_file_whole(config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    before = built(config, folder)
    write(tmp_path / "source.jsonl", ["new one", "new two"])
    monkeypatch.setattr(token_file, "BATCH", 1)
    with monkeypatch.context() as patched:
        encode = ByteTokenizer.encode

        def crash(self: ByteTokenizer, texts: list[str]) -> list[list[int]]:
            if texts == ["new two"]:
                raise KeyboardInterrupt
            return encode(self, texts)

        patched.setattr(ByteTokenizer, "encode", crash)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, folder)
    old = TokenFile.open(folder / "train")
    assert (old.tokens.tolist(), old.starts.tolist()) == before
    assert built(config, folder) == plainly(["new one", "new two"])


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "meta.json"])
def test_a_damaged_file_is_refused_and_written_anew(config: DataConfig, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    prepare(config, folder)
    damaged = folder / "train" / name
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"data/train holds (no token file|a token file that is damaged)"):
        open_data(config, folder)
    assert built(config, folder) == plainly(TEXTS)


def test_opening_reads_no_tokens(config: DataConfig, tmp_path: Path) -> None:
    prepare(config, tmp_path / "data")
    file = open_data(config, tmp_path / "data").train
    (tmp_path / "data" / "train" / "tokens.bin").unlink()
    assert file.starts.tolist() == plainly(TEXTS)[1]
    with pytest.raises(FileNotFoundError):
        file.tokens  # noqa: B018


def test_what_is_refused(config: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    total = len(plainly(TEXTS)[0])
    with pytest.raises(ValueError, match=rf"has 999 tokens .*, but the train data only {total} in 4 documents"):
        prepare(replace(config, seq_len=999), folder)
    with pytest.raises(ValueError, match=r"the eval data only 28 in 1 documents; .* data\.eval_share"):
        prepare(replace(config, seq_len=40, eval_share=0.4), folder)
    with pytest.raises(ValueError, match=r"eval_share must leave documents to train on, got 1\.0"):
        prepare(replace(config, eval_share=1.0), folder)
    with pytest.raises(ValueError, match=r"at least one document .* got none in .*none\.jsonl"):
        prepare(replace(config, train=(write(tmp_path / "none.jsonl", [""]),)), folder)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "precious.txt").touch()
    with pytest.raises(ValueError, match=r"eval is to hold tokens, but holds something else"):
        prepare(config, tmp_path)


HOLDER = """
import fcntl, pathlib, sys
with open(sys.argv[1] + "/turns.lock", "ab") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
    pathlib.Path(sys.argv[1], "released").touch()
"""


def test_runs_that_share_a_cache_take_turns(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that were started together wrote the same files at once."""
    folder, released = tmp_path / "data", []
    folder.mkdir()
    monkeypatch.setattr(preparing, "_is_ready", lambda *_: released.append((folder / "released").exists()))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == "locked\n"
        run = threading.Thread(target=prepare, args=(config, folder))
        run.start()
        run.join(0.2)  # without a lock it would be over by now
        holder.stdin.close()
        run.join()
    assert released == [True]
