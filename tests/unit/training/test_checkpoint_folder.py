"""A run goes on from the newest whole checkpoint, whatever happened to the others."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.chaos.damage import KINDS, Damages
from terapipe.runtime.checkpoint.manifest import damage
from terapipe.training.checkpoint_folder import clean, folder_of, path_of, steps
from terapipe.training.config import RunConfig
from terapipe.training.evaluation import Evaluator
from terapipe.training.logging.metrics import read
from tests.support.ranks import Ranks
from tests.support.training_runs import TWO_LAYERS, copy_run, flip_bits
from tests.unit.runtime.test_manifest import write_as_format_2
from tests.unit.training.test_run import config, losses, train


def test_twenty_damages_are_noticed(finished_run: RunConfig, tmp_path: Path) -> None:
    """Flips, cuts, deletions, exchanged files and edited JSON were trained on, or ended in a traceback. Now each is
    named and the run goes on from the newest whole checkpoint. (100 of them in benchmarks.chaos.)"""
    damages, dice = Damages(finished_run, tmp_path, all_every=2), random.Random(3)
    tried = [damages.attempt(number, dice) for number in range(20)]
    assert [(what, silent) for what, silent in tried if silent] == []
    assert {what.split()[0] for whole, _ in tried for what in whole.split("; ")} == set(KINDS)


def test_all_ranks_go_on_from_the_same_whole_checkpoint(ranks: Callable[[int], Ranks], finished_run: RunConfig) -> None:
    """Without its index a checkpoint was passed over without a word, and a damaged one counted among those to keep."""
    told = copy_run(finished_run, "two", keep=1)
    folder = folder_of(told)
    (path_of(folder, 3) / ".metadata").unlink()
    flip_bits(path_of(folder, 2) / "__1_0.distcp")
    ranks(2)(train, told)
    assert losses(told.folder) == losses(finished_run.folder)
    said = [row["message"] for row in read(told.folder) if row.get("event") == "damaged"]
    assert [message.split(" is damaged: ")[1] for message in said] == [
        ".metadata is missing; it was renamed to damaged-step-00000003",
        "__1_0.distcp does not match its checksum; it was renamed to damaged-step-00000002",
    ]
    assert steps(folder) == [3]
    assert not damage(path_of(folder, 3))
    assert {f.name for f in folder.glob("damaged-*")} == {"damaged-step-00000002", "damaged-step-00000003"}


def test_a_checkpoint_of_another_format_is_not_set_aside(finished_run: RunConfig) -> None:
    """A newer version's checkpoint was renamed as damaged, and the run went on from an older one."""
    told = copy_run(finished_run, "format")
    write_as_format_2(path_of(folder_of(told), 3), {})
    with pytest.raises(ValueError, match=r"step-00000003 was written by another version of terapipe: .* has format 2"):
        train(told)
    assert steps(folder_of(told))[-1] == 3


def test_notes_of_no_training_run_are_refused(finished_run: RunConfig) -> None:
    """Notes without a step were a KeyError, shown as a traceback."""
    told = copy_run(finished_run, "notes", verify=False)
    (path_of(folder_of(told), 3) / "notes.json").unlink()
    with pytest.raises(ValueError, match=r"notes of a training run, but its notes.json has no valid step, position"):
        train(told)


def test_a_checkpoint_about_to_be_replaced_is_found_again(finished_run: RunConfig) -> None:
    """A crash between two renames left it beside its place, where the next start deleted it."""
    told = copy_run(finished_run, "renamed")
    path = path_of(folder_of(told), 3)
    path.rename(path.with_name(f"{path.name}.old"))
    clean(folder_of(told))
    assert steps(folder_of(told)) == [1, 2, 3]


def test_a_loss_that_is_not_a_number_is_not_the_best(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN counted as lower than any loss; the first rank then compared it with None and died."""
    found = iter([float("nan"), 2.0, float("nan")])
    monkeypatch.setattr(Evaluator, "run", lambda self, step: next(found))
    told = config(text_folder / "nan", "", *TWO_LAYERS, "evaluation.every=1")
    train(told)
    text = {step: (path_of(folder_of(told), step) / "notes.json").read_text() for step in (1, 2, 3)}
    assert "NaN" not in "".join(text.values())
    notes = {step: json.loads(text[step]) for step in text}
    assert [(notes[step]["eval_loss"], notes[step]["best"]) for step in notes] == [
        (None, None),
        (2.0, 2.0),
        (None, 2.0),
    ]
    assert json.loads((folder_of(told) / "best.json").read_text()) == {"step": 2, "eval_loss": 2.0}
