"""Forward passes as an experiment: what is on disk, what it means, and what happens when something goes wrong."""

from collections import Counter

import pytest
from support.fake_passes import A100, FakeWorkers

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.pairing import baseline_pairs
from benchctl.analysis.foreign import compare_paths
from benchctl.errors import RunError, UsageError
from benchctl.measure.directory import Origin, reopen_experiment
from benchctl.measure.experiment import Listener
from benchctl.measure.measured_run import ignore
from benchctl.micro.experiment import measure_forward, resume_forward
from benchctl.micro.points import forward_profile, grid_of_points
from benchctl.profile.choices import ForwardPoint
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import verify_directory
from benchctl.report.time_tables import launch_table

LISTENER = Listener(on_run_start=ignore, on_request_end=ignore, on_run_end=ignore, on_log_line=ignore)
EAGER_US, GRAPH_US = 900.0, 230.0


def launch_bound(point, mode):
    return (EAGER_US if mode == "eager" else GRAPH_US) + 2.0 * point.total_new_tokens


def settings(**changes):
    how = {"model": "llama-68m", "device": "cpu", "dtype": "float16", "modes": ("eager", "graph"), "blocks": 6}
    return how | {"replays": 200} | changes


@pytest.fixture
def run_in(tmp_path):
    """Measures points with these settings into a directory."""

    def run(points, start, path=tmp_path, **changes):
        origin = Origin(output_root=path, argv=("benchctl", "micro", "forward"))
        return measure_forward(forward_profile(points, **settings(**changes)), origin, LISTENER, start)

    return run


@pytest.fixture
def measured(run_in):
    points = grid_of_points(("decode", "prefill"), (5, 10), (0,), (4,))
    return lambda workers, *path, **changes: run_in(points, workers.start, *path, **changes)


def test_every_point_runs_in_every_mode_once_a_block_with_at_least_the_replays_that_were_asked_for(measured):
    workers = FakeWorkers(launch_bound)
    outcome = measured(workers)
    assert outcome.outcome.num_done == 6 * 4 * 2
    assert workers.num_started == workers.num_ended == 6
    for arm in load_experiment(outcome.path).arms:
        assert sorted(arm.runs) == list(range(6))
        assert sum(len(run.columns) for run in arm.runs.values()) >= 200
    passes = {(number, point, mode) for number, point, mode in workers.measured}
    assert Counter(number for number, _, _ in passes) == dict.fromkeys(range(1, 7), 8)
    verified = verify_directory(outcome.path, is_fresh=True)
    assert (verified.alterations, verified.num_files > 48) == ((), True)


def test_each_cell_of_a_graph_is_compared_with_the_same_cell_eager_and_launches_divided_among_operators(measured):
    outcome = measured(FakeWorkers(launch_bound))
    pairs = baseline_pairs(load_experiment(outcome.path))
    assert len(pairs) == 4
    assert all(pair.a.cell == pair.b.cell and pair.a.variant == "eager" for pair in pairs)
    analysis = analyze_directory(outcome.path)
    by_cell = {(row.cell["phase"], row.cell["batch_size"]): row.number("step_ms_ratio") for row in analysis.sweep}
    assert by_cell["decode", 5] == pytest.approx((GRAPH_US + 10) / (EAGER_US + 10), rel=0.01)
    assert by_cell["prefill", 10] == pytest.approx((GRAPH_US + 80) / (EAGER_US + 80), rel=0.01)
    costs = [(cost.num_operators, cost.us_per_operator) for cost in analysis.launches]
    assert costs == [(31, pytest.approx((EAGER_US - GRAPH_US) / 31, rel=0.02))] * 4
    table = launch_table(analysis)
    assert [column.heading for column in table.columns][-2:] == ["operators", "µs each"]
    assert {row[-2] for row in table.texts()} == {"31"}


def test_two_repeats_are_equivalent_and_a_slower_device_is_a_regression(measured, tmp_path):
    paths = [
        str(
            measured(
                FakeWorkers(lambda *pass_, f=factor: f * launch_bound(*pass_), seed=seed), tmp_path / name
            ).path
        )
        for seed, (name, factor) in enumerate((("a", 1), ("b", 1), ("c", 1.1)))
    ]
    options = CompareOptions(margin_frac=0.02, noise={})
    verdicts = [compare_paths(paths[0], path, options).verdict for path in paths[1:]]
    assert verdicts == ["equivalent", "regression"]


def test_a_result_below_the_floor_is_a_failed_run_that_counts_nowhere(measured):
    def too_fast(point, mode):
        return 42.0 if mode == "graph" and point.batch_size == 5 and point.phase == "decode" else 900.0

    outcome = measured(FakeWorkers(too_fast, device_name=A100))
    assert len(outcome.below_floor) == 6
    for allow_suspect in (False, True):
        analysis = analyze_directory(outcome.path, allow_suspect=allow_suspect)
        refused = [run for run in analysis.runs if run.record.run_id in outcome.below_floor]
        assert {(run.record.state, run.is_usable) for run in refused} == {("failed", False)}
        assert {warning.code for run in refused for warning in run.warnings} >= {"below-floor"}
        assert not any(row.variant == "graph" and row.cell == refused[0].record.cell for row in analysis.sweep)
    assert "no such pass takes less than 42.6 µs" in refused[0].record.failure.message


def test_a_device_without_known_peaks_and_memory_that_is_handed_out_during_replays_are_told(measured):
    outcome = measured(FakeWorkers(lambda *_: 0.1, num_allocations=4), modes=("eager",))
    results = ResultDirectory(outcome.path)
    assert outcome.below_floor == ()
    assert "floor-unknown" in {warning.code for warning in results.manifest().warnings}
    record = results.runs()[0].read()
    assert (record.state, record.effective_config["server.operators"]) == ("done", 31)
    assert [warning.code for warning in record.warnings if "4 pieces" in warning.message] == ["replays-allocate"]


def test_a_pass_without_memory_for_it_is_refused_before_anything_is_measured(measured, tmp_path):
    workers = FakeWorkers(launch_bound, too_large=UsageError("keys and values need 4578 GiB"))
    with pytest.raises(UsageError, match="4578 GiB"):
        measured(workers)
    assert (workers.measured, workers.num_started, workers.num_ended) == ([], 1, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [UsageError("the cache does not fit"), KeyboardInterrupt()])
def test_what_was_measured_before_a_refusal_or_an_interrupt_is_kept_and_can_be_continued(measured, tmp_path, error):
    workers = FakeWorkers(launch_bound, error=error, fails_at=3)
    with pytest.raises(type(error)):
        measured(workers)
    (path,) = (path for path in tmp_path.glob("*/*") if not path.is_symlink())
    analysis = analyze_directory(path)
    assert [run.record.state for run in analysis.runs] == ["done"] * 3 + ["failed"]
    assert analysis.results.manifest.state == ("failed" if isinstance(error, UsageError) else "interrupted")
    assert workers.num_started == workers.num_ended
    outcome = resume_forward(reopen_experiment(path, None), LISTENER, FakeWorkers(launch_bound).start)
    assert outcome.outcome.num_skipped == 3
    assert {run.record.state for run in analyze_directory(path).runs} == {"done"}


def test_a_worker_that_dies_fails_its_run_and_another_takes_over(measured):
    workers = FakeWorkers(launch_bound, error=RunError("the worker ended", cause="worker-died"), fails_at=2)
    outcome = measured(workers).outcome
    assert (outcome.num_done, outcome.num_failed) == (47, 1)
    assert workers.num_started == workers.num_ended == 7


def test_points_of_backfill_get_the_context_and_the_new_tokens_of_their_own(run_in):
    decode = ForwardPoint(phase="decode", batch_size=6, context_tokens=256)
    backfill = ForwardPoint(phase="prefill", batch_size=3, new_tokens=1, context_tokens=256)
    workers = FakeWorkers(launch_bound)
    run_in((decode, backfill), workers.start, modes=("eager",), blocks=1, name="bonus")
    assert {point for _, point, _ in workers.measured} == {decode, backfill}
