"""Where the time went, on result directories of known content."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.results.builders import (
    T0_NS,
    edit_manifest,
    edit_requests,
    edit_run,
    edit_steps,
    set_positions,
    share_request_set,
    write_results,
)
from support.results.decomposition_laws import assert_exact

from benchctl.analysis.attribution.decomposition import Decomposition, sentence, wall_line
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.compare.words import change_text
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.statistics.estimate import Estimator
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import RequestRecord
from benchctl.records.schema import StepRecord

TRUTH = 15.5 / 10
STEADY = ({"baseline": 1.0, "guided": 1.0},) * 6
SHAKEN = tuple({"baseline": 1 + 0.02 * (i % 3), "guided": 1.01 + 0.015 * (i % 4)} for i in range(6))
EXAMPLE = Path(__file__).parents[2] / "fixtures" / "example-without-digests"


def cell_of(a: str, b: str, estimator: Estimator = "mean") -> CellComparison:
    return compare_sides(parse_side(a), parse_side(b), CompareOptions(estimator=estimator)).cells[0]


def decomposed(a: str, b: str) -> Decomposition:
    found = cell_of(a, b).decomposition
    assert found is not None
    assert_exact(found)
    return found


def within(results: ResultDirectory) -> Decomposition:
    return decomposed(f"{results.path}:baseline", f"{results.path}:guided")


def ratios(found: Decomposition) -> dict[str, float]:
    return {factor.name: factor.estimate.ratio for factor in found.wall.parts}


def natural(path: Path, **options: Any) -> ResultDirectory:
    """A directory whose answers end by themselves, ``options`` as in ``write_results``."""
    results = write_results(path, **options)
    edit_manifest(results, stop="natural")
    return results


def test_slower_steps_are_the_whole_difference_and_the_sections_say_which(tmp_path: Path) -> None:
    found = within(write_results(tmp_path / "r", block_factors=STEADY))
    assert ratios(found) == pytest.approx({"steps": 1, "time per step": TRUTH, "remainder": 1})
    assert found.wall.whole.b_s - found.wall.whole.a_s == pytest.approx(8 * 5.5e-3)
    assert found.sections is not None
    added = {section.name: section.added_s for section in found.sections.parts if section.added_s}
    assert added == pytest.approx({"lvm_build_pending": 1e-3, "lvm_forward": 4e-3, "lvm_apply_guidance": 0.5e-3})
    assert sentence(found).startswith(
        "time per step carries 100 % of the +55%: 73 % of it lvm_forward; the roofline floor of its FLOPs and bytes"
    )


def test_time_that_no_section_names_stays_visible(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", block_factors=STEADY)
    for planned in results.plan().runs:
        if planned.variant == "guided":
            edit_steps(
                results, planned.run_id, lambda step: msgspec.structs.replace(step, dur_ns=step.dur_ns + 2_000_000)
            )
    found = within(results)
    assert found.sections is not None
    unnamed = next(section for section in found.sections.parts if section.name == "step (unnamed)")
    assert (unnamed.a_s, unnamed.b_s) == pytest.approx((0, 2e-3))


def test_a_section_that_only_one_side_divides_is_divided_on_both(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", block_factors=STEADY)

    def whole_sampler(step: StepRecord) -> StepRecord:
        kept = {name: step.sections_ns[name] for name in ("model_forward", "sampler_total")}
        return msgspec.structs.replace(step, sections_ns=kept)

    for planned in results.plan().runs:
        if planned.variant == "baseline":
            edit_steps(results, planned.run_id, whole_sampler)
    found = within(results)
    assert found.sections is not None
    names = [section.name for section in found.sections.parts]
    assert len(names) == len(set(names))
    assert "sampler_total" not in names
    undivided = next(section for section in found.sections.parts if section.name == "sampler_total (unnamed)")
    assert undivided.a_s == pytest.approx(0.2e-3)


def test_the_clock_of_the_sections_is_named(tmp_path: Path) -> None:
    found = within(write_results(tmp_path / "r", block_factors=STEADY))
    assert found.sections is not None
    assert found.sections.origin.startswith("host time, so a section may include waiting")


def test_fewer_tokens_at_the_same_pace_are_told_from_faster_steps(tmp_path: Path) -> None:
    long = natural(tmp_path / "long", block_factors=SHAKEN, output_tokens=8)
    short = natural(tmp_path / "short", block_factors=SHAKEN, output_tokens=6)
    share_request_set(short, long)
    found = decomposed(f"{long.path}:baseline", f"{short.path}:baseline")
    assert ratios(found) == pytest.approx(
        {"output tokens": 6 / 8, "steps per token": 1, "time per step": 1, "remainder": 1}
    )
    assert sentence(found) == "output tokens carries 100 % of the -25%"


def test_fewer_tokens_and_slower_steps_are_told_apart(tmp_path: Path) -> None:
    long = natural(tmp_path / "long", block_factors=STEADY, output_tokens=8)
    short = natural(tmp_path / "short", block_factors=({"baseline": 4 / 3},) * 6, cells=(), output_tokens=6)
    share_request_set(short, long)
    found = decomposed(f"{long.path}:baseline", f"{short.path}:baseline")
    assert ratios(found) == pytest.approx(
        {"output tokens": 6 / 8, "steps per token": 1, "time per step": 4 / 3, "remainder": 1}
    )
    text = sentence(found)
    assert "time per step +33%" in text
    assert "output tokens -25%" in text


def test_steps_that_yield_two_tokens_are_fewer_steps_per_token(tmp_path: Path) -> None:
    """Speculation: as many tokens in half of the steps, each of them slower."""
    plain = natural(tmp_path / "plain", block_factors=STEADY, output_tokens=8)
    fast = natural(tmp_path / "fast", block_factors=({"baseline": 1.25, "guided": 1.25},) * 6, output_tokens=4)

    share_request_set(fast, plain)

    def twice(request: RequestRecord) -> RequestRecord:
        choices = tuple(
            msgspec.structs.replace(choice, chunk_tokens=(2,) * 4, output_tokens=8) for choice in request.choices
        )
        return msgspec.structs.replace(request, choices=choices, completion_tokens=16)

    for planned in fast.plan().runs:
        edit_requests(fast, planned.run_id, twice)
        edit_steps(
            fast, planned.run_id, lambda step: msgspec.structs.replace(step, output_tokens=2 * step.num_seqs)
        )
    found = decomposed(f"{plain.path}:baseline", f"{fast.path}:baseline")
    assert ratios(found) == pytest.approx(
        {"output tokens": 1, "steps per token": 0.5, "time per step": 1.25, "remainder": 1}
    )
    assert sentence(found).startswith("steps per token -50% and time per step +25% make -37%")


def test_time_in_which_no_step_ran_is_the_remainder(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", block_factors=STEADY)
    for planned in results.plan().runs:
        if planned.variant == "guided":
            times = results.run(planned.run_id).read().times
            late = msgspec.structs.replace(times, last_token_ns=(times.last_token_ns or 0) + 40_000_000)
            edit_run(results, planned.run_id, times=late)
    found = within(results)
    assert ratios(found)["remainder"] == pytest.approx((8 * 15.5 + 40) / (8 * 15.5))


def shaken(path: Path, positions: tuple[int, int] | None) -> ResultDirectory:
    """Blocks that differ; ``positions`` are those of baseline and guided in every other one."""
    results = write_results(path, block_factors=SHAKEN)
    odd_blocks = positions or (0, 1)
    set_positions(
        results,
        {
            run.run_id: int(odd_blocks[run.variant == "guided"] if run.block % 2 else run.variant == "guided")
            for run in results.plan().runs
        },
    )
    return results


@pytest.mark.parametrize("positions", [None, (1, 0)])
def test_the_whole_is_what_the_table_says_and_its_factors_multiply_also_where_blocks_count_unequally(
    tmp_path: Path, positions: tuple[int, int] | None
) -> None:
    results = shaken(tmp_path / "r", positions)
    cell = cell_of(f"{results.path}:baseline", f"{results.path}:guided", "robust")
    found = cell.decomposition
    assert found is not None
    assert_exact(found)
    wall = next(metric.estimate for metric in cell.metrics if metric.metric.name == "wall_s")
    assert wall is not None
    assert wall.method == "robust"
    assert found.wall.whole.estimate.log_ratio == pytest.approx(wall.log_ratio, abs=1e-9)
    assert found.wall.whole.estimate.log_interval == pytest.approx(wall.log_interval, abs=1e-6)


@pytest.mark.parametrize("positions", [None, (0, 1), (1, 0)])
def test_the_whole_is_what_the_table_says_also_where_the_order_in_the_blocks_is_taken_out(
    tmp_path: Path, positions: tuple[int, int] | None
) -> None:
    results = shaken(tmp_path / "r", positions)
    cell = cell_of(f"{results.path}:baseline", f"{results.path}:guided")
    found = cell.decomposition
    assert found is not None
    assert_exact(found)
    estimates = {metric.metric.name: metric.estimate for metric in cell.metrics}
    step = next(factor for factor in found.wall.parts if factor.name == "time per step")
    for name, ours in (("wall_s", found.wall.whole.estimate), ("step_ms", step.estimate)):
        theirs = estimates[name]
        assert theirs is not None
        assert ours.log_ratio == pytest.approx(theirs.log_ratio, abs=1e-9)
        assert ours.log_interval == pytest.approx(theirs.log_interval, abs=1e-6)
    taken_out = positions == (1, 0)
    assert (found.wall.whole.estimate.position_effect is not None) == taken_out


def test_swapping_the_sides_turns_every_part_around(tmp_path: Path) -> None:
    path = write_results(tmp_path / "r", block_factors=SHAKEN).path
    forth = decomposed(f"{path}:baseline", f"{path}:guided")
    back = decomposed(f"{path}:guided", f"{path}:baseline")
    for name, ratio in ratios(forth).items():
        assert ratio * ratios(back)[name] == pytest.approx(1)
    assert forth.sections is not None
    assert back.sections is not None
    turned = {section.name: -section.added_s for section in back.sections.parts}
    assert {section.name: section.added_s for section in forth.sections.parts} == pytest.approx(turned)


def test_sides_without_common_blocks_multiply_and_add_up_too(tmp_path: Path) -> None:
    path = write_results(tmp_path / "r", block_factors=SHAKEN).path
    other = write_results(tmp_path / "other", block_factors=SHAKEN[:4])
    cell = cell_of(f"{path}:baseline", f"{other.path}:guided")
    found = cell.decomposition
    assert found is not None
    assert_exact(found)
    metrics = {metric.metric.name: metric.estimate for metric in cell.metrics}
    factors = {factor.name: factor.estimate for factor in found.wall.parts}
    assert not found.wall.whole.estimate.is_paired
    assert found.wall.whole.estimate == metrics["wall_s"]
    assert (factors["steps"], factors["time per step"]) == (metrics["num_steps"], metrics["step_ms"])
    assert found.wall.whole.estimate.log_interval is not None
    assert found.wall.whole.a_s == pytest.approx(next(m.a for m in cell.metrics if m.metric.name == "wall_s"))


def test_sides_without_common_blocks_and_with_too_few_for_an_interval_say_so(tmp_path: Path) -> None:
    path = write_results(tmp_path / "r", block_factors=SHAKEN).path
    other = write_results(tmp_path / "other", block_factors=SHAKEN[:2]).path
    cell = cell_of(f"{path}:baseline", f"{other}:guided")
    wall = next(metric for metric in cell.metrics if metric.metric.name == "wall_s")
    change = change_text(wall)
    assert change.endswith(f"% [no interval: {len(SHAKEN)} against 2 runs]")
    assert cell.decomposition is not None
    assert cell.decomposition.wall.whole.estimate == wall.estimate
    assert " over too few runs for an interval" in sentence(cell.decomposition)


def test_scatter_alone_names_no_factor(tmp_path: Path) -> None:
    alike = tuple({"baseline": 1 + 0.05 * (i % 2), "guided": (1 + 0.05 * (i % 3)) / TRUTH} for i in range(6))
    found = within(write_results(tmp_path / "r", block_factors=alike))
    assert sentence(found).startswith("no factor can be told from 1 (")


def test_one_block_tells_nothing_from_nothing(tmp_path: Path) -> None:
    found = within(write_results(tmp_path / "r", block_factors=STEADY[:1]))
    assert sentence(found) == "the wall time changes by +55% in one block, which tells no factor from 1"
    assert wall_line(found) == "wall x1.550 = steps x1.000 * time per step x1.550 * remainder x1.000"


def test_a_directory_against_itself_has_no_difference_to_divide(tmp_path: Path) -> None:
    path = write_results(tmp_path / "r", block_factors=SHAKEN).path
    found = decomposed(f"{path}:baseline", f"{path}:baseline")
    assert all(factor.added_s == 0 for factor in found.wall.parts)
    assert sentence(found) == "no factor can be told from 1 (+0.00% in all)"


def test_without_a_step_log_the_tokens_are_what_is_left_to_divide_by(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", block_factors=SHAKEN)
    for planned in results.plan().runs:
        (results.run(planned.run_id).path / "steps.jsonl").unlink()
    found = within(results)
    assert set(ratios(found)) == {"output tokens", "wall time per token"}
    assert (found.step, found.sections, found.work) == (None, None, "there is no step log")


def test_the_committed_example_is_exact() -> None:
    found = decomposed(f"{EXAMPLE}:baseline", f"{EXAMPLE}:guided")
    assert math.isclose(math.prod(ratios(found).values()), found.wall.whole.estimate.ratio, rel_tol=1e-9)
    assert sentence(found).startswith(
        "time per step carries 104 % of the +365%: 59 % of the step's difference lvm_forward"
    )


def test_a_cell_without_any_wall_time_has_the_parts_of_its_steps_alone(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", block_factors=STEADY)
    for planned in results.plan().runs:
        times = results.run(planned.run_id).read().times
        nowhere = msgspec.structs.replace(times, first_send_ns=T0_NS, last_token_ns=T0_NS)
        edit_run(results, planned.run_id, times=nowhere)
    found = cell_of(f"{results.path}:baseline", f"{results.path}:guided").decomposition
    assert found is not None
    assert found.wall is None
    assert found.sections is not None
    assert sentence(found).startswith("the wall time is unknown, because the client's times do not count")
