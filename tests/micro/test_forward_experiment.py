"""Forward passes as an experiment: what is on disk, what it means, and what happens when something goes wrong."""

from pathlib import Path

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
from benchctl.micro.experiment import MicroOutcome, measure_forward, resume_forward
from benchctl.micro.points import forward_profile, grid_of_points
from benchctl.profile.choices import ForwardPoint
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import verify_directory
from benchctl.report.time_tables import launch_table

LISTENER = Listener(on_run_start=ignore, on_request_end=ignore, on_run_end=ignore, on_log_line=ignore)
EAGER_US, GRAPH_US = 900.0, 230.0


def launch_bound(point, mode):
    return (EAGER_US if mode == "eager" else GRAPH_US) + 2.0 * point.total_new_tokens


def settings(**changes) -> dict:
    values = {
        "model": "llama-68m", "device": "cpu", "dtype": "float16", "modes": ("eager", "graph"), "blocks": 6,
        "replays": 200,
    }  # fmt: skip
    return values | changes


def measured(path: Path, workers: FakeWorkers, **changes) -> MicroOutcome:
    points = grid_of_points(("decode", "prefill"), (5, 10), (0,), (4,))
    profile = forward_profile(points, **settings(**changes))
    origin = Origin(output_root=path, argv=("benchctl", "micro", "forward"))
    return measure_forward(profile, origin, LISTENER, workers.start)


def test_every_point_runs_in_every_mode_once_a_block_with_at_least_the_replays_that_were_asked_for(tmp_path):
    workers = FakeWorkers(launch_bound)
    outcome = measured(tmp_path, workers)
    experiment = load_experiment(outcome.path)
    assert outcome.outcome.num_done == 6 * 4 * 2
    assert workers.num_started == workers.num_ended == 6
    for arm in experiment.arms:
        assert sorted(arm.runs) == list(range(6))
        assert sum(len(run.columns) for run in arm.runs.values()) >= 200
    of_worker = {number: [] for number in range(1, 7)}
    for number, point, mode in workers.measured:
        of_worker[number].append((point, mode))
    assert all(len(set(passes)) == 8 for passes in of_worker.values())


def test_each_cell_of_a_graph_is_compared_with_the_same_cell_eager(tmp_path):
    outcome = measured(tmp_path, FakeWorkers(launch_bound))
    pairs = baseline_pairs(load_experiment(outcome.path))
    assert len(pairs) == 4
    assert all(pair.a.cell == pair.b.cell and pair.a.variant == "eager" for pair in pairs)
    rows = analyze_directory(outcome.path).sweep
    by_cell = {(row.cell["phase"], row.cell["batch_size"]): row.number("step_ms_ratio") for row in rows}
    assert by_cell["decode", 5] == pytest.approx((GRAPH_US + 10) / (EAGER_US + 10), rel=0.01)
    assert by_cell["prefill", 10] == pytest.approx((GRAPH_US + 80) / (EAGER_US + 80), rel=0.01)


def test_the_launch_cost_is_divided_among_the_operators_of_a_pass(tmp_path):
    analysis = analyze_directory(measured(tmp_path, FakeWorkers(launch_bound)).path)
    assert [cost.num_operators for cost in analysis.launches] == [31] * 4
    for cost in analysis.launches:
        assert cost.us_per_operator == pytest.approx((EAGER_US - GRAPH_US) / 31, rel=0.02)
    table = launch_table(analysis)
    assert [column.heading for column in table.columns][-2:] == ["operators", "µs each"]
    assert {row[-2] for row in table.texts()} == {"31"}


def test_two_repeats_are_equivalent_and_a_slower_device_is_a_regression(tmp_path):
    first = measured(tmp_path / "a", FakeWorkers(launch_bound))
    second = measured(tmp_path / "b", FakeWorkers(launch_bound, seed=1))
    slower = measured(tmp_path / "c", FakeWorkers(lambda point, mode: 1.1 * launch_bound(point, mode), seed=2))
    options = CompareOptions(margin_frac=0.02, noise={})
    assert compare_paths(str(first.path), str(second.path), options).verdict == "equivalent"
    assert compare_paths(str(first.path), str(slower.path), options).verdict == "regression"


def test_a_result_below_the_floor_is_a_failed_run_that_counts_nowhere(tmp_path):
    def too_fast(point, mode):
        return 42.0 if mode == "graph" and point.batch_size == 5 and point.phase == "decode" else 900.0

    outcome = measured(tmp_path, FakeWorkers(too_fast, device_name=A100))
    assert len(outcome.below_floor) == 6
    for allow_suspect in (False, True):
        analysis = analyze_directory(outcome.path, allow_suspect=allow_suspect)
        refused = [run for run in analysis.runs if run.record.run_id in outcome.below_floor]
        assert {run.record.state for run in refused} == {"failed"}
        assert not any(run.is_usable for run in refused)
        assert {warning.code for run in refused for warning in run.warnings} >= {"below-floor"}
        assert not any(row.variant == "graph" and row.cell == refused[0].record.cell for row in analysis.sweep)
    assert "no such pass takes less than 42.6 µs" in refused[0].record.failure.message


def test_a_device_without_known_peaks_has_no_floor_and_says_so(tmp_path):
    outcome = measured(tmp_path, FakeWorkers(lambda *_: 0.1), modes=("eager",))
    manifest = ResultDirectory(outcome.path).manifest()
    assert outcome.below_floor == ()
    assert "floor-unknown" in {warning.code for warning in manifest.warnings}


def test_a_pass_without_memory_for_it_is_refused_before_anything_is_measured(tmp_path):
    workers = FakeWorkers(launch_bound, too_large=UsageError("keys and values need 4578 GiB"))
    with pytest.raises(UsageError, match="4578 GiB"):
        measured(tmp_path, workers)
    assert workers.measured == []
    assert workers.num_started == workers.num_ended == 1
    assert list(tmp_path.iterdir()) == []


def test_memory_that_the_device_hands_out_during_replays_is_a_warning_of_the_run(tmp_path):
    outcome = measured(tmp_path, FakeWorkers(launch_bound, num_allocations=4), modes=("eager",))
    record = ResultDirectory(outcome.path).runs()[0].read()
    assert record.state == "done"
    assert record.effective_config["server.operators"] == 31
    assert [warning.code for warning in record.warnings if "4 pieces" in warning.message] == ["replays-allocate"]


def test_a_machine_without_torch_leaves_nothing_behind(tmp_path):
    def start(_profile):
        raise UsageError("torch is not installed")

    profile = forward_profile(grid_of_points(("decode",), (1,), (8,), ()), **settings())
    with pytest.raises(UsageError, match="torch"):
        measure_forward(profile, Origin(output_root=tmp_path, argv=()), LISTENER, start)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [UsageError("the cache does not fit"), KeyboardInterrupt()])
def test_what_was_measured_before_a_refusal_or_an_interrupt_is_kept_and_can_be_continued(tmp_path, error):
    workers = FakeWorkers(launch_bound, error=error, fails_at=3)
    with pytest.raises(type(error)):
        measured(tmp_path, workers)
    (path,) = (path for path in tmp_path.glob("*/*") if not path.is_symlink())
    analysis = analyze_directory(path)
    assert [run.record.state for run in analysis.runs] == ["done"] * 3 + ["failed"]
    assert analysis.results.manifest.state == ("failed" if isinstance(error, UsageError) else "interrupted")
    assert workers.num_started == workers.num_ended
    outcome = resume_forward(reopen_experiment(path, None), LISTENER, FakeWorkers(launch_bound).start)
    assert outcome.outcome.num_skipped == 3
    assert {run.record.state for run in analyze_directory(path).runs} == {"done"}


def test_a_worker_that_dies_fails_its_run_and_another_takes_over(tmp_path):
    workers = FakeWorkers(launch_bound, error=RunError("the worker ended", cause="worker-died"), fails_at=2)
    outcome = measured(tmp_path, workers)
    assert (outcome.outcome.num_done, outcome.outcome.num_failed) == (47, 1)
    assert workers.num_started == workers.num_ended == 7


def test_a_directory_of_passes_is_intact_when_it_is_verified(tmp_path):
    outcome = measured(tmp_path, FakeWorkers(launch_bound))
    verified = verify_directory(outcome.path, is_fresh=True)
    assert verified.alterations == ()
    assert verified.num_files > 48


def test_points_of_backfill_get_the_context_and_the_new_tokens_of_their_own(tmp_path):
    points = (
        ForwardPoint(phase="decode", batch_size=6, context_tokens=256),
        ForwardPoint(phase="prefill", batch_size=3, new_tokens=1, context_tokens=256),
    )
    workers = FakeWorkers(launch_bound)
    profile = forward_profile(points, **settings(modes=("eager",), blocks=1), name="bonus")
    measure_forward(profile, Origin(output_root=tmp_path, argv=()), LISTENER, workers.start)
    assert {point for _, point, _ in workers.measured} == set(points)
