"""The result of a check of neighbours, from a built directory with a known truth, and what is said of it."""

import math
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.results.builders import PROFILE_YAML, T0_NS, edit_manifest, edit_run, set_positions, write_results

from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.planning.noise_floor import engine_sha256
from benchctl.analysis.statistics.decide import confidence_of_claims, finding_of, margins_of
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.analysis.validity.noise import (
    alone_and_beside,
    blocks_of_check,
    cause_text,
    checked,
    finding_text,
    more_blocks_text,
    neighbour_warnings,
    overall_finding,
)
from benchctl.errors import NotComparableError, UsageError
from benchctl.profile.load import parse_profile
from benchctl.profile.planning import plan_runs
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import Extension, RunFailure
from benchctl.records.schema import GpuSample, HostSample, ResultWarning
from benchctl.records.stores.peaks_store import MetricNoise, NoiseFloor
from benchctl.records.stores.stores import NeighbourCheck, NeighbourSlot

LAW = 10 / 15.5
"""Makes a guided step of the built results as long as one of the baseline."""
SCATTER = (0.001, -0.0012, 0.0004, -0.0007, 0.0013, -0.0008, 0.0002, 0.0006)
CHECK_YAML = (
    PROFILE_YAML.split("variants:", maxsplit=1)[0]
    + "variants:\n  alone: {}\n  beside: {}\nbaseline: alone\nprimary_metrics: [step_ms, tpot_ms]\n"
)


def built(path: Path, effect: float = 1.0, scatter: float = 1.0) -> ResultDirectory:
    """A check of eight blocks whose steps take ``effect`` times as long beside neighbours."""
    factors = [{"baseline": 1.0, "guided": LAW * effect * (1 + scatter * off)} for off in SCATTER]
    results = write_results(path, block_factors=factors)
    results.write_profile(CHECK_YAML)
    names = {"baseline": "alone", "guided": "beside"}
    plan = results.plan()
    renamed = tuple(msgspec.structs.replace(run, variant=names[run.variant], cell={}) for run in plan.runs)
    results.write_plan(msgspec.structs.replace(plan, runs=renamed))
    for run in renamed:
        edit_run(results, run.run_id, variant=run.variant, cell={}, effective_config={"model": "qwen2.5-7b"})
    set_positions(results, {run.run_id: 1 - run.position for run in renamed if run.block % 2})
    edit_manifest(results, baseline="alone")
    return results


def begun(results: ResultDirectory) -> NeighbourCheck:
    profile = parse_profile(CHECK_YAML, "built")
    return NeighbourCheck(
        schema_version=3,
        measured_at="2026-01-01T00:00:00Z",
        source=str(results.path),
        host="host",
        engine="sim",
        engine_sha256=engine_sha256(profile),
        model=profile.model,
        request_set_sha256="2" * 64,
        slots=tuple(NeighbourSlot(index=i, cores=(i,)) for i in range(4)),
        confidence=0.5,
    )


def result_of(results: ResultDirectory, noise: NoiseFloor | None = None) -> NeighbourCheck:
    return checked(load_experiment(results.path), begun(results), noise)


def noise_of(floor_frac: float, log_sd: float = 0.002) -> NoiseFloor:
    metric = MetricNoise(log_sd=log_sd, num_blocks=8, floor_frac=floor_frac)
    return NoiseFloor(
        schema_version=3,
        measured_at="2026-01-01T00:00:00Z",
        source="aa",
        host="host",
        engine="sim",
        engine_sha256="1" * 64,
        model="m",
        request_set_sha256="2" * 64,
        metrics={"step_ms": metric, "tpot_ms": metric},
    )


def test_a_planted_effect_is_claimed_with_its_size_and_the_joint_confidence(tmp_path: Path) -> None:
    check = result_of(built(tmp_path / "r", effect=1.2))
    step = check.metrics["step_ms"]
    assert (step.finding, step.num_blocks, step.margin_frac) == ("disturbed", 8, 0.01)
    assert step.ci_low < 1.2 < step.ci_high  # type: ignore[operator]
    assert check.confidence == pytest.approx(1 - 0.01 / 3)  # two metrics, and the runs that do not count
    (warning,) = neighbour_warnings(check, "2026-01-02T00:00:00Z", "command")
    assert warning.code == "neighbours-disturb"
    assert re.search(r"step_ms \+20% \[\+\d+%, \+\d+%\] and tpot_ms \+20%", warning.message)
    assert "3 neighbours, 99.7% interval of 8 blocks, check of 2026-01-01" in warning.message


def test_without_an_effect_nothing_is_claimed_and_nothing_is_warned_of(tmp_path: Path) -> None:
    check = result_of(built(tmp_path / "r"))
    assert {effect.finding for effect in check.metrics.values()} == {"undisturbed"}
    assert neighbour_warnings(check, "2026-01-02T00:00:00Z", "command") == ()
    assert finding_text(check).startswith("not disturbed beside 3 neighbours")


def test_an_old_check_is_none(tmp_path: Path) -> None:
    (warning,) = neighbour_warnings(result_of(built(tmp_path / "r")), "2026-03-02T00:00:00Z", "the command")
    assert warning.code == "neighbours-unchecked"
    assert "60 days older" in warning.message
    assert warning.message.endswith("the command")


def test_an_open_check_says_how_many_more_blocks_would_tell(tmp_path: Path) -> None:
    check = result_of(built(tmp_path / "r", scatter=20.0))
    assert overall_finding(check) == "undecided"
    needed = check.metrics["step_ms"].blocks_needed
    assert needed is not None
    assert f"about {max(e.blocks_needed or 0 for e in check.metrics.values()) - 8} more blocks" in more_blocks_text(
        check
    )
    (warning,) = neighbour_warnings(check, "2026-01-02T00:00:00Z", "command")
    assert warning.code == "neighbours-undecided"
    assert f"--resume {check.source} --blocks {needed}" in warning.message


def test_a_change_below_the_noise_floor_of_the_machine_is_not_claimed(tmp_path: Path) -> None:
    check = result_of(built(tmp_path / "r", effect=1.05), noise_of(floor_frac=0.1))
    assert {effect.finding for effect in check.metrics.values()} == {"undecided"}
    assert "no number of blocks would tell" in more_blocks_text(check)


def test_blocks_that_were_added_widen_the_intervals(tmp_path: Path) -> None:
    results = built(tmp_path / "r")
    once = result_of(results)
    extension = Extension(extended_at="now", from_blocks=6, to_blocks=8, num_done=12, num_looks=2)
    edit_manifest(results, extensions=(extension,))
    twice = result_of(results)
    assert twice.confidence == pytest.approx(1 - 0.01 / 6)
    assert twice.metrics["step_ms"].ci_high > once.metrics["step_ms"].ci_high  # type: ignore[operator]


def test_runs_that_fail_only_beside_neighbours_are_a_disturbance(tmp_path: Path) -> None:
    results = built(tmp_path / "r")
    failure = RunFailure(cause="out-of-memory", message="no memory was left")
    for planned in results.plan().runs:
        if planned.variant == "beside":
            edit_run(results, planned.run_id, state="failed", failure=failure)
    check = result_of(results)
    assert (check.lost_alone, check.lost_beside, check.loses_runs) == ((0, 8), (8, 8), True)
    assert "8 of 8 runs beside neighbours do not count, and 0 of 8 alone" in finding_text(check)


def test_blocks_without_numbers_for_another_reason_are_an_error(tmp_path: Path) -> None:
    results = built(tmp_path / "r")
    for planned in results.plan().runs[:6]:
        edit_run(results, planned.run_id, state="failed", failure=RunFailure(cause="port-taken", message="no port"))
    with pytest.raises(UsageError, match="has 5 usable blocks: a check of neighbours needs at least 6"):
        result_of(results)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "failed", "failure": RunFailure(cause="neighbours-lost", message="it ended")},
        {"state": "suspect", "warnings": (ResultWarning(code="neighbours-lost", message="it ended"),)},
        {"state": "running"},
    ],
)
def test_a_run_without_its_neighbours_does_not_count_as_one_beside_them(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    results = built(tmp_path / "r")
    edit_run(results, "003-b1-guided-top_k5", **changes)
    with pytest.raises(NotComparableError, match=r"003-b1-guided-top_k5.*noise neighbours --resume"):
        result_of(results)


def write_readings(results: ResultDirectory, slowing: float) -> None:
    """Readings of a GPU whose clock is ``slowing`` times as high beside neighbours, by the power limit."""
    for planned in results.plan().runs:
        run, is_beside = results.run(planned.run_id), planned.variant == "beside"
        with run.append("gpu") as gpu, run.append("host") as host:
            for i in range(10):
                t_ns, clock_hz = (
                    T0_NS + 1_000_000 * (i + 1),
                    1_900_000_000 + i * 1_000_000 + planned.block * 500_000,
                )
                gpu.write(
                    GpuSample(
                        t_ns=t_ns,
                        index=0,
                        source="nvml",
                        power_w=600.0 + planned.block + i,
                        sm_clock_hz=round(clock_hz * (slowing if is_beside else 1.0)),
                        throttle_reasons=("sw-power-cap",) if is_beside else (),
                    )
                )
                host.write(HostSample(t_ns=t_ns, server_cpu_cores=1.0 + planned.block / 1000))


def test_a_clock_that_the_power_limit_holds_down_is_named_as_the_likely_cause(tmp_path: Path) -> None:
    results = built(tmp_path / "r", effect=1.06)
    write_readings(results, slowing=0.94)
    check = result_of(results)
    assert check.throttled == {"sw-power-cap": (0.0, 1.0)}
    assert cause_text(check) == "the clock of the GPU fell by 6% (1906 to 1792 MHz), held down by the power limit"
    assert "likely cause: the clock of the GPU fell by 6%" in finding_text(check)


def test_readings_that_do_not_change_are_no_cause(tmp_path: Path) -> None:
    results = built(tmp_path / "r", effect=1.06)
    write_readings(results, slowing=1.0)
    check = result_of(results)
    assert not check.readings["sm_clock_hz"].is_beyond_chance
    assert cause_text(check) is None
    assert "likely cause" not in finding_text(check)


def test_the_arms_of_a_check_are_the_baseline_twice_in_balanced_order() -> None:
    planned = alone_and_beside(parse_profile(PROFILE_YAML, "built"), 6)
    assert planned.variants["alone"] == planned.variants["beside"]
    orders = [run.variant for run in plan_runs(planned).runs if run.position == 0]
    assert sorted(orders) == ["alone"] * 3 + ["beside"] * 3


@pytest.mark.parametrize(
    ("noise", "number", "reason"),
    [
        (None, 22, "assumed: no A/A on file"),
        (noise_of(0.004), 6, "at a scatter of 0.2% between blocks (measured) a disturbance of 2% is found"),
        (noise_of(0.03, 0.03), 10, "a disturbance of 6% is found with a power of 80%"),
        (noise_of(0.001, 0.2), 24, "the most that are planned unasked"),
    ],
)
def test_the_number_of_blocks_follows_from_the_power(noise: NoiseFloor | None, number: int, reason: str) -> None:
    planned = blocks_of_check(parse_profile(CHECK_YAML, "built"), noise)
    assert (planned.number, planned.number % 2) == (number, 0)
    assert reason in planned.reason


def test_the_planned_number_of_blocks_has_the_power_that_is_promised() -> None:
    profile = parse_profile(CHECK_YAML, "built")
    number = blocks_of_check(profile, None).number
    stream, margins = np.random.default_rng(23), margins_of(0.01)
    positions = [1 if block % 2 else -1 for block in range(number)]
    findings = []
    for _ in range(300):
        logs = stream.normal(math.log1p(0.02), 0.02, number)
        findings.append(finding_of(estimate_paired(list(logs), confidence_of_claims(3), positions), margins))
    assert findings.count("disturbed") > 0.73 * len(findings)  # 0.8 less three standard deviations of luck
