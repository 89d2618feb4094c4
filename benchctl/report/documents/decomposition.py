"""A decomposition as a JSON document: factors that multiply, seconds that add up."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from benchctl.analysis.attribution.decomposition import Decomposition
from benchctl.analysis.attribution.estimate import Contribution
from benchctl.analysis.attribution.factors import WallSplit
from benchctl.analysis.attribution.text import batch_line, floor_line, latency_line, model_line, sentence, wall_line
from benchctl.analysis.attribution.work_split import StepFloor
from benchctl.analysis.statistics.block_ratio import RatioEstimate


def decomposition_document(decomposition: Decomposition | None) -> dict[str, Any] | None:
    """Everything of a decomposition; times in seconds, factors and shares as numbers."""
    if decomposition is None:
        return None
    lines = [line(decomposition) for line in (wall_line, latency_line, batch_line, model_line, floor_line)]
    wall = decomposition.wall
    return {
        "sentence": sentence(decomposition),
        "lines": [line for line in lines if line is not None],
        "blocks": decomposition.num_blocks,
        "wall": None if wall is None else _wall_document(wall),
        "latency": _latency_document(decomposition),
        "sections": _sections_document(decomposition),
        "batches": _batches_document(decomposition),
        "work": _work_document(decomposition),
        "work_missing": decomposition.work_missing,
        "model": _model_document(decomposition),
        "model_missing": decomposition.model_missing,
    }


def _wall_document(wall: WallSplit) -> dict[str, Any]:
    return {
        "a_s": wall.a_s,
        "b_s": wall.b_s,
        **ratio_document(wall.total),
        "factors": [
            {
                "name": factor.name,
                "meaning": factor.meaning,
                **ratio_document(factor.estimate),
                "added_s": factor.added_s,
                "share": factor.share_of(wall.total),
            }
            for factor in wall.factors
        ],
        "phases": None if wall.phases is None else _parts_document(wall.phases.whole, wall.phases.parts),
    }


def ratio_document(estimate: RatioEstimate) -> dict[str, float | None]:
    """The ratio with both ends of its interval."""
    return {"ratio": estimate.ratio, "ci_low": estimate.ci_low, "ci_high": estimate.ci_high}


def _parts_document(whole: Contribution, parts: Iterable[Contribution]) -> dict[str, Any]:
    return {"whole": asdict(whole), "parts": [asdict(part) for part in parts]}


def _latency_document(decomposition: Decomposition) -> dict[str, Any] | None:
    split = decomposition.latency
    if split is None:
        return None
    return {**_parts_document(split.whole, split.parts), "requests": split.num_requests, "warning": split.warning}


def _sections_document(decomposition: Decomposition) -> dict[str, Any] | None:
    split = decomposition.sections
    if split is None:
        return None
    parts = _parts_document(split.whole, split.sections)
    return {**parts, "clock": split.clock_note, "unplaced": list(split.unplaced)}


def _batches_document(decomposition: Decomposition) -> dict[str, Any] | None:
    split = decomposition.batches
    if split is None:
        return None
    bins = [{"bin" if key == "label" else key: value for key, value in asdict(bin_).items()} for bin_ in split.bins]
    return {**_parts_document(split.whole, (split.batches, split.same_batch)), "bins": bins}


def _work_document(decomposition: Decomposition) -> dict[str, Any] | None:
    split = decomposition.work
    if split is None:
        return None
    return {
        "model": f"roofline of {split.hardware}",
        **_parts_document(split.whole, split.parts),
        "unexplained_frac": split.unexplained_frac,
        "a_compute_frac": split.a_compute_frac,
        "b_compute_frac": split.b_compute_frac,
        "floor": None if split.floor is None else floor_document(split.floor),
    }


def floor_document(floor: StepFloor) -> dict[str, Any]:
    """The ratio of the steps at the peaks of a device, its causes, and the measured ratio."""
    low, high = floor.interval or (None, None)
    return {
        "hardware": floor.hardware,
        "ratio": floor.ratio,
        "causes": dict(floor.causes),
        "measured_ratio": floor.measured,
        "measured_ci_low": low,
        "measured_ci_high": high,
        "times_floor": floor.times_floor,
        "a_times_floor": floor.a_times_floor,
        "added_s": floor.added_s,
        "floor_added_s": floor.floor_added_s,
    }


def _model_document(decomposition: Decomposition) -> dict[str, Any] | None:
    split = decomposition.model
    if split is None:
        return None
    return {
        "source": split.source.name,
        "held_out_mape_frac": split.source.mape_frac,
        **_parts_document(split.whole, split.parts),
        "predicted": asdict(split.predicted),
        "explained_frac": split.explained_frac,
    }
