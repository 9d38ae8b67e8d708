"""``terapipe plan``: chooses how to split a model over devices and how to cut its batches. In Python:
``terapipe.plan``.

    $ terapipe plan --model gpt3-1b --cluster dgx-a100:1 --batch-size 8 --seq-len 2048 --save plan.json
    interleaved, whole sequences on dp 4 x pp 2 x tp 1: 168 ms per step
      order         interleaved
      microbatches  2 x 1 seq
      idle          8.5%
      peak memory   14.7 GiB per device
      ...
    Why:
      - slicing does not pay here: shorter slices cost more than the idle time they would save
      ...
    Runners-up, the best of every other order, each in its own best layout:
      ...
    To start it, with your model and data in run.toml:
      terapipe train run.toml plan.file=plan.json data.batch_size=8 data.seq_len=2048

Beside what ``terapipe.plan`` returns, the verb says how to start the plan (launch/job.py): a torchrun command for each
host, and on request a Slurm script or a Kubernetes job. ``--dry-run`` is ``terapipe.dry_run``, ``--sensitivity`` is
``PlanResult.sensitivity``, ``--save`` is ``PlanResult.save``.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe import api, files
from terapipe.cli.options import (
    Verbs,
    add_launch,
    add_request,
    add_source,
    check_outputs,
    console,
    costs_of,
    orders_help,
    progress_of,
    refuse_with,
    request_of,
)
from terapipe.launch.job import HOST0, Hosts, Launch, hosts_of, instructions, launch_of, why_uneven
from terapipe.planning.hardware import Cluster
from terapipe.planning.profile import Profile
from terapipe.reporting.plans import explanation
from terapipe.search.result import PlanResult
from terapipe.search.sensitivity import Sensitivity
from terapipe.search.source import ClusterSource, ProfileSource, Source

if TYPE_CHECKING:
    from terapipe.runtime.dry_run import DryRun

# The name in the launch command of a plan that was not saved: commands are shown all the same, with a note to save it.
PLAN = "plan.json"

DESCRIPTION = """\
Chooses the fastest plan that fits into memory, and explains the choice.

A plan says how many devices data, pipeline and tensor parallelism get, which
order forwards and backwards have, how the batch is cut into microbatches and
every sequence into slices, and whether activations are recomputed. Plans are
compared by simulating one step with the costs of your model: measured by
`terapipe profile`, or computed for a described cluster.
"""

EXAMPLES = """\
examples:
  terapipe plan --model llama3-8b --cluster dgx-h100:2 --batch-size 16 --seq-len 8192
  terapipe plan --model llama3-8b --cluster dgx-h100:1 --longest
  terapipe plan --profile profile.json --batch-size 8 --seq-len 2048 --save plan.json
  terapipe train run.toml plan.file=plan.json      (start the saved plan)
  terapipe simulate plan.json --html step.html     (look at its step)
"""


def add(verbs: Verbs) -> None:
    """Declares the options of ``terapipe plan``. The end of its help lists the orders, which are data, and examples.

    Args:
        verbs: The subparsers of the command line.
    """
    parser = verbs.add_parser(
        "plan",
        help="choose layout, order, microbatches, slices and recomputation",
        description=DESCRIPTION,
        epilog=f"{orders_help()}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_source(parser, table=True)
    add_request(parser, required=False)
    parser.add_argument(
        "--longest",
        action="store_true",
        help="instead of --seq-len: find the longest sequences that fit, one per step unless --batch-size says more",
    )
    add_launch(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--save", metavar="FILE", type=Path, help="write the plan, for `terapipe train` and `terapipe simulate`"
    )
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    output.add_argument(
        "--sensitivity",
        action="store_true",
        help="also show how the choice changes if a constant of the cluster is wrong (takes 30 times as long)",
    )
    output.add_argument(
        "--dry-run",
        action="store_true",
        help="also execute the step of the rank that needs most memory on fake tensors, at real size: checks shapes "
        "and dtypes, and compares bytes with the plan's; replicas do not shard then",
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Plans, writes the files that were asked for, and prints the explanation, or with ``--json`` one object.

    Everything that can fail comes before anything is printed or written, so that a plan that cannot be launched leaves
    no half of its files.

    Args:
        parsed: The options.

    Returns:
        0; if no plan fits into memory, that is a ValueError with the smallest that was tried.
    """
    _refuse_ignored(parsed)
    check_outputs(parsed)
    if parsed.dry_run and parsed.shard is None:
        parsed.shard = False  # a dry run does not know shards: what was not asked for must not make it fail
    with progress_of("planning") as progress:
        result = (
            _longest(parsed)
            if parsed.longest
            else api.plan(parsed.model, costs_of(parsed), **request_of(parsed), progress=progress)
        )
    dry = api.dry_run(parsed.model or result.model_config, result) if parsed.dry_run else None
    hosts = hosts_of(_machine(result.source), result.layout.devices)
    launch = _launch(parsed, result, hosts)
    sensitivities = result.sensitivity() if parsed.sensitivity else []
    _write(parsed, result, launch)
    if parsed.json:
        print(json.dumps(_as_dict(result, launch, sensitivities, dry)))
        return 0
    if parsed.longest:
        console.print(f"Longest sequences that fit: {result.plan.seq_len:,} tokens, to 2 %\n")
    for part in explanation(result):
        console.print(part)
    console.print(f"\n[dim]planned in {result.seconds:.1f} s[/]")
    if dry is not None:
        console.print(f"\nDry run of {dry}.", markup=False)
    _show_launch(parsed, result, launch, hosts)
    _show_sensitivity(sensitivities)
    return 0


def _longest(parsed: argparse.Namespace) -> PlanResult:
    """Plans for the longest sequences that fit. Progress is not shown: nobody knows how many lengths it takes."""
    refuse_with("--longest", parsed, "seq_len", "slice_lengths")
    parsed.seq_len = 1  # so that the other options can be read
    parsed.batch_size = parsed.batch_size or 1
    options = request_of(parsed)
    del options["seq_len"]
    return api.longest(parsed.model, costs_of(parsed), **options)


def _refuse_ignored(parsed: argparse.Namespace) -> None:
    """Refuses options that a cost table or a profile would ignore: whoever gave one would take the plan for an answer
    to it.

    Args:
        parsed: The options. A cost table has the numbers of a model already, and a profile was measured: there is no
            constant of a cluster that could be wrong.
    """
    if parsed.cost_table is not None:
        refuse_with("--cost-table", parsed, "model", "layers_only", "autocast", "tile", "sensitivity", "dry_run")
    if parsed.profile is not None:
        refuse_with("--profile, whose costs were measured", parsed, "sensitivity")
    if parsed.image is not None and parsed.kubernetes is None:
        raise ValueError("--image is for the containers of --kubernetes FILE; give both, or neither")


def _machine(source: Source | None) -> Cluster | Profile | None:
    """Returns the cluster or profile that a plan was made with, which tell the devices of a host; None if it was made
    with a cost table, which knows of no hosts."""
    if isinstance(source, ClusterSource):
        return source.cluster
    return source.profile if isinstance(source, ProfileSource) else None


def _train(parsed: argparse.Namespace, result: PlanResult) -> str:
    """The command that trains with this plan. It sets the batch, which must agree with the plan; all else is in
    run.toml.

    Args:
        parsed: With the file of the plan, if it was saved.
        result: Whose batch is that of one replica: the command has that of all.
    """
    plan = result.plan
    file = shlex.quote(str(parsed.save or PLAN))
    batch = f"data.batch_size={plan.batch_size * result.layout.dp} data.seq_len={plan.seq_len}"
    return f"terapipe train run.toml plan.file={file} {batch}"


def _launch(parsed: argparse.Namespace, result: PlanResult, hosts: Hosts) -> Launch | None:
    """What starts the plan: hosts, processes, script. None if the plan cannot be spread evenly over the hosts, which is
    an error only if a job is to be written: whoever asks what would be fastest wants to know that, too.

    Args:
        parsed: With script, endpoint, name and image where they were asked for. An endpoint or a name that nothing
            would use is refused.
        result: The plan and its layout.
        hosts: How many devices each host has.
    """
    defaults = {"script": f"-m {_train(parsed, result)}", "endpoint": HOST0, "name": "terapipe", "image": "YOUR_IMAGE"}
    asked = {name: getattr(parsed, name) for name in defaults if getattr(parsed, name) is not None}
    launch = launch_of(result.layout, hosts, **{**defaults, **asked})
    if launch is None and (parsed.slurm or parsed.kubernetes):
        raise ValueError(why_uneven(result.layout, hosts))
    if launch is not None and launch.hosts == 1:
        refuse_with("a plan for one host, whose processes need no meeting place", parsed, "endpoint")
        if not (parsed.slurm or parsed.kubernetes):
            refuse_with("a plan for one host and no job to write", parsed, "name")
    return launch


def _write(parsed: argparse.Namespace, result: PlanResult, launch: Launch | None) -> None:
    """Writes the plan and the jobs that were asked for. The plan names the file of its
    profile, because whoever reads the plan again needs its costs."""
    if parsed.save:
        result.save(parsed.save, profile=parsed.profile)
    if launch and parsed.slurm:
        files.write(parsed.slurm, launch.slurm_script())
    if launch and parsed.kubernetes:
        files.write(parsed.kubernetes, launch.kubernetes_job())


def _as_dict(
    result: PlanResult, launch: Launch | None, sensitivities: Sequence[Sensitivity], dry: "DryRun | None"
) -> dict[str, Any]:
    """What ``--json`` prints: the result as ``--save`` writes it, with launch, dry run and sensitivity."""
    data = {**result.to_dict(), "launch": launch.to_dict() if launch else None}
    if dry is not None:
        data["dry_run"] = dry.to_dict()
    if sensitivities:
        data["sensitivity"] = [
            {"constant": m.constant, "factor": m.factor, "regret": m.regret, "same": m.same} for m in sensitivities
        ]
    return data


def _show_launch(parsed: argparse.Namespace, result: PlanResult, launch: Launch | None, hosts: Hosts) -> None:
    """Prints how to start the plan: with a run.toml and one host a single command, else torchrun for each host. If the
    plan was not saved, it says so first, because the commands read its file."""
    if launch is None:
        console.print(f"\nNo launch: {why_uneven(result.layout, hosts)}.", markup=False)
        return
    if not parsed.save and parsed.script is None:
        console.print(f"\nThe commands below read {PLAN}: write it with --save {PLAN}.", markup=False)
    alone = parsed.script is None and launch.hosts == 1
    lines = ["To start it, with your model and data in run.toml:", f"  {_train(parsed, result)}"] if alone else []
    lines = lines or instructions(launch, result.layout, parsed.save)
    console.print("\n" + "\n".join(lines), markup=False)
    for path, command in ((parsed.slurm, "sbatch"), (parsed.kubernetes, "kubectl apply -f")):
        if path:
            console.print(f"Wrote {path}; submit it with: {command} {path}", markup=False)


def _show_sensitivity(sensitivities: Sequence[Sensitivity]) -> None:
    """Prints a line per constant of the cluster: what the chosen plan loses if the constant is really larger or
    smaller. A constant that may be off by half without another plan being chosen need not be measured.

    Args:
        sensitivities: Of one constant after the other, with each of its factors; empty without ``--sensitivity``.
    """
    if sensitivities:
        console.print("\nStep time lost if a constant is assumed wrong by a factor (* if another plan is chosen):")
    for constant, group in groupby(sensitivities, key=lambda m: m.constant):
        cells = [f"x {m.factor:g}: {m.regret:+.1%}{'' if m.same else ' *'}" for m in group]
        console.print(f"  {constant:20s} " + "   ".join(cells))
