"""``terapipe profile``: measures a model on this machine. In Python: ``terapipe.profile`` on every rank.

    $ terapipe profile --model gpt-tiny --seq-len 256 --seconds 4
    59 points, 10 to 54 measurements each, on 2 ranks; error on held-out points: 1.6% at most, 0.9% on average
      forward of 2 layers, 1 x 256 tokens: 1.81 ms
      backward of 2 layers, 1 x 256 tokens: 5.83 ms
      messages within a host: 446 µs for 4 KiB, 13.2 ms for 16 MiB
    Wrote profile.json. Next: terapipe plan --profile profile.json --batch-size 1 --seq-len 256

A point is a slice of some length after some context. All ranks measure at the same time, as they will compute: alone, a
rank would have the memory bandwidth of the whole host. Some points are held out of the fit that plans use, and the
error there tells whether the fit can be trusted. Models have random weights, or none: only shapes matter.

The verb starts ``--ranks`` processes itself; under torchrun it is one of them, and rank 0 writes the file.
"""

import argparse
from pathlib import Path

from terapipe import api
from terapipe.cli.options import MOST_SECONDS, Verbs, check_outputs, console, model_help, progress_of
from terapipe.extras import install_line
from terapipe.planning.profile import FittedCost, Profile, typical
from terapipe.reporting import style
from terapipe.search.request import Request

TRUSTED = 0.15  # maximum relative error on held-out points for a reliable profile


def add(verbs: Verbs) -> None:
    """Declares the options of ``terapipe profile``.

    Args:
        verbs: The subparsers of the command line.
    """
    parser = verbs.add_parser(
        "profile",
        help="measure a model on this machine",
        description="Measures forward and backward of a stage for slices of many lengths and contexts, on all ranks at "
        "once, and also transfers, embedding, head and optimizer. `terapipe plan --profile` plans with the result. "
        "Starts the ranks on this machine, or runs under torchrun.",
    )
    parser.add_argument("--model", required=True, help=model_help())
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of parameters and activations (default: float32)",
    )
    parser.add_argument("--seq-len", type=int, required=True, metavar="TOKENS", help="tokens per sequence")
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="processes to start, without torchrun (default: 2)"
    )
    parser.add_argument(
        "--sizes", default="1", metavar="N,...", help="microbatch sizes to measure, such as 1,2,4 (default: 1)"
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="about how long to measure, at most (default: 45)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("profile.json"), help="file to write (default: profile.json)"
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Checks the options, measures on all ranks, writes the profile, and prints what it shows and whether to trust it.

    Args:
        parsed: The options.

    Returns:
        0, also for a profile that is not to be trusted: it was written, and a warning says so.
    """
    if parsed.seq_len < 1 or not 0 < parsed.seconds < MOST_SECONDS:
        raise ValueError(f"--seq-len and --seconds must be positive, got {parsed.seq_len} and {parsed.seconds}")
    Request(1, parsed.seq_len)  # refuses more tokens than a sequence can have
    check_outputs(parsed)
    sizes = _sizes(parsed.sizes)
    # Refuse a model that cannot be sliced here, with one message, before any rank is started.
    layers = _layers(parsed.model)
    if not 1 <= parsed.ranks <= layers:
        raise ValueError(f"every rank measures at least one of the {layers} layers, got --ranks {parsed.ranks}")
    from terapipe.launch.processes import launch
    from terapipe.runtime.comm.environment import under_torchrun

    arguments = (parsed.model, parsed.dtype, parsed.seq_len, sizes, parsed.seconds)
    measured = measure(*arguments) if under_torchrun() else launch(measure, parsed.ranks, *arguments)
    if measured is not None:
        measured.save(parsed.out)
        _show(measured, parsed.out)
        _warn_if_unreliable(measured)
    return 0


def _layers(text: str) -> int:
    """The layers of the model. It also refuses, with one message and before any rank starts, what cannot be measured: a
    type of models without sizes ("llama"), or a Hugging Face model where transformers is missing."""
    try:
        spec = api.model_spec(text)
    except ValueError:
        if "=" not in text and not Path(text).exists() and text in _types():
            raise ValueError(
                f"{text} is a type of models, not one: give the config.json, or the folder, of the model to measure"
            ) from None
        raise
    except ImportError:
        raise ValueError(f"Hugging Face models need transformers; {install_line('hf')}") from None
    assert spec is not None
    return spec.config.layers


def _types() -> list[str]:
    """The causal-LM types of the installed transformers; none without it."""
    try:
        from terapipe.hf.verify.small_model import causal_lm_types
    except ImportError:
        return []
    return causal_lm_types()


def measure(model: str, dtype: str, seq_len: int, sizes: tuple[int, ...], seconds: float) -> Profile | None:
    """Measures on one rank; all ranks call it together.

    Args:
        model: As ``--model``; every rank builds its own layers of it.
        dtype: Of parameters and activations.
        seq_len: Tokens per sequence.
        sizes: Sequences per microbatch.
        seconds: About how long to measure, at most.

    Returns:
        The profile on rank 0, None on the others.
    """
    from terapipe.launch.processes import take_cores
    from terapipe.runtime.comm.environment import rank_and_size

    take_cores()
    first = rank_and_size()[0] == 0
    with progress_of("measuring", shown=first) as progress:
        measured = api.profile(
            model, seq_len=seq_len, microbatch_sizes=sizes, seconds=seconds, dtype=dtype, progress=progress
        )
    return measured if first else None


def _show(measured: Profile, out: Path) -> None:
    """Prints what whoever measured wants to see at once: how many points, how well they fit, how long a whole sequence
    takes on a stage, how long the host takes to launch kernels (GPUs only), and how fast messages are."""
    errors = [abs(e) for e in FittedCost(measured).errors()]
    held_out = f"{max(errors):.1%} at most, {sum(errors) / len(errors):.1%} on average" if errors else "none held out"
    counts = [len(sample.seconds) for sample in measured.samples]
    console.print(
        f"{len(measured.samples)} points, {min(counts)} to {max(counts)} measurements each, on {measured.ranks} ranks; "
        f"error on held-out points: {held_out}"
    )
    whole_stage = [s for s in measured.samples if s.length == measured.seq_len and s.kind in ("forward", "backward")]
    for sample in whole_stage:
        middle = sorted(sample.seconds)[len(sample.seconds) // 2]
        what = f"{sample.kind} of {measured.layers} layers, {sample.size} x {sample.length} tokens"
        console.print(f"  {what}: {style.seconds(middle)}")
    host = FittedCost(measured).by_side()[1]
    if host:
        both = f"{style.seconds(host.forward)} forward, {style.seconds(host.backward)} backward"
        console.print(f"  host, to issue the kernels of a layer for one slice: {both}")
    for apart, where in ((False, "within a host"), (True, "between hosts")):
        sizes = {t.nbytes: typical(t.seconds) for t in measured.transfers if t.between_hosts == apart}
        if sizes:
            times = ", ".join(f"{style.seconds(sizes[n])} for {style.memory(n)}" for n in (min(sizes), max(sizes)))
            console.print(f"  messages {where}: {times}")
    console.print(
        f"Wrote [bold]{out}[/]. Next: terapipe plan --profile {out} --batch-size 1 --seq-len {measured.seq_len}"
    )


def _warn_if_unreliable(measured: Profile) -> None:
    """Warns of a poor fit, and of points that were left out for lack of time."""
    errors = [abs(e) for e in FittedCost(measured).errors()]
    if errors and max(errors) > TRUSTED:
        console.print(
            f"[yellow]The profile is off by {max(errors):.0%} on held-out points, so plans made with it are not "
            "reliable. Measure again on a quiet machine.[/]"
        )
    all_points = measured.machine["points"]
    points = len({(s.size, s.length, s.context) for s in measured.samples if s.kind == "forward"})
    if points < all_points:
        console.print(f"[yellow]There was time for {points} of {all_points} points; give more --seconds for all.[/]")


def _sizes(text: str) -> tuple[int, ...]:
    """Parses microbatch sizes: "1,2,4"."""
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or any(not 1 <= size <= 2**20 for size in sizes):
        raise ValueError(f"--sizes lists numbers of sequences, such as 1,2,4, got {text!r}")
    return tuple(sorted(set(sizes)))
