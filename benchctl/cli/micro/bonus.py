"""``benchctl micro forward``: decode and prefill passes in every mode, as an experiment with a result directory.

``benchctl micro bonus``: batch expansion against a prefill pass for the bonus tokens of a draft model.
"""

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Final

import typer

from benchctl.analysis.bonus import bonus_design, measured_bonus
from benchctl.cli.commands.micro import (
    measure_micro,
    pass_settings,
    print_bonus,
    print_micro,
    resume_micro,
    roofline,
    warn_of_failures,
)
from benchctl.cli.options.lists import counts_of, words_of
from benchctl.cli.options.options import RESULTS, AsJson, Label, Output, OutputDir, Quiet
from benchctl.cli.screen import print_json, uncollected
from benchctl.errors import UsageError
from benchctl.micro.forward_profile import forward_profile, grid_of_points
from benchctl.profile.choices import MAX_BLOCKS, MAX_OUTPUTS, MAX_SEED, MAX_THREADS, PHASES, ForwardPoint
from benchctl.report.model_documents import bonus_document

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Built-in shape, or a directory with a config.json; weights are random."),
]
BatchSizes = Annotated[
    str, typer.Option("--batch-size", metavar="N,N", help="Sequences of a pass, one or several.")
]
Contexts = Annotated[
    str, typer.Option("--context", metavar="N,N", help="Tokens of each sequence in the cache before a decode.")
]
Prompts = Annotated[str, typer.Option("--prompt", metavar="N,N", help="Tokens of each sequence in a prefill.")]
Phases = Annotated[str, typer.Option("--phase", metavar="NAME,NAME", help="decode, prefill or both.")]
Modes = Annotated[
    str | None,
    typer.Option("--mode", metavar="NAME,NAME", help="eager, graph or both; by default all that the device has."),
]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda:N; by default the first GPU, else the CPU.")
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="float32, bfloat16 or float16; by default bfloat16 on a GPU, float32 on a CPU."),
]
KvLayoutName = Annotated[str, typer.Option("--kv-layout", help="Key-value cache: contiguous or paged.")]
Python = Annotated[
    Path | None,
    typer.Option("--python", metavar="PATH", help="Interpreter that has torch; searched for by default."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=MAX_THREADS,
        help="Threads of an operator on a CPU; by default one for each core but one.",
    ),
]
Replays = Annotated[
    int,
    typer.Option("--replays", min=1, max=MAX_OUTPUTS, help="Timed passes of each point and mode, over all blocks."),
]
MicroBlocks = Annotated[
    int, typer.Option("--blocks", min=1, max=MAX_BLOCKS, help="Complete replicates, each in a process of its own.")
]
MicroSeed = Annotated[
    int, typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of weights, tokens and the order of runs.")
]
ResumeDir = Annotated[
    Path | None, typer.Option("--resume", metavar="DIR", help="Continue DIR: measure the runs that are not done.")
]


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure single forward passes, and the peaks of a device, with torch and without a server.",
)
app.command("roofline")(roofline)


@app.command("forward")
def forward(
    model: Model = "llama-68m",
    batch_size: BatchSizes = "5,10",
    context: Contexts = "128",
    prompt: Prompts = "4",
    phase: Phases = "decode,prefill",
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
    resume: ResumeDir = None,
    quiet: Quiet = False,
) -> None:
    """Measure forward passes of a model with random weights: eager, and as CUDA graphs on a GPU.

    Each block is a process of its own, in which every point and mode is measured in a balanced order. Exit code: 0
    measured, 2 a pass that cannot be computed here, 4 a result below the least time of its FLOPs and bytes, 5 a run
    failed. Example: benchctl micro forward --model llama-68m --batch-size 5,10
    """
    if resume is not None:
        print_micro(resume_micro(resume, is_quiet=quiet))
        return
    settings = pass_settings(
        model=model, device=device, dtype=dtype, mode=mode, kv_layout=kv_layout, python=python,
        replays=replays, blocks=blocks, seed=seed, threads=threads,
    )  # fmt: skip
    points = grid_of_points(
        words_of(phase, PHASES, "--phase"),
        counts_of(batch_size, "--batch-size"),
        counts_of(context, "--context", least=0),
        counts_of(prompt, "--prompt"),
    )
    profile = forward_profile(settings, points)
    print_micro(measure_micro(profile, output_dir, label, directory=output, is_quiet=quiet))


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
@app.command("bonus")
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


def _points(batch_size: str, context: str, *, every_count: bool) -> tuple[ForwardPoint, ...]:
    """The passes of every context."""
    sizes = counts_of(batch_size, "--batch-size")
    designs = [
        bonus_design(sizes, tokens, ("eager",), every_count=every_count)
        for tokens in counts_of(context, "--context")
    ]
    return tuple(dict.fromkeys(point for design in designs for point in design.points))


def _print_verdict(path: Path, code: int, *, as_json: bool) -> bool:
    """Print what the passes say; true if every row has a verdict. Where runs failed, they may say nothing."""
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
