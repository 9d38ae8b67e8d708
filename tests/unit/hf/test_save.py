"""Saving a Hugging Face model replaces a folder whole, or not at all."""

from pathlib import Path

import pytest

from terapipe import Layout
from terapipe.hf.save import save_pretrained
from tests.unit.runtime.test_hf_files import decoder
from tests.unit.runtime.test_hf_files import pipeline as hf_pipeline


def test_an_interrupted_hugging_face_export_leaves_the_old_one(tmp_path: Path) -> None:
    """The same, for models of Hugging Face."""
    pipe = hf_pipeline(decoder("llama"), Layout(1, 1, 1))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("old")

    def fail(folder: Path) -> None:
        assert (folder / "model.safetensors").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_pretrained(pipe, tmp_path / "model", finish=fail)
    assert [f.name for f in tmp_path.rglob("*")] == ["model", "model.safetensors"]
    assert (tmp_path / "model" / "model.safetensors").read_text() == "old"
