"""``terapipe calibrate``: measures one device, for plans of a cluster of it. In Python: ``tp.calibrate``."""

import argparse
from pathlib import Path

from terapipe import api
from terapipe.cli.options import MOST_SECONDS, Verbs, check_outputs, console, progress_of
from terapipe.planning.hardware import DESCRIPTION
from terapipe.reporting import style


def add(verbs: Verbs) -> None:
    """Declares the verb and its options.

    Args:
        verbs: The subparsers of ``terapipe``.
    """
    parser = verbs.add_parser(
        "calibrate",
        help="measure one device, to plan for a cluster of it",
        description="Measures products, attention, memory bandwidth and overheads of one device, in about a minute, "
        "and saves them as a host. `terapipe plan --cluster host.json:4` plans for four such hosts. Where the model "
        "and all ranks are at hand, `terapipe profile` is more exact.",
    )
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help=f"the host whose device is measured, for its links: HOST or {DESCRIPTION} (default: what this machine "
        "seems to be)",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long to measure, at most (default: 60)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("host.json"), help="file to write (default: host.json)"
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Measures, saves and prints the constants.

    Args:
        parsed: The options.
    """
    if not 0 < parsed.seconds < MOST_SECONDS:
        raise ValueError(f"--seconds must be positive, got {parsed.seconds}")
    if parsed.out.suffix != ".json":
        raise ValueError(f"--out must end in .json, by which --cluster knows a file, got {parsed.out}")
    check_outputs(parsed)
    with progress_of("measuring") as progress:
        calibration = api.calibrate(parsed.cluster, seconds=parsed.seconds, progress=progress)
    calibration.save(parsed.out)
    device = calibration.host.device
    console.print(f"{calibration.measured['device']}:")
    console.print(f"  products    {device.rate / 1e12:.3g} TFLOP/s, {device.achieved:.0%} of {device.peak / 1e12:.3g}")
    attention = [device.peak * share / 1e12 for share in device.attention_speed[:2]]
    console.print(
        f"  attention   {attention[0]:.3g} TFLOP/s forward, {attention[1]:.3g} backward ({device.attention_kernel})"
    )
    console.print(f"  memory      {device.bandwidth / 1e9:.4g} GB/s, {style.memory(device.memory)}")
    least = style.seconds(device.min_layer_time)
    console.print(f"  a layer     at least {least}, {device.passes:.0f} passes over memory")
    if device.host_forward:
        both = f"{style.seconds(device.host_forward)} forward, {style.seconds(device.host_backward)} backward"
        console.print(f"  host        {both}, to issue the kernels of a layer")
    console.print(f"Wrote [bold]{parsed.out}[/]. Next: terapipe plan --cluster {parsed.out}:4 --model gpt3-13b ...")
    return 0
