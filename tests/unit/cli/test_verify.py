"""``terapipe verify`` and ``terapipe models``."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from terapipe.cli import main
from terapipe.hf.verify import small_model as shrink
from terapipe.hf.verify.small_model import config_of
from tests.support.hf_models import small_config


def test_an_exact_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "llama", "--stages", "3", "--num-slices", "6"]) == 0
    out = capsys.readouterr().out
    assert "llama                    exact    attention backend, largest error" in out
    assert "model.layers.*.self_attn.k_proj.weight" in out


def test_the_loss_of_routers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "phimoe"]) == 0
    assert "; router loss exact (" in capsys.readouterr().out


def test_a_folder_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support.hf_models import small_config

    small_config("gemma2").save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert main(["verify", str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["exact"]
        assert found["backend"] == "attention"


def test_a_model_that_differs_and_one_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "doge"]) == 1
    assert "cache backend: gradients differ by" in capsys.readouterr().out
    assert main(["verify", "mamba"]) == 2
    out = capsys.readouterr().out
    assert "refused  attention backend: some layers do not take their attention" in out
    assert "cache backend: its own code raises IndexError" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one model, or --all"),
        (["no-such-model"], "'no-such-model' is no file or folder here, and no causal-LM type"),
        (["llama", "--num-slices", "20"], "a check divides 29 tokens into 1 to 14 slices, got 20"),
        (["llama", "--stages", "0"], "--stages must be at least 1 and at most 10000, got 0"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_table_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "types are exact with transformers" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    rows = {row["model"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert rows["llama"]["backend"] == "attention"
    assert rows["bloom"]["backend"] == "cache"
    assert sum(row["exact"] and row["backend"] == "attention" for row in rows.values()) >= 100
    assert sum(row["exact"] for row in rows.values()) >= 120


@pytest.mark.usefixtures("quiet_models")
def test_a_folder_is_verified_by_a_small_copy(tmp_path: Path) -> None:
    """Of a folder, the whole model was built."""
    LlamaConfig().save_pretrained(tmp_path)
    assert config_of(str(tmp_path)).hidden_size == shrink.HIDDEN


@pytest.mark.usefixtures("quiet_models")
def test_all_types_are_counted_and_confirmed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``verify --all`` never ran documents."""
    monkeypatch.setattr("terapipe.hf.verify.small_model.causal_lm_types", lambda: ["bart", "bloom", "mistral", "rwkv"])
    assert main(["verify", "--all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["whole"] == {"exact": 3, "refused": 1, "wrong": 0}
    assert found["documents"] == {"exact": 1, "refused": 3, "wrong": 0}
    assert found["dropout"] == {"exact": 2, "refused": 2, "wrong": 0}


@pytest.mark.usefixtures("quiet_models")
@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "code"), [("llama", 0), ("apertus", 1)])
def test_verify_proves_tensor_parallel(kind: str, code: int, tmp_path: Path) -> None:
    small_config(kind).save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--tp", "2"]) == code


@pytest.mark.usefixtures("quiet_models")
def test_verify_refuses_no_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "llama", "--tp", "0"]) == 2
    assert "--tp must be at least 1, got 0" in capsys.readouterr().err
