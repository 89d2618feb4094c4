"""``benchctl micro bonus``: batch expansion against a prefill pass for the bonus tokens of a draft model."""

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from benchctl.cli.micro.experiment import counts_of, measure_micro, pass_settings, warn_of_failures
from benchctl.cli.micro.forward import (
    Device,
    Dtype,
    KvLayoutName,
    MicroBlocks,
    MicroSeed,
    Modes,
    Python,
    Replays,
    Threads,
)
from benchctl.cli.options.experiment import RESULTS, AsJson, Label, Output, OutputDir, Quiet
from benchctl.cli.output.screen import print_json, uncollected
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from benchctl.profile.sections.forward_pass import ForwardPoint

_INCONCLUSIVE: Final = 3

_Results = Annotated[
    Path | None,
    typer.Argument(metavar="[DIR]", help="Result directory of 'micro' to judge; by default a new one is measured."),
]
_Draft = Annotated[
    str, typer.Option("--model", "-m", help="Draft model: a built-in shape, or a directory with a config.json.")
]
_BatchSizes = Annotated[
    str, typer.Option("--batch-size", metavar="N,N", help="Batch sizes at which both ways are compared.")
]
_Contexts = Annotated[
    str, typer.Option("--context", metavar="N,N", help="Tokens of each sequence in the cache before a pass.")
]
_EveryCount = Annotated[
    bool,
    typer.Option("--every-count", help="Compare at every number of bonus tokens, not at 1, powers of two and all."),
]


@uncollected()
def bonus(
    results: _Results = None,
    model: _Draft = "llama-68m",
    batch_size: _BatchSizes = "5,10",
    context: _Contexts = "128",
    every_count: _EveryCount = False,
    mode: Modes = None,
    device: Device = None,
    dtype: Dtype = None,
    kv_layout: KvLayoutName = "contiguous",
    python: Python = None,
    threads: Threads = None,
    replays: Replays = 200,
    blocks: MicroBlocks = 8,
    seed: MicroSeed = 0,
    output: Output = None,
    output_dir: OutputDir = RESULTS,
    label: Label = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare two ways to backfill the bonus tokens of a draft model: batch expansion, and a prefill pass.

    Exit code: 0 every row has a verdict, 2 a pass that cannot be computed here, 3 a row is inconclusive, 4 a result
    below the least time of its FLOPs and bytes, 5 a run failed. Example: benchctl micro bonus --batch-size 1,8,64
    """
    from benchctl.micro.forward_profile import forward_profile

    code, path = 0, results
    if path is None:
        settings = pass_settings(
            model=model, device=device, dtype=dtype, mode=mode, kv_layout=kv_layout, python=python,
            replays=replays, blocks=blocks, seed=seed, threads=threads,
        )  # fmt: skip
        profile = forward_profile(settings, _points(batch_size, context, every_count=every_count), "bonus")
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            outcome = measure_micro(profile, output_dir, label, directory=output, is_quiet=quiet or as_json)
        code, path = warn_of_failures(outcome), outcome.path
    is_decided = _print_verdict(path, code, as_json=as_json)
    if code or not is_decided:
        raise typer.Exit(code or _INCONCLUSIVE)


def _points(batch_size: str, context: str, *, every_count: bool) -> "tuple[ForwardPoint, ...]":
    """The passes of every context."""
    from benchctl.analysis.bonus.design import bonus_design

    sizes = counts_of(batch_size, "--batch-size")
    designs = [
        bonus_design(sizes, tokens, ("eager",), every_count=every_count)
        for tokens in counts_of(context, "--context")
    ]
    return tuple(dict.fromkeys(point for design in designs for point in design.points))


def _print_verdict(path: Path, code: int, *, as_json: bool) -> bool:
    """Print what the passes say; true if every row has a verdict. Where runs failed, they may say nothing."""
    from benchctl.analysis.bonus.results import measured_bonus
    from benchctl.cli.micro.bonus_output import print_bonus
    from benchctl.report.documents.bonus import bonus_document

    try:
        measured = measured_bonus(path)
    except UsageError:
        if code:
            raise typer.Exit(code) from None
        raise
    if as_json:
        print_json(bonus_document(measured))
    else:
        print_bonus(measured)
    return measured.is_decided
