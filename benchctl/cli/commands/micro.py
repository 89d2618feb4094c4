"""``benchctl micro``: single forward passes of a model with random weights, and the peaks of a device.

``roofline`` measures and files the peaks, ``forward`` is an experiment of passes in every mode, ``bonus`` judges
batch expansion against a prefill pass for the bonus tokens of a draft model.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import msgspec
import typer
from rich.text import Text

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.bonus import (
    MeasuredBonus,
    bonus_design,
    context_in_words,
    measured_bonus,
    modes_in_words,
    points_of,
    verdict_sentences,
)
from benchctl.cli.conduct import experiment_progress, to_stderr
from benchctl.cli.failures import advising, exit_code_of, keeping
from benchctl.cli.options import (
    RESULTS,
    AsJson,
    Label,
    Output,
    OutputDir,
    Quiet,
    numbers,
    with_options,
    words_of,
)
from benchctl.cli.outcome import print_tables_and_notes
from benchctl.cli.screen import say, tell, warn
from benchctl.costs.hardware import hardware_or_none
from benchctl.errors import UsageError
from benchctl.measure.directory import Origin, reopen_experiment, undone_runs
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.micro.experiment import MicroOutcome, forward_profile, grid_of_points, measure_forward, resume_forward
from benchctl.micro.peaks import best_of_each, data_sheet_peaks, measure_roofline, name_of, unit_of
from benchctl.profile.bounds import MAX_BLOCKS, MAX_OUTPUTS, MAX_SEED, MAX_THREADS
from benchctl.profile.choices import MODES, PHASES, DataType, KvLayout, Mode
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, plan_runs
from benchctl.records.directory import ResultDirectory
from benchctl.records.peaks import PEAKS, MeasuredPeaks, PeakQuantity, PeakSeries, best_series, hardware_of
from benchctl.report.export import drawing, write_derived, write_pictures
from benchctl.report.model_documents import bonus_document
from benchctl.report.table import Column, Table, table_of
from benchctl.report.time_tables import bonus_table
from benchctl.units import count_of, four_digits, percentage

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure single forward passes, and the peaks of a device, with torch and without a server.",
)

_MIB: Final = 2**20
_LISTED: Final[dict[str, tuple[PeakQuantity, str | None]]] = {
    "bfloat16": ("matmul", "bfloat16"),
    "float32": ("matmul", "float32"),
    "copy": ("copy", None),
    "read": ("read", None),
    "launch": ("launch", None),
}
"""Columns of the list of peaks, and the quantity and data type of each."""
_INCONCLUSIVE: Final = 3

_Device = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda:N; by default the first GPU, else the CPU.")
]
_Python = Annotated[
    Path | None,
    typer.Option("--python", metavar="PATH", help="Interpreter that has torch; searched for by default."),
]


@app.command("roofline")
def roofline(
    device: _Device = None,
    python: _Python = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Arithmetic of products: bfloat16, float16, float32, fp8, int8."),
    ] = None,
    size: Annotated[str | None, typer.Option(metavar="N,N", help="Sides of the square matrices.")] = None,
    rounds: Annotated[int, typer.Option(min=2, max=MAX_BLOCKS, help="Values of each kernel.")] = 9,
    buffer_mb: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 20,
            help="MiB of a buffer; by default 8 times the last-level cache, and at least 256, of a GPU 2048.",
        ),
    ] = None,
    value_ms: Annotated[
        float | None,
        typer.Option(min=0.1, max=60_000, help="Duration of one value; by default 50 on a CPU, else 20."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_THREADS, help="Threads of a CPU; by default one on each core."),
    ] = None,
    all_reduce: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, metavar="N", help="Devices that reduce together; all GPUs by default, 1 for none."
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Measure nothing; list what is on file, the newest first.")
    ] = False,
    no_store: Annotated[bool, typer.Option("--no-store", help="Do not file the peaks.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the peaks of a device: matrix products, memory bandwidth, launches, all-reduce.

    They are filed with the machine. '--hardware measured' of other commands, and 'hardware: measured' in a profile,
    take them in place of a data sheet's; a result directory of a real engine on this machine gets a copy.
    """
    if show:
        _show_filed(as_json=as_json)
        return
    peaks = measure_roofline(
        device=device,
        python=python,
        threads=threads,
        rounds=rounds,
        dtypes=None if dtype is None else tuple(dtype.split(",")),
        sizes=None if size is None else tuple(numbers(size, "--size", int, least=16, multiple_of=16)),
        buffer_bytes=None if buffer_mb is None else buffer_mb * _MIB,
        least_s=None if value_ms is None else value_ms / 1e3,
        all_reduce_ranks=all_reduce,
    )
    path = None if no_store else PEAKS.add(peaks)
    tell(_document(peaks, path), *_peak_lines(peaks, path), as_json=as_json)


def _peak_lines(peaks: MeasuredPeaks, path: Path | None) -> Iterator[Table | str]:
    sheet, rows = data_sheet_peaks(peaks), []
    threads = "" if peaks.threads is None else f", {count_of(peaks.threads, 'thread')}"
    rounds = f"{len(peaks.series[0].values)} rounds, measured {peaks.measured_at}\n"
    yield f"{peaks.device} of {peaks.host}{threads}, torch {peaks.torch_version}, {rounds}"
    for series in best_of_each(peaks):
        unit, scale = unit_of(series)
        figure = sheet.get((series.quantity, series.dtype))
        size = f"{int(series.setting) // _MIB} MiB" if series.quantity in {"copy", "read"} else series.setting
        values = [four_digits(value / scale) for value in (series.median, min(series.values), max(series.values))]
        of_sheet = ["", ""] if figure is None else [four_digits(figure / scale), percentage(series.median / figure)]
        rows.append((name_of(series), size, *values, unit, *of_sheet))
    headings = ("peak", "size", "median", "least", "most", "unit", "data sheet", "of it")
    yield table_of(headings, rows, left=("peak", "unit"))
    yield ""
    yield from (f"not measured: {dtype}: {reason}" for dtype, reason in peaks.unmeasured.items())
    yield from (f"warning: {warning.message} [{warning.code}]" for warning in peaks.warnings)
    yield f"as hardware: {hardware_of(peaks).name}"
    yield "not filed" if path is None else f"filed: {path.parent.name}/{path.stem}"


def _show_filed(*, as_json: bool) -> None:
    """Print all peaks that are on file; those that cannot be read with the reason."""
    documents: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for entry in PEAKS.entries():
        peaks, document = entry.content, {"key": entry.key, "name": entry.name, "problem": entry.problem}
        if peaks is None:
            documents.append(document)
            rows.append({"key": entry.name, "warnings": entry.problem})
            continue
        documents.append(document | _document(peaks, entry.path))
        best = {name: best_series(peaks, *of_peak) for name, of_peak in _LISTED.items()}
        codes = ", ".join(dict.fromkeys(warning.code for warning in peaks.warnings))
        medians = {name: _median(series) for name, series in best.items() if series is not None}
        rows.append({"key": entry.key, "measured": peaks.measured_at, "warnings": codes, **medians})
    headings = ("key", "measured", *_LISTED, "warnings")
    lines: tuple[Table | str, ...] = (
        Table("", tuple(Column(name, name, is_left=name not in _LISTED) for name in headings), tuple(rows)),
        f"store: {PEAKS.directory}; of each key the newest counts, of a quiet machine if there is one",
    )
    if not rows:
        lines = (f"{PEAKS.directory} contains no peaks yet; 'benchctl micro roofline' measures them",)
    tell({"store": str(PEAKS.directory), "peaks": documents}, *lines, as_json=as_json)


def _median(series: PeakSeries) -> str:
    unit, scale = unit_of(series)
    return f"{four_digits(series.median / scale)} {unit}"


def _document(peaks: MeasuredPeaks, path: Path | None) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(peaks)
    best = [
        {
            "peak": name_of(each),
            "setting": each.setting,
            "median": each.median,
            "low": min(each.values),
            "high": max(each.values),
        }
        for each in best_of_each(peaks)
    ]
    return {
        "path": None if path is None else str(path),
        "hardware": hardware_of(peaks).name,
        "best": best,
        **values,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """The passes of an experiment, and its directory."""

    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="Built-in shape, or a directory with a config.json; weights are random."
        ),
    ] = "llama-68m"
    batch_size: Annotated[str, typer.Option(metavar="N,N", help="Sequences of a pass, one or several.")] = "5,10"
    context: Annotated[
        str, typer.Option(metavar="N,N", help="Tokens of each sequence in the cache before a pass.")
    ] = "128"
    mode: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="eager, graph or both; by default all that the device has."),
    ] = None
    device: _Device = None
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; by default bfloat16 on a GPU, float32 on a CPU."),
    ] = None
    kv_layout: Annotated[str, typer.Option(help="Key-value cache: contiguous or paged.")] = "contiguous"
    python: _Python = None
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_THREADS, help="Threads of an operator on a CPU; by default one for each core but one."
        ),
    ] = None
    replays: Annotated[
        int, typer.Option(min=1, max=MAX_OUTPUTS, help="Timed passes of each point and mode, over all blocks.")
    ] = 200
    blocks: Annotated[
        int, typer.Option(min=1, max=MAX_BLOCKS, help="Complete replicates, each in a process of its own.")
    ] = 8
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of weights, tokens and the order of runs.")
    ] = 0
    output: Output = None
    output_dir: OutputDir = RESULTS
    label: Label = None
    quiet: Quiet = False

    def settings(self) -> dict[str, Any]:
        """The settings of ``forward_profile``; those that are not named depend on the device.

        Raises UsageError for unknown names, and for graphs without a GPU.
        """
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d*)?", self.device, re.ASCII):
            raise UsageError(f"--device is {self.device!r}; write cpu, or cuda:0 for the first GPU")
        gpus = () if self.device == "cpu" else gpu_inventory()
        number = int((self.device or "").partition(":")[2] or 0)
        gpu = gpus[number].name if number < len(gpus) else None
        device = self.device or ("cpu" if gpu is None else "cuda:0")
        is_cpu = device == "cpu"
        modes: tuple[Mode, ...] = ("eager",) if is_cpu else ("eager", "graph")
        if self.mode is not None:
            modes = words_of(self.mode, MODES, "--mode")
        if "graph" in modes and is_cpu:
            raise UsageError(
                "--mode is graph, and a CPU has no graphs; leave --mode out, or name a GPU with --device cuda:0"
            )
        dtypes: tuple[DataType, ...] = get_args(DataType)
        layouts: tuple[KvLayout, ...] = get_args(KvLayout)
        hardware = None if gpu is None else hardware_or_none(gpu)
        # One thread for each core but one: threads that wait for the one whose core another program has taken spin.
        num_threads = max(len(os.sched_getaffinity(0)) - 1, 1) if is_cpu else None
        return {
            "model": self.model,
            "device": device,
            "dtype": words_of(self.dtype or ("float32" if is_cpu else "bfloat16"), dtypes, "--dtype")[0],
            "modes": tuple(word for word in MODES if word in modes),
            "kv_layout": words_of(self.kv_layout, layouts, "--kv-layout")[0],
            "hardware": None if hardware is None else hardware.name,
            "python": None if self.python is None else str(self.python),
            "blocks": self.blocks,
            "replays": self.replays,
            "seed": self.seed,
            "threads": self.threads or num_threads,
        }


@app.command("forward")
@with_options
def forward(
    *,
    passes: PassOptions,
    prompt: Annotated[str, typer.Option(metavar="N,N", help="Tokens of each sequence in a prefill.")] = "4",
    phase: Annotated[str, typer.Option(metavar="NAME,NAME", help="decode, prefill or both.")] = "decode,prefill",
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue DIR: measure the runs that are not done.")
    ] = None,
) -> None:
    """Measure forward passes of a model with random weights: eager, and as CUDA graphs on a GPU.

    Each block is a process of its own, in which every point and mode is measured in a balanced order. Exit code: 0
    measured, 2 a pass that cannot be computed here, 4 a result below the least time of its FLOPs and bytes, 5 a run
    failed. Example: benchctl micro forward --model llama-68m --batch-size 5,10
    """
    if resume is None:
        points = grid_of_points(
            words_of(phase, PHASES, "--phase"),
            _counts(passes.batch_size, "--batch-size"),
            _counts(passes.context, "--context", least=0),
            _counts(prompt, "--prompt"),
        )
        outcome = _measured(forward_profile(points, **passes.settings()), passes, is_quiet=passes.quiet)
    else:
        outcome = _resumed(resume, is_quiet=passes.quiet)
    with keeping(outcome.path), drawing() as draw:
        analysis = analyze_directory(outcome.path)
        files = write_derived(analysis, draw)
        print_tables_and_notes(analysis)
        path = shlex.quote(str(outcome.path))
        say(f"\ndetails: benchctl show {path}; page: {outcome.path / 'report.html'}")
        write_pictures(analysis, files)
    raise typer.Exit(_warned_of_failures(outcome))


@app.command("bonus")
@with_options
def bonus(
    results: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="Result directory of 'micro' to judge; by default a new one is measured."
        ),
    ] = None,
    every_count: Annotated[
        bool,
        typer.Option(
            "--every-count", help="Compare at every number of bonus tokens, not at 1, powers of two and all."
        ),
    ] = False,
    *,
    passes: PassOptions,
    as_json: AsJson = False,
) -> None:
    """Compare two ways to backfill the bonus tokens of a draft model: batch expansion, and a prefill pass.

    Exit code: 0 every row has a verdict, 2 a pass that cannot be computed here, 3 a row is inconclusive, 4 a result
    below the least time of its FLOPs and bytes, 5 a run failed. Example: benchctl micro bonus --batch-size 1,8,64
    """
    code = 0
    if results is None:
        sizes = _counts(passes.batch_size, "--batch-size")
        designs = [
            bonus_design(sizes, tokens, ("eager",), every_count=every_count)
            for tokens in _counts(passes.context, "--context")
        ]
        points = tuple(dict.fromkeys(point for design in designs for point in points_of(design)))
        profile = forward_profile(points, **passes.settings(), name="bonus")
        with to_stderr(when=as_json):
            outcome = _measured(profile, passes, is_quiet=passes.quiet or as_json)
        code, results = _warned_of_failures(outcome), outcome.path
    try:
        measured = measured_bonus(results)
    except UsageError:
        if code:  # where runs failed, the others may say nothing
            raise typer.Exit(code) from None
        raise
    tell(bonus_document(measured), *_bonus_lines(measured), as_json=as_json)
    raise typer.Exit(code or (0 if measured.is_decided else _INCONCLUSIVE))


def _counts(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """Whole numbers from ``least`` up, each once."""
    return tuple(dict.fromkeys(numbers(text, option, int, least=least)))


def _measured(profile: Profile, passes: PassOptions, *, is_quiet: bool) -> MicroOutcome:
    """Measure an experiment of forward passes in a new directory."""
    origin = Origin(
        output_root=passes.output_dir,
        argv=("benchctl", *sys.argv[1:]),
        label=passes.label,
        directory=passes.output,
    )
    progress = experiment_progress(len(plan_runs(profile).runs), len(arms(profile)), is_quiet=is_quiet)
    with progress as listener, ExitStack() as stack:

        def announce(results: ResultDirectory) -> None:
            say(f"results in {results.path}")
            stack.enter_context(advising(_next_step(results.path)))

        return measure_forward(profile, origin, listener, on_results=announce)


def _resumed(path: Path, *, is_quiet: bool) -> MicroOutcome:
    """Measure the runs of an earlier experiment that are not done."""
    reopened = reopen_experiment(path, None)
    say(f"continuing {path}")
    num_runs, num_arms = len(undone_runs(reopened.results)), len(arms(reopened.profile))
    progress = experiment_progress(num_runs, num_arms, is_quiet=is_quiet)
    with progress as listener, advising(_next_step(path)):
        return resume_forward(reopened, listener)


def _next_step(path: Path) -> str:
    return f"Continue with: {shlex.join(['benchctl', 'micro', 'forward', '--resume', str(path)])}"


def _warned_of_failures(outcome: MicroOutcome) -> int:
    """Warn of runs that count nowhere; returns the exit code that they mean, 0 without any."""
    num_below, num_failed = len(outcome.below_floor), outcome.outcome.num_failed
    if num_below:
        warn(f"{num_below} runs took less time than their FLOPs and bytes allow, and count nowhere")
    if num_failed > num_below:
        path = shlex.quote(str(outcome.path))
        warn(f"{num_failed} runs failed; repeat them with: benchctl micro forward --resume {path}")
    return exit_code_of(0 if num_below else num_failed, num_below)


def _bonus_lines(measured: MeasuredBonus) -> Iterator[Table | Text | str]:
    """A table for each context and pair of modes and what follows."""
    for verdict in measured.verdicts:
        yield f"{measured.where}, {context_in_words(verdict)}; ms"
        for modes in verdict.mode_pairs:
            yield ""
            yield Text(modes_in_words(*modes), style="bold")
            yield bonus_table(verdict, modes)
        yield ""
        yield from (f"* {sentence}" for sentence in verdict_sentences(verdict))
        yield ""
    yield from (f"* {sentence}" for sentence in measured.missing)
