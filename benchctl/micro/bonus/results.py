"""Times of passes from a result directory, and what they say on backfill."""

from dataclasses import dataclass
from pathlib import Path

from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.engines.micro.options import MicroOptions
from benchctl.errors import UsageError
from benchctl.micro.bonus.design import BonusDesign, backfill_point, decode_point, measured_designs
from benchctl.micro.bonus.published import PASSES
from benchctl.micro.bonus.verdict import BackfillVerdict, Cost, PassTimes, cost_over_blocks, judge_backfill
from benchctl.micro.point import ForwardPoint, Mode, Phase
from benchctl.micro.run import point_of
from benchctl.units import NS_PER_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBeside:
    """A published number, and the cost of the same pass here; None where it was not measured."""

    phase: Phase
    mode: Mode
    batch_size: int
    published_ms: float
    cost: Cost | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBonus:
    """The verdicts of a result directory, one for each context."""

    path: Path
    model: str
    device: str
    dtype: str
    verdicts: tuple[tuple[BonusDesign, BackfillVerdict], ...]
    published: tuple[PublishedBeside, ...]

    @property
    def is_decided(self) -> bool:
        """Every row has a verdict."""
        return all(row.cheaper is not None for _, verdict in self.verdicts for row in verdict.comparisons)

    @property
    def where(self) -> str:
        return f"{self.model}, {self.dtype}, on {self.device}"


def measured_bonus(path: Path, *, allow_suspect: bool = False) -> MeasuredBonus:
    """The verdicts on the passes of a directory that ``benchctl micro`` measured.

    Raises UsageError for a directory of requests, and for one without the passes of a comparison.
    """
    experiment = load_experiment(path, allow_suspect=allow_suspect)
    kind = experiment.profile.engine.kind
    if kind != "micro":
        raise UsageError(
            f"{path} holds requests to engine {kind!r}; name a directory that 'benchctl micro bonus' measured"
        )
    times = pass_times(experiment)
    designs = measured_designs(times)
    if not designs:
        raise UsageError(
            f"{path} has no batch size B with decodes at B and 2B and a prefill of B single tokens behind the same "
            "context, in runs that count; measure one with 'benchctl micro bonus'"
        )
    records = [run.record for run in experiment.results.runs]
    config = next((record.effective_config for record in records if record.effective_config), {})
    return MeasuredBonus(
        path=path,
        model=experiment.profile.model,
        device=str(config.get("server.device_name", "an unknown device")),
        dtype=str(config.get("server.dtype", "an unknown type")),
        verdicts=tuple((design, judge_backfill(times, design)) for design in designs),
        published=_published_beside(times, designs[0].context_tokens),
    )


def pass_times(experiment: Experiment) -> PassTimes:
    """The median of the replays of each pass in each block, from runs that count."""
    times: dict[tuple[ForwardPoint, Mode], dict[int, float]] = {}
    for run in experiment.results.runs:
        settings = experiment.settings(run.record)
        if settings is None or not isinstance(settings.server, MicroOptions):
            continue
        median_ms = experiment.metrics(run)["p50_step_ms"]
        if median_ms is not None and experiment.usability(run).is_usable:
            key = (point_of(settings.server), settings.server.mode)
            times.setdefault(key, {})[run.record.block] = median_ms * NS_PER_MS
    return times


def _published_beside(times: PassTimes, context_tokens: int) -> tuple[PublishedBeside, ...]:
    beside = []
    for published in PASSES:
        point_at = decode_point if published.phase == "decode" else backfill_point
        for batch_size, ms in published.ms_by_batch:
            by_block = times.get((point_at(batch_size, context_tokens), published.mode))
            beside.append(
                PublishedBeside(
                    phase=published.phase,
                    mode=published.mode,
                    batch_size=batch_size,
                    published_ms=ms,
                    cost=None if by_block is None else cost_over_blocks(list(by_block.values())),
                )
            )
    return tuple(beside)
