"""What can be known to be wrong with a run before any rank is started: looked for once, by the process that starts
them.

Ranks would notice all of it, too, but each by itself, after they have loaded torch, and with a stack of messages.
"""

import json
from pathlib import Path

from terapipe import files
from terapipe.planning.profile import Profile
from terapipe.runtime.checkpoint import INDEX, damage
from terapipe.training import run_plan
from terapipe.training.checkpoint_folder import check_begin, folder_of, path_of, steps
from terapipe.training.config import RunConfig, load
from terapipe.training.data.prepare import check_sources
from terapipe.training.export import check_export
from terapipe.training.model import check_model
from terapipe.training.objective import check_objective
from terapipe.training.run import ENDED


def check_run(config: RunConfig, ranks: int) -> None:
    """Raises ValueError or OSError for files, folders and names of the configuration that cannot be used.

    What depends on the tokens, or on a model that must be built first, is noticed by the ranks.

    Args:
        config: Of the run.
        ranks: How many processes are to be started.
    """
    shape = check_model(config.model, config.data)
    check_sources(config.data, config.objective)
    check_objective(config.objective)
    # A plan's file sets the layout; otherwise it follows from the keys, and the planner may still change it.
    if config.plan.file:
        run_plan.from_file(config, ranks)
    else:
        layout = run_plan.layout_of(config.plan, ranks, config.plan.pp)
        chunks = config.plan.chunks or 1
        if shape is not None and config.plan.pp and layout.pp * chunks > shape.layers:
            raise ValueError(
                f"every stage needs a layer: the model has {shape.layers}, plan.pp {layout.pp} with plan.chunks "
                f"{chunks} asks for {layout.pp * chunks} stages"
            )
    if config.plan.profile:
        Profile.load(config.plan.profile)
    check_begin(config)
    _check_start(config)
    check_export(config, shape)


def _check_start(config: RunConfig) -> None:
    """The checkpoint of another run that this one begins with must be there, while the run has none of its own."""
    start = config.checkpoints.start
    if start and not steps(folder_of(config)) and not (start / INDEX).is_file():
        raise ValueError(
            f"checkpoints.resume must be auto, off or the folder of a checkpoint, got {config.checkpoints.resume!r}, "
            "which holds none"
        )


def finished_at(config: RunConfig) -> int | None:
    """Tells at which step this run has finished, if nothing is left to do: all steps are taken, the last checkpoint is
    there, and so is the exported model.

    Args:
        config: Of the run.

    Returns:
        The step; None if there is something to do, or if model, data or objective are others than those it was trained
            with: then the ranks say what has changed.
    """
    try:
        ended = json.loads(files.read(config.folder / ENDED))
        before = load(config.folder / "config.toml")
        how, step = ended["how"], int(ended["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    # What the ranks compare when they resume, as far as the file alone tells.
    same = all(getattr(before, part) == getattr(config, part) for part in ("model", "data", "objective"))
    export = config.checkpoints.export
    saved = steps(folder_of(config))
    done = how == "finished" and step >= config.optimizer.steps and saved[-1:] == [step]
    if not same or not done or (export and not (Path(export) / "config.json").is_file()):
        return None
    return None if damage(path_of(folder_of(config), step), sums=False) else step
