"""``benchctl micro roofline``: the peaks that a device reaches, filed with the machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from benchctl.errors import UsageError
from benchctl.profile.sections.ranges import MAX_BLOCKS, MAX_THREADS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.records.peaks import MeasuredPeaks, PeakSeries
    from benchctl.records.stores.peaks_store import StoredPeaks

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
    from benchctl.micro.roofline import RooflineSettings, measure_roofline
    from benchctl.records.stores.peaks_store import peaks_directory, store_peaks, stored_peaks

    store = peaks_directory()
    if show:
        _show(store, stored_peaks(store), as_json=as_json)
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
    path = None if no_store else store_peaks(store, peaks)
    if as_json:
        _print_json(_document(peaks, path))
    else:
        _print_peaks(peaks, path)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 16 or any(size % 16 for size in sizes):
        raise UsageError(f"--size is {text!r}; write multiples of 16 with commas between them, such as 1024,2048")
    return sizes


def _print_peaks(peaks: "MeasuredPeaks", path: Path | None) -> None:
    from rich.table import Table

    from benchctl.cli.output.screen import wide_console
    from benchctl.formats import four_digits, percentage
    from benchctl.micro.peak_checks import best_of_each, data_sheet_peaks, unit_of
    from benchctl.records.peaks import hardware_of

    sheet, console = data_sheet_peaks(peaks), wide_console()
    console.print(_heading(peaks))
    console.print()
    table = Table(box=None, pad_edge=False)
    for title in ("peak", "size", "median", "least", "most", "unit", "data sheet", "of it"):
        table.add_column(title, justify="left" if title in {"peak", "unit"} else "right")
    for series in best_of_each(peaks):
        unit, scale = unit_of(series)
        figure = sheet.get((series.quantity, series.dtype))
        numbers = [four_digits(value / scale) for value in (series.median, series.low, series.high)]
        of_sheet = ["", ""] if figure is None else [four_digits(figure / scale), percentage(series.median / figure)]
        table.add_row(_name(series), _setting(series), *numbers, unit, *of_sheet)
    console.print(table)
    console.print()
    for dtype, reason in peaks.unmeasured.items():
        console.print(f"not measured: {dtype}: {reason}")
    for warning in peaks.warnings:
        console.print(f"warning: {warning.message} [{warning.code}]")
    console.print(f"as hardware: {hardware_of(peaks).name}")
    console.print("not filed" if path is None else f"filed: {path.parent.name}/{path.stem}")


def _heading(peaks: "MeasuredPeaks") -> str:
    from benchctl.formats import count_of

    threads = "" if peaks.threads is None else f", {count_of(peaks.threads, 'thread')}"
    rounds = len(peaks.series[0].values)
    return (
        f"{peaks.device} of {peaks.host}{threads}, torch {peaks.torch_version}, {rounds} rounds, measured "
        f"{peaks.measured_at}"
    )


def _name(series: "PeakSeries") -> str:
    return " ".join((series.quantity, *([] if series.dtype is None else [series.dtype])))


def _setting(series: "PeakSeries") -> str:
    if series.quantity in {"copy", "read"}:
        return f"{int(series.setting) // _MIB} MiB"
    return series.setting


def _show(store: Path, entries: "Sequence[StoredPeaks]", *, as_json: bool) -> None:
    if as_json:
        peaks = [(entry, entry.content) for entry in entries]
        documents = [
            {"key": entry.key, "name": entry.name, "problem": entry.problem}
            | ({} if each is None else _document(each, entry.path))
            for entry, each in peaks
        ]
        _print_json({"store": str(store), "peaks": documents})
    elif entries:
        _print_list(store, entries)
    else:
        print(f"{store} contains no peaks yet; 'benchctl micro roofline' measures them")


def _print_list(store: Path, entries: "Sequence[StoredPeaks]") -> None:
    from rich.table import Table

    from benchctl.cli.output.screen import wide_console

    table = Table(box=None, pad_edge=False)
    titles = ("key", "measured", "bfloat16", "float32", "copy", "read", "launch", "warnings")
    for title in titles:
        table.add_column(title, justify="left" if title in {"key", "measured", "warnings"} else "right")
    for entry in entries:
        if entry.content is None:
            table.add_row(entry.name, "", "", "", "", "", "", entry.problem)
        else:
            codes = dict.fromkeys(warning.code for warning in entry.content.warnings)
            table.add_row(entry.key, entry.content.measured_at, *_medians(entry.content), ", ".join(codes))
    console = wide_console()
    console.print(table)
    console.print(f"store: {store}; of each key the newest counts, of a quiet machine if there is one")


def _medians(peaks: "MeasuredPeaks") -> list[str]:
    from benchctl.formats import four_digits
    from benchctl.micro.peak_checks import unit_of
    from benchctl.records.peaks import best_series

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


def _document(peaks: "MeasuredPeaks", path: Path | None) -> dict[str, Any]:
    import msgspec

    from benchctl.micro.peak_checks import best_of_each
    from benchctl.records.peaks import hardware_of

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
    from benchctl.cli.output.screen import print_json

    print_json(document)
