"""``benchctl micro forward``: decode and prefill passes in every mode, as an experiment with a result directory."""

from pathlib import Path
from typing import Annotated

import typer

from benchctl.cli.micro.experiment import (
    counts_of,
    measure_micro,
    pass_settings,
    print_micro,
    resume_micro,
    words_of,
)
from benchctl.cli.options.experiment import RESULTS, Label, Output, OutputDir, Quiet
from benchctl.profile.sections.ranges import MAX_BLOCKS, MAX_OUTPUTS, MAX_SEED, MAX_THREADS

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
    from benchctl.micro.forward_profile import forward_profile, grid_of_points
    from benchctl.profile.sections.forward_pass import PHASES

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
