"""Token files: damage is named, and mended where that is possible."""

import errno
import json
from pathlib import Path

import pytest
from safetensors import SafetensorError

from terapipe.hf.save import writing
from terapipe.training.config import DataConfig
from terapipe.training.data.prepare import prepare
from terapipe.training.data.token_file import Origin, TokenFile, TokenWriter, open_data
from terapipe.training.data.tokenizer import ByteTokenizer
from tests.support.training_runs import flip_bits


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "meta.json", "manifest.json"])
def test_a_damaged_token_file_is_named_and_made_again(text_folder: Path, tmp_path: Path, name: str) -> None:
    """Of a token file only the sizes were compared: flipped bits were trained on."""
    told = DataConfig(train=(str(text_folder / "text.txt"),), seq_len=8, eval_share=0.3)
    prepare(told, tmp_path)
    wanted = [(file.tokens.tolist(), file.starts.tolist()) for file in _files(told, tmp_path)]
    said: list[str] = []
    prepare(told, tmp_path, say=said.append)
    assert not said
    flip_bits(tmp_path / "train" / name)
    prepare(told, tmp_path, say=said.append)
    (message,) = said
    assert message.startswith(f"the token file {tmp_path / 'train'} is damaged: {name} ")
    assert [(file.tokens.tolist(), file.starts.tolist()) for file in _files(told, tmp_path)] == wanted
    (tmp_path / "eval" / name).unlink()
    prepare(told, tmp_path, say=said.append)
    assert f"{tmp_path / 'eval'} is damaged: {name} is missing" in said[1]


def _files(told: DataConfig, folder: Path) -> list[TokenFile]:
    data = open_data(told, folder)
    assert data.eval is not None
    return [data.train, data.eval]


def test_a_damaged_trained_tokenizer_is_refused(text_folder: Path, tmp_path: Path) -> None:
    """It was taken as it was, and the texts encoded again with it."""
    told = DataConfig(train=(str(text_folder / "text.txt"),), seq_len=8, tokenizer="train", vocab=280)
    prepare(told, tmp_path)
    path = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer is not the one that made the tokens .* delete the folder"):
        prepare(told, tmp_path)


def test_a_full_disk_is_named_with_the_path(text_folder: Path, tmp_path: Path) -> None:
    """'No space left on device' did not say on which."""
    writer = TokenWriter(tmp_path / "train", ByteTokenizer(), Origin("", ""))
    path = tmp_path / "train.partial" / "tokens.bin"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'") as caught:
        writer.add_all([text_folder / "text.txt"], "text")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}'"), writing(tmp_path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
