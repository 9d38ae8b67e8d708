"""``terapipe train``: trains a model as described in a run.toml.

    $ terapipe train run.toml optimizer.lr=1e-4 plan.file=plan.json      overrides come after the file
    $ terapipe train run.toml --print-config                            every key with its value, and no training
    $ torchrun --nnodes 2 --nproc-per-node 8 ... -m terapipe train run.toml

The verb starts the ranks that the plan needs, unless torchrun has::

    under torchrun                 run_rank(config)                        this process is a rank
    one rank, no restarts          run_rank(config)                        no other process needed
    else                           launch_module("terapipe", train ...)    ranks that are restarted if one dies

What can be refused is refused here, once, before ranks start: each of them would say it again, at every restart. A run
that has finished is not an error, so that a job that is submitted twice succeeds twice.
"""

import argparse
import json
import sys
from pathlib import Path

from terapipe.cli.options import Verbs
from terapipe.training.config import RunConfig, load


def add(verbs: Verbs) -> None:
    """Declares the options of ``terapipe train``; the keys of the file are declared in training/config.py."""
    parser = verbs.add_parser(
        "train",
        help="train a model as described in run.toml",
        description="Trains a model as described in a file. Starts the ranks on this machine, or runs under torchrun. "
        "If started again, training resumes from the last checkpoint. Ctrl-C finishes the step, saves a checkpoint and "
        "ends.",
    )
    parser.add_argument(
        "file", type=Path, metavar="RUN.TOML", help="model, data, plan and so on; --print-config shows all keys"
    )
    parser.add_argument(
        "replaced",
        nargs="*",
        metavar="SECTION.KEY=VALUE",
        help="values that override the file, such as optimizer.lr=1e-4 or plan.file=plan.json",
    )
    parser.add_argument("--print-config", action="store_true", help="print every key with its value, and do not train")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Trains, or prints the configuration.

    Args:
        parsed: The file, what overrides it, and whether to print only.

    Returns:
        0 if the run has finished or was stopped, 1 if it failed.
    """
    config = load(parsed.file, parsed.replaced)
    if parsed.print_config:
        print(config.to_toml())
        return 0
    from terapipe.runtime.comm.environment import under_torchrun
    from terapipe.training.logging import metrics
    from terapipe.training.preflight import check_run, finished_at
    from terapipe.training.run import run_rank
    from terapipe.training.run_plan import ranks_wanted

    metrics.check(config.logging)
    if under_torchrun():
        return run_rank(config)
    ranks = ranks_wanted(config.plan)
    check_run(config, ranks)
    step = finished_at(config)
    if step is not None:
        print(
            f"this run has finished, at step {step}: {config.folder / 'report.html'}; to go on, raise optimizer.steps; "
            "to train anew, take another logging.folder"
        )
        return 0
    if ranks == 1 and not config.failures.restarts:
        return run_rank(config)
    return _start(parsed, config, ranks)


def _start(parsed: argparse.Namespace, config: RunConfig, ranks: int) -> int:
    """Starts the ranks and waits for them. Exit code 0 needs ended.json, which rank 0 writes after its last checkpoint
    is whole: a run that was stopped by a signal also ends without a failure, whether it could save or not.

    Args:
        parsed: The command, which ranks get again.
        config: The run.
        ranks: How many to start.
    """
    from terapipe.launch.processes import launch_module
    from terapipe.training.lock import Lock
    from terapipe.training.logging.display import Terminal
    from terapipe.training.run import ENDED

    with Lock(config.folder):
        pass  # refuse a folder in use here, once, rather than in every rank at every restart
    arguments = ["train", str(parsed.file), *parsed.replaced]
    with Terminal():
        failure = launch_module("terapipe", arguments, ranks, config.failures.restarts)
    if failure:
        print(f"terapipe train: {failure}", file=sys.stderr)
        return 1
    try:
        ended = json.loads((config.folder / ENDED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        print("terapipe train: ended before it could save; earlier checkpoints are intact", file=sys.stderr)
        return 1
    return 0 if ended["how"] in ("finished", "stopped") else 1
