"""Load points of a ladder: each is judged as an experiment of its load alone would be."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.results.ladders import LADDER, alone, runs_at
from support.results.several import simulated

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze, analyze_directory
from benchctl.analysis.experiment.columns import SUMMARY_COLUMNS
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import baseline_pairs
from benchctl.profile.settings import load_part, load_points, server_part
from benchctl.records.directory import ResultDirectory, arm_label, cell_name
from benchctl.records.record import RunTimes
from benchctl.records.schema import Cell
from benchctl.report.experiment_tables import cells_table, runs_table, sweep_table
from benchctl.report.export import drawing, write_derived
from benchctl.report.texts import time_lines
from benchctl.units import NS_PER_S

CLOSED = {"dataset": "synthetic", "num_prompts": 12, "input_len": 64, "output_len": 16}
SLOTS = CLOSED | {"arrival": {"kind": "closed-loop", "max_concurrency": 4}}
OPEN = CLOSED | {"arrival": {"kind": "poisson", "request_rate": 20}}
WIDER = {"server": {"max_num_seqs": 6}}


def rows_of(analysis: AnalyzedExperiment, point: Any) -> list[list[dict[str, object]]]:
    """The rows of the tables of a load point, without the words that name point and run."""
    records = [run.record for run in runs_at(analysis.experiment, point)]
    names = {name for each in records for name in (each.run_id, arm_label(each.variant, each.cell))}
    tables = [table for of in (cells_table, sweep_table, runs_table) if (table := of(analysis)) is not None]
    return [
        [
            {name: value for name, value in row.items() if name not in {"label", "run"}}
            for row in table.rows
            if row.get("run", row.get("label")) in names
        ]
        for table in tables
    ]


def numbers_of(experiment: Experiment, point: Any) -> dict[tuple[str, str, str], object]:
    """All that is derived from the runs of a load point and from the comparison of its arms."""
    numbers: dict[tuple[str, str, str], object] = {}
    for run in runs_at(experiment, point):
        key = run.record.variant, f"{run.record.block} {cell_name(server_part(run.record.cell))}"
        numbers |= {(*key, name): value for name, value in experiment.metrics(run).items()}
        numbers |= {(*key, f"check {check.name}"): (check.ok, check.detail) for check in experiment.checks(run)}
        unsteady = experiment.unsteadiness(run)
        numbers[(*key, "unsteadiness")] = [(each.code, each.message) for each in unsteady]
        numbers[(*key, "contradictions")] = [each.code for each in experiment.contradictions(run)]
        numbers[(*key, "run time")] = repr(experiment.run_time(run))
        flops = experiment.flops(run)
        numbers[(*key, "flops")] = None if flops is None else repr(flops.published)
    for pair in baseline_pairs(experiment):
        if load_part(pair.b.cell) == point:
            key = pair.b.variant, cell_name(server_part(pair.b.cell))
            for column in SUMMARY_COLUMNS:
                ratio = pair.ratio(column)
                numbers[(*key, f"ratio {column}")] = None if ratio is None else (ratio.a, ratio.b, ratio.estimate)
    return numbers


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"workload": SLOTS}, id="slots, two arms"),
        pytest.param(
            {"workload": OPEN, "sweep": {"request_rate": [10, 40], "output_len": [8, 24]}},
            id="rates and lengths",
        ),
        pytest.param(
            {
                "variants": {"baseline": {}, "narrow": {"server": {"max_num_seqs": 3}}, "wider": WIDER},
                "workload": SLOTS,
                "sweep": {"max_concurrency": [2, 8]},
                "blocks": 6,
            },
            id="three arms, whose positions share a slope",
        ),
    ],
)
def test_the_table_of_a_point_is_that_of_an_experiment_of_this_load_alone(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    ladder = simulated(tmp_path / "ladder", LADDER, **changes)
    analysis = analyze(ladder)
    for number, point in enumerate(load_points(ladder.profile)):
        single = alone(ladder, point, tmp_path / f"alone-{number}")
        at_point, of_single = numbers_of(ladder, point), numbers_of(single, {})
        assert at_point.keys() == of_single.keys()
        assert at_point == of_single
        of_point = rows_of(analysis, point)
        assert of_point == rows_of(analyze(single), {})
        assert all(of_point)


def test_a_record_whose_points_are_not_those_of_the_plan_is_damage(tmp_path: Path) -> None:
    results = ResultDirectory(simulated(tmp_path, LADDER, blocks=2).path)
    run = results.runs()[1]
    record = run.read()
    others: tuple[Cell, ...] = tuple({"top_k": point["max_concurrency"]} for point in record.ladder)
    both = [msgspec.structs.replace(load, cell=cell) for load, cell in zip(record.loads, others, strict=True)]
    changed: dict[str, dict[str, Any]] = {
        "no loads": {"loads": ()},
        "one number": {"loads": tuple(msgspec.structs.replace(load, number=2) for load in record.loads)},
        "no ladder": {"ladder": ()},
        "another ladder": {"ladder": others, "loads": tuple(both)},
        "another load": {"loads": tuple(both)},
    }
    for change, fields in changed.items():
        run.write(msgspec.structs.replace(record, **fields))
        analysis = analyze_directory(results.path)
        (message,) = analysis.damage
        assert message.endswith("run.json: its load points are not those of the plan; restore the file"), change
        assert len(analysis.runs) == 3 * 3, "the points of the other servers are read"
    with drawing() as draw:
        write_derived(analysis, draw)


def test_the_start_of_a_server_counts_once_for_all_of_its_points(tmp_path: Path) -> None:
    results = ResultDirectory(simulated(tmp_path, LADDER, blocks=1).path)
    for run in results.runs():
        record = run.read()
        times = RunTimes(launch_ns=0, ready_ns=100 * NS_PER_S, stop_ns=110 * NS_PER_S)
        loads = tuple(
            msgspec.structs.replace(load, first_send_ns=i * NS_PER_S, last_token_ns=(i + 1) * NS_PER_S)
            for i, load in enumerate(record.loads, start=100)
        )
        run.write(msgspec.structs.replace(record, times=times, loads=loads))
    first, second = time_lines(analyze_directory(results.path))
    assert first == "220 s: 200 s starting servers, 6 s under load, 14 s the rest"
    assert "loads_per_server" not in second, "a ladder has one load for each point"
