"""Tokenizers say every text, and the rest of the world can open what they save."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from terapipe.training.data.text_reader import split_text
from terapipe.training.data.tokenizer import (
    END,
    ByteTokenizer,
    FastTokenizer,
    SlowTokenizer,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
)
from tests.support.ranks import Ranks
from tests.support.training_runs import short_run
from tests.unit.training.test_run import train

TEXTS = ["the cat and the hat; another frog within that thorny garden, forever hidden " * 20, "où est l'été? 猫 😀"]


def texts() -> Iterator[str]:
    return iter(TEXTS)


def never() -> Iterator[str]:
    raise AssertionError("texts were read")
    yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    make_tokenizer("train", 300, texts, folder)
    return folder


@pytest.fixture(scope="module")
def kinds(trained: Path) -> dict[str, Tokenizer]:
    """The last one is the trained one, as files of which only transformers makes a tokenizer."""
    model = json.loads((trained / "tokenizer.json").read_bytes())["model"]
    slow = trained.with_name("slow")
    slow.mkdir()
    (slow / "vocab.json").write_text(json.dumps(model["vocab"]))
    (slow / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (slow / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": END}))
    return {"bytes": ByteTokenizer(), "fast": FastTokenizer(trained), "slow": load_tokenizer("a folder", slow)}


@pytest.mark.parametrize("kind", ["bytes", "fast", "slow"])
@settings(deadline=None)
@given(found=st.lists(st.text(), min_size=1, max_size=3))
def test_every_text_comes_back(kinds: dict[str, Tokenizer], kind: str, found: list[str]) -> None:
    tokenizer = kinds[kind]
    encoded = tokenizer.encode(found)
    assert [tokenizer.decode([*ids, tokenizer.end]) for ids in encoded] == found
    assert all(0 <= i < tokenizer.vocab and i != tokenizer.end for ids in encoded for i in ids)


def test_what_they_are(kinds: dict[str, Tokenizer]) -> None:
    plain, fast, slow = kinds.values()
    assert (plain.vocab, plain.end, plain.encode(["é", ""])) == (257, 256, [[0xC3, 0xA9], []])
    assert plain.decode([0xC3, 65, 256, 300]) == "\ufffdA"
    assert isinstance(slow, SlowTokenizer)
    assert 257 < fast.vocab == slow.vocab <= 300
    assert fast.encode(TEXTS) == slow.encode(TEXTS)
    assert len(fast.encode(TEXTS)[0]) < len(TEXTS[0]) / 2


@pytest.mark.parametrize("kind", ["bytes", "fast", "slow"])
def test_transformers_opens_what_is_saved(kinds: dict[str, Tokenizer], kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    kinds[kind].save(tmp_path)
    opened: Any = AutoTokenizer.from_pretrained(tmp_path)
    said = [*TEXTS, "".join(map(chr, range(0x800)))]
    assert opened(said, add_special_tokens=False)["input_ids"] == kinds[kind].encode(said)
    assert opened.eos_token_id == kinds[kind].end
    assert (tmp_path / "config.json").read_text() == '{"model_type": "gpt2"}'
    assert load_tokenizer("a folder", tmp_path).encode(TEXTS) == kinds[kind].encode(TEXTS)


@settings(deadline=None)
@given(st.lists(st.sampled_from([" ", "\n", "the", "cat's", "42", ".", "é"])).map("".join))
def test_cutting_before_a_word_changes_no_token(kinds: dict[str, Tokenizer], text: str) -> None:
    parts = list(split_text(text, 8))
    if all(part[0] == " " for part in parts[1:]):
        assert [i for ids in kinds["fast"].encode(parts) for i in ids] == kinds["fast"].encode([text])[0]


def test_neither_cut_nor_filled_nor_framed(trained: Path, tmp_path: Path) -> None:
    """What a tokenizer.json asks for beside its tokens is not done."""
    library = Library.from_file(str(trained / "tokenizer.json"))
    library.enable_truncation(5)
    library.enable_padding(length=50)
    library.post_processor = TemplateProcessing(f"{END} $A {END}", special_tokens=[(END, 0)])
    library.save(str(tmp_path / "tokenizer.json"))
    FastTokenizer(trained).save(tmp_path / "rest")
    (tmp_path / "rest" / "tokenizer_config.json").rename(tmp_path / "tokenizer_config.json")
    assert FastTokenizer(tmp_path).encode(TEXTS) == FastTokenizer(trained).encode(TEXTS)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("tokenizer_config.json", {"eos_token": "Ġthe"}),
        ("tokenizer_config.json", {"eos_token": {"content": "Ġthe"}}),
        ("special_tokens_map.json", {"eos_token": "Ġthe"}),
        ("config.json", {"eos_token_id": None}),
        ("config.json", {"eos_token_id": 10**6}),
        ("config.json", {"eos_token_id": "the"}),
        ("config.json", {"eos_token_id": ["the", 0]}),
    ],
)
def test_the_end_is_found(trained: Path, tmp_path: Path, name: str, entry: dict[str, Any]) -> None:
    library = Library.from_file(str(trained / "tokenizer.json"))
    the = library.token_to_id("Ġthe")
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(json.dumps(entry).replace('"the"', str(the)))
    if entry.get("eos_token_id", 0) in (None, 10**6):
        with pytest.raises(ValueError, match=rf"{tmp_path} names none; add \"eos_token\""):
            load_tokenizer("a folder", tmp_path)
        return
    tokenizer = load_tokenizer("a folder", tmp_path)
    assert tokenizer.end == the
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer("a folder", tmp_path / "saved").end == the
    assert not (tmp_path / "saved" / "config.json").exists()


def test_a_trained_one_is_taken_again(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "tokenizer"
    before = make_tokenizer("train", 280, texts, folder)
    assert make_tokenizer("train", 280, never, folder).encode(TEXTS) == before.encode(TEXTS)
    assert make_tokenizer(str(folder), 7, never, folder).vocab == before.vocab == 280
    assert make_tokenizer("train", 280, never, folder).vocab == 280
    assert make_tokenizer("train", 290, texts, folder).vocab == 290
    assert make_tokenizer("bytes", 290, never, folder).vocab == 257
    assert make_tokenizer("train", 290, texts, folder).vocab == 290
    assert [f.name for f in folder.parent.iterdir()] == ["tokenizer"]


def test_long_words_and_many_texts_do_not_hold_up_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terapipe.training.data.tokenizer.SAMPLE", 500_000)

    def endless() -> Iterator[str]:
        while True:
            yield "abcdefghij" * 30_000

    assert make_tokenizer("train", 300, endless, tmp_path / "tokenizer").vocab <= 300


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must be \"bytes\", \"train\" or a folder .*, got 'gpt2'"):
        make_tokenizer("gpt2", 300, never, tmp_path / "new")
    with pytest.raises(ValueError, match=r"at least 257 entries.* got data.vocab 256"):
        make_tokenizer("train", 256, never, tmp_path / "new")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds something else; set another data\.cache"):
        make_tokenizer("bytes", 300, never, tmp_path / "mine")
    with pytest.raises(ValueError, match=r"mine/tokenizer\.json cannot be read"):
        make_tokenizer(str(tmp_path / "mine"), 300, never, tmp_path / "new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no tokenizer"):
        make_tokenizer(str(tmp_path / "empty"), 300, never, tmp_path / "new")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs tokenizers, .* pip install '\.\[data\]'"):
        make_tokenizer("train", 300, texts, tmp_path / "new")


def test_the_tokenizer_follows_the_model(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A pretrained model was trained on bytes, which were the default whatever the model."""
    from transformers import LlamaConfig

    folder = tmp_path / "llama"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**sizes, vocab_size=300).save_pretrained(folder)
    own = f"model.config={folder / 'config.json'}"
    with pytest.raises(ValueError, match=r"llama holds no tokenizer .* set data.tokenizer"):
        ranks(1)(train, short_run(tmp_path, own))
    ByteTokenizer().save(folder)
    config = short_run(tmp_path, own)
    assert config.data.tokenizer == str(folder)
    assert short_run(tmp_path, own, "data.tokenizer=bytes").data.tokenizer == "bytes"
    LlamaConfig(**sizes, vocab_size=200).save_pretrained(folder)
    with pytest.raises(ValueError, match="a model of 200 and a tokenizer of 257; take the model's own"):
        ranks(1)(train, config)
