"""``benchctl noise``: the stored noise of this machine, which applies to every experiment on it."""

import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.planning import is_repeated_baseline
from benchctl.analysis.validity.machines import age_days
from benchctl.cli.screen import wide_console
from benchctl.errors import RecordError, UsageError
from benchctl.measure.noise_on_file import sound_noise
from benchctl.records.directory import open_results
from benchctl.records.noise import NOISE, NoiseFloor
from benchctl.records.stores import newest_of_each, remove_files
from benchctl.report.table import table_of
from benchctl.units import count_of, percentage

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List, show and store noise floors of this machine, from A/A experiments.",
)

_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]


@app.command("list")
def list_noise(
    history: Annotated[bool, typer.Option("--history", help="Also list older measurements of each key.")] = False,
    as_json: _AsJson = False,
) -> None:
    """List the stored noise by host, engine and model; the newest measurement of each key applies."""
    store, listed = NOISE.directory, NOISE.entries()
    if not history:
        listed = (*newest_of_each(listed), *(entry for entry in listed if entry.content is None))
    documents: list[dict[str, Any]] = []
    rows: list[Sequence[object]] = []
    for entry in listed:
        noise = entry.content
        document = {"key": entry.key, "name": entry.name, "path": str(entry.path), "problem": entry.problem}
        if noise is None:
            documents.append(document)
            rows.append((entry.name, "", "", "", "", "", "", entry.problem))
            continue
        documents.append(document | _document(noise))
        step = noise.metrics.get("step_ms")
        blocks = max((metric.num_blocks for metric in noise.metrics.values()), default=0)
        floor = None if step is None else percentage(step.floor_frac)
        when = (noise.measured_at, _age(noise), noise.source)
        rows.append((entry.key, _engine(noise), noise.model, blocks, floor, *when))
    if as_json:
        print(json.dumps({"store": str(store), "noise": documents}, indent=1))
    elif listed:
        headings = ("key", "engine", "model", "blocks", "floor of step_ms", "when", "age", "from")
        wide_console().print(table_of(headings, rows, left=("key", "engine", "model", "when", "from")))
        print(f"store: {store}")
    else:
        print(f"{store} contains no noise yet; 'benchctl run NAME --aa' measures it")


@app.command("show")
def show(
    what: Annotated[str, typer.Argument(metavar="KEY|DIR", help="Key from the list, or a result directory.")],
    as_json: _AsJson = False,
) -> None:
    """Show noise floor and standard deviation of each metric: of a key, of an A/A experiment, or those a result
    used.
    """
    source, noise = _look_up(what)
    if as_json:
        print(json.dumps({"from": source, **_document(noise)}, indent=1))
        return
    console = wide_console()
    devices = ", ".join(noise.gpus) or "no GPU"
    console.print(f"{source}: {_engine(noise)} with {noise.model} on {noise.host}, {devices}")
    console.print(f"measured {noise.measured_at} ({_age(noise)}) in {noise.source}\n")
    rows = (
        (name, percentage(metric.floor_frac), percentage(metric.log_sd), metric.num_blocks)
        for name, metric in noise.metrics.items()
    )
    console.print(table_of(("metric", "floor", "sd between blocks", "blocks"), rows, left=("metric",)))


@app.command("add")
def add(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Result directory of a finished A/A experiment.")
    ],
) -> None:
    """Store the noise of an A/A experiment for the machine on which it was measured."""
    path = NOISE.add(sound_noise(load_experiment(directory)))
    print(f"stored: {path.parent.name}/{path.stem}")


@app.command("remove")
def remove(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Key with its whole history, or KEY/TIME for one measurement.")
    ],
) -> None:
    """Delete noise from its store; result directories keep their copies."""
    entries = NOISE.find(key)
    remove_files(entries)
    print(f"removed {count_of(len(entries), 'measurement')} of {entries[0].key}")


def _look_up(what: str) -> tuple[str, NoiseFloor]:
    """The noise of a directory or key, with its source; a directory takes precedence over a key of its name."""
    path = Path(what)
    if not path.is_dir():
        entries = NOISE.find(what)
        for entry in entries:
            if entry.content is not None:
                return entry.name, entry.content
        raise RecordError("\n".join(entry.problem or "" for entry in entries))
    if (noise := NOISE.in_results(open_results(path).path)) is not None:
        return what, noise
    experiment = load_experiment(path)
    if is_repeated_baseline(experiment.profile):
        return what, sound_noise(experiment)
    raise UsageError(
        f"{path} has no noise: none was on file when it was measured. 'benchctl compare --noise-floor DIR' "
        "uses that of an A/A experiment"
    )


def _document(noise: NoiseFloor) -> dict[str, Any]:
    return {**msgspec.to_builtins(noise), "age_days": age_days(noise, dt.datetime.now(dt.UTC))}


def _engine(noise: NoiseFloor) -> str:
    return f"{noise.engine} {noise.engine_version or ''}".rstrip()


def _age(noise: NoiseFloor) -> str:
    days = age_days(noise, dt.datetime.now(dt.UTC))
    return "today" if days < 1 else "1 day old" if days == 1 else f"{days} days old"
