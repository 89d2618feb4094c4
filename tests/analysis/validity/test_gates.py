"""Gates: a run during which the machine was not itself leaves the comparison with its pair, and is named."""

import msgspec
import pytest
from support.results.builders import T0_NS, edit_requests, edit_run, write_results

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.validity.usable import clock_warnings, violated_gates
from benchctl.records.loaded import load_run
from benchctl.records.record import RequestError
from benchctl.records.schema import FOREIGN_GPU_PROCESS, GpuSample, ResultWarning

BASELINE, GUIDED = "000-b0-baseline", "001-b0-guided-top_k5"
ALL = ("throttling", "foreign-gpu-process", "failed-requests")
DURING_NS, BEFORE_NS = T0_NS + 1_000_000, T0_NS - 1_000_000
OTHER = ResultWarning(code=FOREIGN_GPU_PROCESS, message="process 7 (python) computed on GPU 0 before the start")


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r")


def declare(results, gates):
    results.write_profile(f"{results.profile_yaml()}gates: [{', '.join(gates)}]\n")


def sampled(results, run_id, reasons, t_ns=DURING_NS):
    with results.run(run_id).append("gpu") as writer:
        writer.write(GpuSample(t_ns=t_ns, index=0, source="nvml", throttle_reasons=reasons))


def fail(results, run_id):
    error = RequestError(kind="reset", message="the connection broke")
    edit_requests(results, run_id, lambda r: msgspec.structs.replace(r, error=error) if r.index == 0 else r)
    edit_run(results, run_id, num_completed=3, num_failed=1, state="suspect")


def violations(results, run_id, gates=ALL):
    return [str(violation) for violation in violated_gates(load_run(results.run(run_id)), gates)]


def within(results, **options):
    sides = (parse_side(f"{results.path}:baseline"), parse_side(f"{results.path}:guided"))
    return compare_sides(*sides, CompareOptions(**options))


def excluded(comparison):
    return [warning.message for warning in comparison.warnings if warning.code == "excluded-block"]


@pytest.mark.parametrize("reason", ["hw-slowdown", "hw-thermal", "hw-power-brake", "sw-thermal"])
def test_a_device_that_slows_itself_violates_the_gate_of_throttling(results, reason):
    sampled(results, BASELINE, ("gpu-idle",))
    sampled(results, BASELINE, (reason, "sw-power-cap"))
    assert violations(results, BASELINE) == [
        f"gate throttling: a GPU slowed itself down during the load ({reason})"
    ]
    (throttled, _) = clock_warnings(load_run(results.run(BASELINE)))
    assert throttled.code == "gpu-throttled"


def test_idle_clocks_and_the_power_limit_are_how_devices_run(results):
    sampled(results, BASELINE, ("gpu-idle", "application-clocks", "sync-boost", "display-clocks"))
    assert clock_warnings(load_run(results.run(BASELINE))) == ()
    sampled(results, BASELINE, ("sw-power-cap",))
    assert violations(results, BASELINE) == []
    (warning,) = clock_warnings(load_run(results.run(BASELINE)))
    assert warning.code == "gpu-power-capped"


def test_what_a_device_did_before_the_load_violates_nothing(results):
    sampled(results, BASELINE, ("hw-thermal",), t_ns=BEFORE_NS)
    sampled(results, BASELINE, None)
    assert violations(results, BASELINE) == []


def test_only_gates_that_are_declared_are_looked_at(results):
    sampled(results, BASELINE, ("hw-thermal",))
    edit_run(results, BASELINE, warnings=(OTHER,))
    assert violations(results, BASELINE, ("foreign-gpu-process",)) == [f"gate foreign-gpu-process: {OTHER.message}"]
    assert violations(results, BASELINE, ()) == []


def test_a_run_that_violates_a_gate_leaves_with_its_pair_and_is_named(results):
    sampled(results, GUIDED, ("hw-thermal",))
    comparison = within(results)
    assert excluded(comparison) == [
        f"block 0 is left out: {GUIDED}: gate throttling: a GPU slowed itself down during the load (hw-thermal)"
    ]
    assert {cell.num_blocks for cell in comparison.cells} == {2}


def test_another_program_on_the_device_leaves_the_block_out(results):
    edit_run(results, BASELINE, warnings=(OTHER,))
    comparison = within(results)
    assert excluded(comparison) == [f"block 0 is left out: {BASELINE}: gate foreign-gpu-process: {OTHER.message}"]


def test_a_profile_without_gates_leaves_nothing_out(results):
    declare(results, [])
    sampled(results, GUIDED, ("hw-thermal",))
    edit_run(results, BASELINE, warnings=(OTHER,))
    comparison = within(results)
    assert excluded(comparison) == []
    assert {cell.num_blocks for cell in comparison.cells} == {3}


def test_failed_requests_make_a_comparison_incomplete_unless_they_are_a_gate(results):
    fail(results, GUIDED)
    comparison = within(results)
    assert comparison.verdict == "invalid"
    assert excluded(comparison) == []
    declare(results, ALL)
    comparison = within(results)
    assert comparison.verdict != "invalid"
    assert excluded(comparison) == [f"block 0 is left out: {GUIDED}: gate failed-requests: 1 of 4 requests failed"]


def test_no_gate_of_the_machine_hides_failed_requests_or_failed_checks(results):
    fail(results, GUIDED)
    sampled(results, GUIDED, ("hw-thermal",))
    assert within(results).verdict == "invalid"
    contradiction = ResultWarning(code="check-failed", message="check requests failed")
    edit_run(results, BASELINE, state="suspect", warnings=(contradiction, OTHER))
    declare(results, ALL)
    assert [message for message in excluded(within(results)) if BASELINE in message] == []


def test_a_run_that_is_suspect_for_its_client_is_told_by_its_gate_first(results):
    late = ResultWarning(code="sends-delayed", message="requests left late")
    edit_run(results, BASELINE, state="suspect", warnings=(late, OTHER))
    (message,) = excluded(within(results, allow_suspect=True))
    assert "gate foreign-gpu-process" in message
