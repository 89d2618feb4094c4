"""``benchctl noise``: the stored noise of this machine, which applies to every experiment on it."""

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.planning import precision_on_file, sound_noise
from benchctl.analysis.validity.machines import age_days
from benchctl.cli.options import AsJson
from benchctl.cli.screen import say, tell
from benchctl.errors import RecordError, UsageError
from benchctl.profile.planning import is_repeated_baseline
from benchctl.records.directory import open_results
from benchctl.records.stores import NOISE, NoiseFloor, newest_of_each, remove_files
from benchctl.report.experiment_tables import PARTS_OF_SCATTER, in_percent
from benchctl.report.table import table_of
from benchctl.steptime.speculation_law import Estimate
from benchctl.units import count_of, percentage

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List, show and store noise floors of this machine, from A/A experiments.",
)


@app.command("list")
def list_noise(
    history: Annotated[bool, typer.Option("--history", help="Also list older measurements of each key.")] = False,
    as_json: AsJson = False,
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
        rows.append(
            (entry.key, _engine(noise), noise.model, blocks, floor, noise.measured_at, _age(noise), noise.source)
        )
    headings = ("key", "engine", "model", "blocks", "floor of step_ms", "when", "age", "from")
    lines = (
        (table_of(headings, rows, left=("key", "engine", "model", "when", "from")), f"store: {store}")
        if rows
        else (f"{store} contains no noise yet; 'benchctl run NAME --aa' measures it",)
    )
    tell({"store": str(store), "noise": documents}, *lines, as_json=as_json)


@app.command("show")
def show(
    what: Annotated[str, typer.Argument(metavar="KEY|DIR", help="Key from the list, or a result directory.")],
    as_json: AsJson = False,
) -> None:
    """Show noise floor and standard deviation of each metric: of a key, of an A/A experiment, or those a result
    used.
    """
    source, noise = _look_up(what)
    devices = ", ".join(noise.gpus) or "no GPU"
    parts = PARTS_OF_SCATTER if noise.num_loads > 1 else {}
    rows = (
        (
            *(name, percentage(metric.floor_frac), percentage(metric.log_sd), metric.num_blocks),
            *("" if (ends := getattr(metric, part)) is None else in_percent(Estimate(*ends)) for part in parts),
        )
        for name, metric in noise.metrics.items()
    )
    precision = precision_on_file(noise)
    tell(
        {"from": source, **_document(noise)},
        f"{source}: {_engine(noise)} with {noise.model} on {noise.host}, {devices}",
        f"measured {noise.measured_at} ({_age(noise)}) in {noise.source}\n",
        table_of(("metric", "floor", "sd between blocks", "blocks", *parts.values()), rows, left=("metric",)),
        *([] if precision is None else [f"precision: {precision}"]),
        as_json=as_json,
    )


@app.command("add")
def add(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Result directory of a finished A/A experiment.")
    ],
) -> None:
    """Store the noise of an A/A experiment for the machine on which it was measured."""
    path = NOISE.add(sound_noise(load_experiment(directory)))
    say(f"stored: {path.parent.name}/{path.stem}")


@app.command("remove")
def remove(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Key with its whole history, or KEY/TIME for one measurement.")
    ],
) -> None:
    """Delete noise from its store; result directories keep their copies."""
    entries = NOISE.find(key)
    remove_files(entries)
    say(f"removed {count_of(len(entries), 'measurement')} of {entries[0].key}")


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
