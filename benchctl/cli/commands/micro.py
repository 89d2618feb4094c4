"""``benchctl micro roofline``: the peaks that a device reaches, filed with the machine.

Steps that the commands of ``benchctl micro`` share: settings from options, the measurement, its outcome.
Both ways of backfill on the screen, beside the published numbers.
``benchctl micro``: forward passes of a model with random weights, without a server.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args

import msgspec
import typer

from benchctl.analysis.bonus import MeasuredBonus, context_in_words, modes_in_words, verdict_sentences
from benchctl.analysis.summary.analyzed import analyze_directory
from benchctl.cli.checks import keeping
from benchctl.cli.conduct import experiment_progress
from benchctl.cli.options.lists import numbers, words_of
from benchctl.cli.output.verdicts import print_tables
from benchctl.cli.screen import print_json, warn, wide_console
from benchctl.costs.hardware import hardware_or_none
from benchctl.errors import UsageError
from benchctl.formats import count_of, four_digits, percentage
from benchctl.measure.experiment import Listener
from benchctl.measure.result_directory import Origin, reopen_experiment
from benchctl.measure.resume.pending import undone_runs
from benchctl.measure.telemetry.gpu import gpu_inventory
from benchctl.micro.experiment import MicroOutcome, measure_forward, resume_forward
from benchctl.micro.forward_profile import PassSettings
from benchctl.micro.peak_checks import best_of_each, data_sheet_peaks, unit_of
from benchctl.micro.roofline import RooflineSettings, measure_roofline
from benchctl.profile.choices import MAX_BLOCKS, MAX_THREADS, MODES, DataType, KvLayout, Mode
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, plan_runs
from benchctl.records.peaks import PEAKS, MeasuredPeaks, PeakSeries, best_series, hardware_of
from benchctl.records.stores import StoredFile
from benchctl.report.export import write_derived, write_pictures
from benchctl.report.table import table_of
from benchctl.report.tables.times import bonus_table

_MIB: Final = 2**20

_Device = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda:N; by default the first GPU, else the CPU.")
]
_Python = Annotated[
    Path | None,
    typer.Option("--python", metavar="PATH", help="Interpreter that has torch; searched for by default."),
]
_Dtypes = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="NAME,NAME", help="Arithmetic of products: bfloat16, float16, float32, fp8, int8."
    ),
]
_Sizes = Annotated[str | None, typer.Option("--size", metavar="N,N", help="Sides of the square matrices.")]
_Rounds = Annotated[int, typer.Option("--rounds", min=2, max=MAX_BLOCKS, help="Values of each kernel.")]
_BufferMb = Annotated[
    int | None,
    typer.Option(
        "--buffer-mb",
        min=1,
        max=1 << 20,
        help="MiB of a buffer; by default 8 times the last-level cache, and at least 256, of a GPU 2048.",
    ),
]
_ValueMs = Annotated[
    float | None,
    typer.Option("--value-ms", min=0.1, max=60_000, help="Duration of one value; by default 50 on a CPU, else 20."),
]
_Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=MAX_THREADS, help="Threads of a CPU; by default one on each core."),
]
_AllReduce = Annotated[
    int | None,
    typer.Option(
        "--all-reduce",
        min=1,
        max=64,
        metavar="N",
        help="Devices that reduce together; all GPUs by default, 1 for none.",
    ),
]
_Show = Annotated[bool, typer.Option("--show", help="Measure nothing; list what is on file, the newest first.")]
_NoStore = Annotated[bool, typer.Option("--no-store", help="Do not file the peaks.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]


def roofline(
    device: _Device = None,
    python: _Python = None,
    dtype: _Dtypes = None,
    size: _Sizes = None,
    rounds: _Rounds = 9,
    buffer_mb: _BufferMb = None,
    value_ms: _ValueMs = None,
    threads: _Threads = None,
    all_reduce: _AllReduce = None,
    show: _Show = False,
    no_store: _NoStore = False,
    as_json: _AsJson = False,
) -> None:
    """Measure the peaks of a device: matrix products, memory bandwidth, launches, all-reduce.

    They are filed with the machine. '--hardware measured' of other commands, and 'hardware: measured' in a profile,
    take them in place of a data sheet's; a result directory of a real engine on this machine gets a copy.
    """
    if show:
        _show(PEAKS.entries(), as_json=as_json)
        return
    settings = RooflineSettings(
        device=device,
        python=python,
        threads=threads,
        rounds=rounds,
        dtypes=None if dtype is None else tuple(dtype.split(",")),
        sizes=None if size is None else _sizes(size),
        buffer_bytes=None if buffer_mb is None else buffer_mb * _MIB,
        least_s=None if value_ms is None else value_ms / 1e3,
        all_reduce_ranks=all_reduce,
    )
    peaks = measure_roofline(settings)
    path = None if no_store else PEAKS.add(peaks)
    if as_json:
        _print_json(_document(peaks, path))
    else:
        _print_peaks(peaks, path)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = numbers(text, "--size", int, least=16)
    if any(size % 16 for size in sizes):
        raise UsageError(f"--size is {text!r}; write multiples of 16 with commas between them, such as 1024,2048")
    return tuple(sizes)


def _print_peaks(peaks: MeasuredPeaks, path: Path | None) -> None:

    sheet, console = data_sheet_peaks(peaks), wide_console()
    console.print(_heading(peaks))
    console.print()
    rows = []
    for series in best_of_each(peaks):
        unit, scale = unit_of(series)
        figure = sheet.get((series.quantity, series.dtype))
        numbers = [four_digits(value / scale) for value in (series.median, series.low, series.high)]
        of_sheet = ["", ""] if figure is None else [four_digits(figure / scale), percentage(series.median / figure)]
        rows.append((_name(series), _setting(series), *numbers, unit, *of_sheet))
    headings = ("peak", "size", "median", "least", "most", "unit", "data sheet", "of it")
    console.print(table_of(headings, rows, left=("peak", "unit")))
    console.print()
    for dtype, reason in peaks.unmeasured.items():
        console.print(f"not measured: {dtype}: {reason}")
    for warning in peaks.warnings:
        console.print(f"warning: {warning.message} [{warning.code}]")
    console.print(f"as hardware: {hardware_of(peaks).name}")
    console.print("not filed" if path is None else f"filed: {path.parent.name}/{path.stem}")


def _heading(peaks: MeasuredPeaks) -> str:

    threads = "" if peaks.threads is None else f", {count_of(peaks.threads, 'thread')}"
    rounds = len(peaks.series[0].values)
    return (
        f"{peaks.device} of {peaks.host}{threads}, torch {peaks.torch_version}, {rounds} rounds, measured "
        f"{peaks.measured_at}"
    )


def _name(series: PeakSeries) -> str:
    return " ".join((series.quantity, *([] if series.dtype is None else [series.dtype])))


def _setting(series: PeakSeries) -> str:
    if series.quantity in {"copy", "read"}:
        return f"{int(series.setting) // _MIB} MiB"
    return series.setting


def _show(entries: Sequence[StoredFile[MeasuredPeaks]], *, as_json: bool) -> None:
    if as_json:
        peaks = [(entry, entry.content) for entry in entries]
        documents = [
            {"key": entry.key, "name": entry.name, "problem": entry.problem}
            | ({} if each is None else _document(each, entry.path))
            for entry, each in peaks
        ]
        _print_json({"store": str(PEAKS.directory), "peaks": documents})
    elif entries:
        _print_list(entries)
    else:
        print(f"{PEAKS.directory} contains no peaks yet; 'benchctl micro roofline' measures them")


def _print_list(entries: Sequence[StoredFile[MeasuredPeaks]]) -> None:

    headings = ("key", "measured", "bfloat16", "float32", "copy", "read", "launch", "warnings")
    rows: list[Sequence[object]] = []
    for entry in entries:
        if entry.content is None:
            rows.append((entry.name, "", "", "", "", "", "", entry.problem))
        else:
            codes = dict.fromkeys(warning.code for warning in entry.content.warnings)
            rows.append((entry.key, entry.content.measured_at, *_medians(entry.content), ", ".join(codes)))
    console = wide_console()
    console.print(table_of(headings, rows, left=("key", "measured", "warnings")))
    console.print(f"store: {PEAKS.directory}; of each key the newest counts, of a quiet machine if there is one")


def _medians(peaks: MeasuredPeaks) -> list[str]:

    series = [
        best_series(peaks, "matmul", "bfloat16"),
        best_series(peaks, "matmul", "float32"),
        best_series(peaks, "copy"),
        best_series(peaks, "read"),
        best_series(peaks, "launch"),
    ]
    units = [("", 1.0) if each is None else unit_of(each) for each in series]
    return [
        "" if each is None else f"{four_digits(each.median / scale)} {unit}"
        for each, (unit, scale) in zip(series, units, strict=True)
    ]


def _document(peaks: MeasuredPeaks, path: Path | None) -> dict[str, Any]:

    best = [
        {"peak": _name(each), "setting": each.setting, "median": each.median, "low": each.low, "high": each.high}
        for each in best_of_each(peaks)
    ]
    values: dict[str, Any] = msgspec.to_builtins(peaks)
    return {
        "path": None if path is None else str(path),
        "hardware": hardware_of(peaks).name,
        "best": best,
        **values,
    }


def _print_json(document: dict[str, Any]) -> None:

    print_json(document)


WordT = TypeVar("WordT", bound=str)
A_RUN_IS_BELOW_FLOOR: Final = 4
A_RUN_FAILED: Final = 5


def pass_settings(
    *,
    model: str,
    device: str | None,
    dtype: str | None,
    mode: str | None,
    kv_layout: str,
    python: Path | None,
    replays: int,
    blocks: int,
    seed: int,
    threads: int | None = None,
) -> PassSettings:
    """The settings that all passes of an experiment share; those that are not named depend on the device.

    Raises UsageError for unknown names, and for graphs without a GPU.
    """
    gpu = _gpu_name(device)
    where = device or ("cpu" if gpu is None else "cuda:0")
    modes = words_of(mode, MODES, "--mode") if mode is not None else _modes_on(where)
    if "graph" in modes and where == "cpu":
        raise UsageError(
            "--mode is graph, and a CPU has no graphs; leave --mode out, or name a GPU with --device cuda:0"
        )
    dtypes: tuple[DataType, ...] = get_args(DataType)
    layouts: tuple[KvLayout, ...] = get_args(KvLayout)
    hardware = None if gpu is None else hardware_or_none(gpu)
    return PassSettings(
        model=model,
        device=where,
        dtype=words_of(dtype or ("float32" if where == "cpu" else "bfloat16"), dtypes, "--dtype")[0],
        modes=tuple(word for word in MODES if word in modes),
        kv_layout=words_of(kv_layout, layouts, "--kv-layout")[0],
        hardware=None if hardware is None else hardware.name,
        python=None if python is None else str(python),
        blocks=blocks,
        replays=replays,
        seed=seed,
        threads=threads or (_threads_on_cpu() if where == "cpu" else None),
    )


def _threads_on_cpu() -> int:
    """One for each core but one: threads that wait for the one whose core another program has taken spin."""
    return max(len(os.sched_getaffinity(0)) - 1, 1)


def _modes_on(device: str) -> tuple[Mode, ...]:
    return ("eager",) if device == "cpu" else ("eager", "graph")


def _gpu_name(device: str | None) -> str | None:
    """Name of the GPU that ``device`` names, or of the first one; None without any."""
    if device == "cpu":
        return None
    number = int((device or "cuda:0").partition(":")[2] or 0) if _is_cuda(device) else 0
    gpus = gpu_inventory()
    return gpus[number].name if number < len(gpus) else None


def _is_cuda(device: str | None) -> bool:
    """Raises UsageError for a device that is neither ``cpu`` nor ``cuda:N``."""
    name, _, number = (device or "cuda:0").partition(":")
    if name != "cuda" or (number and not number.isdecimal()):
        raise UsageError(f"--device is {device!r}; write cpu, or cuda:0 for the first GPU")
    return True


def measure_micro(
    profile: Profile, output_dir: Path, label: str | None, *, directory: Path | None, is_quiet: bool
) -> MicroOutcome:
    """Measure an experiment of forward passes in a new directory: ``directory``, or one below ``output_dir``."""
    argv = ("benchctl", *sys.argv[1:])
    origin = Origin(output_root=output_dir, label=label, argv=argv, directory=directory)
    paths: list[Path] = []
    with _progress(len(plan_runs(profile).runs), profile, is_quiet=is_quiet) as listener, _advice(paths):
        return measure_forward(profile, origin, listener, on_results=lambda results: _announce(results.path, paths))


def resume_micro(path: Path, *, is_quiet: bool) -> MicroOutcome:
    """Measure the runs of an earlier experiment that are not done."""
    reopened = reopen_experiment(path, None)
    print(f"continuing {path}", flush=True)
    pending = undone_runs(reopened.results)
    with _progress(len(pending), reopened.profile, is_quiet=is_quiet) as listener, _advice([path]):
        return resume_forward(reopened, listener)


def print_micro(outcome: MicroOutcome) -> None:
    """Print what an experiment came to; ends the command with its exit code."""
    path = shlex.quote(str(outcome.path))
    with keeping(outcome.path):
        analysis = analyze_directory(outcome.path)
        files = write_derived(analysis)
        print_tables(analysis)
        print(f"\ndetails: benchctl show {path}; page: {outcome.path / 'report.html'}", flush=True)
        write_pictures(analysis, files)
    if code := warn_of_failures(outcome):
        raise typer.Exit(code)


def warn_of_failures(outcome: MicroOutcome) -> int:
    """Warn of runs that count nowhere; returns the exit code that they mean, 0 without any."""
    counts, path = outcome.outcome, shlex.quote(str(outcome.path))
    if outcome.below_floor:
        warn(f"{len(outcome.below_floor)} runs took less time than their FLOPs and bytes allow, and count nowhere")
    if counts.num_failed > len(outcome.below_floor):
        warn(f"{counts.num_failed} runs failed; repeat them with: benchctl micro forward --resume {path}")
    if outcome.below_floor:
        return A_RUN_IS_BELOW_FLOOR
    return A_RUN_FAILED if counts.num_failed else 0


@contextmanager
def _progress(num_runs: int, profile: Profile, *, is_quiet: bool) -> Iterator[Listener]:

    is_quiet = is_quiet or bool(os.environ.get("CI"))
    with experiment_progress(num_runs, len(arms(profile)), is_quiet=is_quiet) as listener:
        yield listener


@contextmanager
def _advice(paths: list[Path]) -> Iterator[None]:
    """After an interrupt, say how to go on with the directory that is in ``paths`` by then."""
    try:
        yield
    except KeyboardInterrupt:
        for path in paths:
            again = shlex.join(["benchctl", "micro", "forward", "--resume", str(path)])
            print(f"interrupted; results until now are kept. Continue with: {again}", file=sys.stderr)
        raise


def _announce(path: Path, paths: list[Path]) -> None:
    paths.append(path)
    print(f"results in {path}", flush=True)


def print_bonus(measured: MeasuredBonus) -> None:
    """Print a table for each context and pair of modes and what follows."""
    console = wide_console()
    for design, verdict in measured.verdicts:
        console.print(f"{measured.where}, {context_in_words(design)}; ms")
        for modes in verdict.mode_pairs:
            console.print()
            console.print(modes_in_words(*modes), style="bold")
            console.print(bonus_table(verdict, modes))
        console.print()
        for sentence in verdict_sentences(verdict):
            console.print(f"* {sentence}")
        console.print()
    for sentence in measured.missing:
        console.print(f"* {sentence}")
