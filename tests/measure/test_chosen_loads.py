"""How many loads a server gets: chosen after a pilot, kept, and what a precision costs, said alike everywhere."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli import WITHOUT_SERVERS, document, printed, refusal

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.planning import noise_of_experiment, power_lines
from benchctl.measure.directory import Origin, reopen_experiment
from benchctl.measure.experiment import create_experiment, run_experiment
from benchctl.measure.run import Listener, RunContext
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import load_profile
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.integrity import record_run
from benchctl.records.record import LoadsChoice, PlannedRun, RunRecord
from benchctl.report.experiment_tables import in_percent
from benchctl.report.page.page import directory_page
from benchctl.units import ns_from_s
from benchctl.workload.prepare import prepare_requests

SMALL = ["workload.num_prompts=4", "workload.output_len=8", "gates=[]", "comparison.threshold=0.1"]
START_S, LOAD_S = 80.0, 2.0


def begun(path: Path, *overrides: str, engine: str = "sim", blocks: int = 6) -> ResultDirectory:
    profile = load_profile("aa", engine=engine, blocks=blocks, overrides=[*SMALL, *overrides])
    origin = Origin(output_root=path, label=None, argv=("benchctl",), directory=path / "results")
    return create_experiment(profile, prepare_requests(profile), origin)


def measured(results: ResultDirectory, last: int = 99) -> list[LoadsChoice]:
    """Measure until the run ``last``, whose servers take 80 s to start and 2 s for a load; the choices told of."""
    reopened, choices = reopen_experiment(results.path, None), list[LoadsChoice]()

    def run(context: RunContext, planned: PlannedRun, directory: RunDirectory) -> RunRecord:
        record = simulate_run(context, planned, directory)
        at_ns = ns_from_s(1000.0 * planned.index)
        begins_ns = at_ns + ns_from_s(START_S)
        ends_ns = begins_ns + ns_from_s(LOAD_S * context.num_loads)
        times = {"launch_ns": at_ns, "first_send_ns": begins_ns, "last_token_ns": ends_ns, "stop_ns": ends_ns}
        if planned.position:  # directly after the one before
            times = {name: time_ns - ns_from_s(1000.0) + (ends_ns - at_ns) for name, time_ns in times.items()}
        record = msgspec.structs.replace(record, times=msgspec.structs.replace(record.times, **times))
        directory.write(record)
        return record

    def end(planned: PlannedRun, _record: RunRecord) -> None:
        if planned.index == last:
            raise KeyboardInterrupt

    listener = Listener(on_run_end=end, on_loads=choices.append)
    run_experiment(results, reopened.profile, reopened.requests, listener, run)
    return choices


def loads_of_runs(results: ResultDirectory) -> list[int]:
    return [len(results.run(planned.run_id).read().loads) or 1 for planned in results.plan().runs]


def test_after_two_blocks_with_three_loads_a_number_is_chosen_for_the_rest_and_recorded_with_its_reason(
    tmp_path: Path,
) -> None:
    results = begun(tmp_path, "loads_per_server=auto", "engine.options.noise=published")
    (choice,) = measured(results)
    assert results.manifest().loads == choice
    assert loads_of_runs(results) == [3] * 4 + [choice.num_loads] * 8
    assert (choice.from_block, choice.start_s, choice.load_s) == (2, START_S, LOAD_S)
    assert set(choice.scatter) == {"step_ms", "tpot_ms", "wall_s"}
    assert re.search(
        r"step_ms scatters by .+ between servers.+a start costs 80 s, a load 2 s; cheapest: \d+ load", choice.reason
    )
    assert f"loads_per_server: {choice.reason}" in printed("show", results.path, "--all", COLUMNS="1000")
    assert "invalid" not in printed("compare", results.path, code=3)  # a choice alters no result
    plan = printed("run", "aa", "--engine", "sim", "--set", "loads_per_server=auto", "--dry-run", cwd=tmp_path)
    assert re.search(r"\d+ requests each 3 times in the first two blocks", plan)


def test_an_experiment_that_goes_on_keeps_the_number_that_was_chosen(tmp_path: Path) -> None:
    results = begun(tmp_path, "loads_per_server=auto", "engine.options.noise=published")
    with pytest.raises(KeyboardInterrupt):
        measured(results, last=5)
    choice = results.manifest().loads
    assert choice is not None
    lost = results.plan().runs[1]
    record = results.run(lost.run_id).read()
    results.run(lost.run_id).write(msgspec.structs.replace(record, state="failed"))
    record_run(results, lost.run_id)
    assert measured(results) == []
    assert results.manifest().loads == choice
    assert loads_of_runs(results) == [3] * 4 + [choice.num_loads] * 8


def test_servers_without_scatter_get_one_load(tmp_path: Path) -> None:
    results = begun(tmp_path, "loads_per_server=auto", engine="sim-exact", blocks=3)
    (choice,) = measured(results)
    assert choice.num_loads == 1
    assert loads_of_runs(results) == [3] * 4 + [1] * 2


def test_a_pilot_of_which_nothing_counts_goes_on_until_something_does(tmp_path: Path) -> None:
    results = begun(tmp_path, "loads_per_server=auto", "engine.options.noise=published", blocks=4)
    with pytest.raises(KeyboardInterrupt):
        measured(results, last=3)
    for planned in results.plan().runs[1:4]:
        record = results.run(planned.run_id).read()
        results.run(planned.run_id).write(msgspec.structs.replace(record, state="suspect", loads=()))
        record_run(results, planned.run_id)
    (choice,) = measured(results)
    assert choice.from_block in {2, 3}
    assert loads_of_runs(results)[4:] == [3] * (2 * choice.from_block - 4) + [choice.num_loads] * (
        8 - 2 * choice.from_block
    )


@pytest.mark.parametrize("words", [["--on", "local", "--parallel", "2"], ["--prepare"]], ids=["local", "prepare"])
def test_blocks_that_are_handed_out_cannot_wait_for_a_choice(tmp_path: Path, words: list[str]) -> None:
    said = refusal("run", "aa", "--engine", "sim", "--set", "loads_per_server=auto", *words, cwd=tmp_path)
    assert "loads_per_server: auto chooses a number from the first blocks" in said
    assert "set loads_per_server to a number" in said


def test_virtual_time_refuses_to_choose(tmp_path: Path) -> None:
    said = refusal("simulate", "--profile", "aa", "--engine", "sim", "--set", "loads_per_server=auto", cwd=tmp_path)
    assert "set a number" in said


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of an A/A experiment of eight blocks with four loads on each server."""
    results = begun(
        tmp_path_factory.mktemp("several"), "loads_per_server=4", "engine.options.noise=published", blocks=8
    )
    measured(results)
    return results.path


BLOCKS = r"\d+ blocks of \d+ loads?, \d+ (s|min)"
SENTENCE = re.compile(rf"±10% in (step_ms|tpot_ms|wall_s): {BLOCKS}(; with \d loads? \d+ blocks, \d+ (s|min))?")


def test_scatter_and_what_a_precision_costs_are_the_same_everywhere(several: Path, tmp_path: Path) -> None:
    analysis = analyze_directory(several)
    assert analysis.precision is not None
    assert SENTENCE.fullmatch(analysis.precision)
    assert f"precision: {analysis.precision}" in printed("compare", several, code=3)
    assert document("compare", several, code=3)["precision"] == analysis.precision
    scatter = document("show", several)["scatter"]
    assert scatter["precision"] == analysis.precision
    step = analysis.scatter["step_ms"]
    assert scatter["metrics"]["step_ms"]["between"]["value"] == step.between.value
    text, page = printed("show", several, "--all"), directory_page(analysis)
    field = in_percent(step.between)
    assert re.fullmatch(r"\d+ \[\d[\d.]*, \d+\]", field)
    for output in (text, page):
        assert field in output
        assert analysis.precision in output
    noise = noise_of_experiment(load_experiment(several))
    assert noise.metrics["step_ms"].between == (step.between.value, step.between.low, step.between.high)
    assert (noise.num_loads, noise.start_s, noise.load_s) == (4, START_S, LOAD_S)


def test_a_plan_says_what_a_precision_costs_where_the_noise_on_file_knows_it(several: Path, tmp_path: Path) -> None:
    env: dict[str, Any] = {"BENCHCTL_NOISE_DIR": str(tmp_path / "noise"), **WITHOUT_SERVERS}
    printed("noise", "add", several, **env)
    options = [word for override in SMALL for word in ("--set", override)]
    plan = ("run", "ci-smoke", "--engine", "sim", "--set", "engine.options.noise=published", *options, "--dry-run")
    (line,) = [line for line in printed(*plan, cwd=tmp_path, **env).splitlines() if line.startswith("precision: ")]
    assert line.removeprefix("precision: ") == analyze_directory(several).precision
    listed = printed("noise", "show", next((tmp_path / "noise").iterdir()).name, **env)
    assert "between servers" in listed
    assert "precision: ±1% in" in listed


def test_a_plan_rests_on_the_scatter_that_its_own_number_of_loads_will_have(several: Path) -> None:
    noise = noise_of_experiment(load_experiment(several))
    parts = {"between": (0.01, 0.005, 0.02), "within": (0.04, 0.03, 0.05), "log_sd": 0.035}
    noise = msgspec.structs.replace(
        noise, metrics={name: msgspec.structs.replace(each, **parts) for name, each in noise.metrics.items()}
    )
    scatters = {1: "5.8%", 4: "3.5%", 16: "2%"}  # sqrt(2 (0.01^2 + 0.04^2 / N)); of four it was measured
    for num_loads, scatter in scatters.items():
        profile = load_profile("aa", engine="sim", overrides=[*SMALL, f"loads_per_server={num_loads}"])
        assert f"this rests on blocks that scatter by {scatter} (measured" in power_lines(profile, noise)[1]


def test_of_one_load_per_server_nothing_is_said_of_scatter_or_its_cost(tmp_path: Path) -> None:
    results = begun(tmp_path, "engine.options.noise=published")
    measured(results)
    analysis = analyze_directory(results.path)
    assert (analysis.scatter, analysis.precision) == ({}, None)
    assert "scatter" not in document("show", results.path)
    assert "precision" not in document("compare", results.path, code=3)
    assert "Scatter" not in printed("show", results.path, "--all")
    noise = noise_of_experiment(load_experiment(results.path))
    assert "between" not in msgspec.json.encode(noise).decode()
    assert "start_s" not in msgspec.json.encode(noise).decode()
