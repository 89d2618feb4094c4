"""Times of passes from a result directory, and what they say on backfill."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchctl.analysis.bonus.design import BonusDesign, backfill_point, decode_point, measured_designs
from benchctl.analysis.bonus.published import PASSES
from benchctl.analysis.bonus.verdict import BackfillVerdict, BlockTimes, Cost, cost_over_blocks, judge_backfill
from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.errors import UsageError
from benchctl.profile.sections.forward_pass import ForwardPass, Mode, Phase
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
    missing: tuple[str, ...] = ()
    """Sentences on planned comparisons that have no row, because a pass of theirs does not count."""

    @property
    def is_decided(self) -> bool:
        """Every planned comparison has a verdict."""
        rows = [row for _, verdict in self.verdicts for row in verdict.comparisons]
        return not self.missing and all(row.cheaper is not None for row in rows)

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
    bonus = bonus_of(experiment)
    if bonus is None or not bonus.verdicts:
        raise UsageError(
            f"{path} has no batch size B with decodes at B and 2B and a prefill of B single tokens behind the same "
            "context, in runs that count; measure one with 'benchctl micro bonus'"
        )
    return bonus


def bonus_of(experiment: Experiment) -> MeasuredBonus | None:
    """The verdicts of an experiment; None for one whose plan compares no ways of backfill.

    The planned passes say what an experiment is about, and not its name, which anyone may change: it compares
    where ``measured_designs`` recognises a design in them. Of ``benchctl micro`` only ``bonus`` plans a prefill
    behind tokens in the cache.
    """
    planned = measured_designs(_planned_passes(experiment))
    if not planned:
        return None
    times = block_times(experiment)
    verdicts, problems = _verdicts(times)
    records = [run.record for run in experiment.results.runs]
    config = next((record.effective_config for record in records if record.effective_config), {})
    return MeasuredBonus(
        path=experiment.source,
        model=experiment.profile.model,
        device=str(config.get("server.device_name", "an unknown device")),
        dtype=str(config.get("server.dtype", "an unknown type")),
        verdicts=verdicts,
        published=_published_beside(times, verdicts[0][0].context_tokens) if verdicts else (),
        missing=(*problems, *_missing_rows(planned, [design for design, _ in verdicts])),
    )


def block_times(experiment: Experiment) -> BlockTimes:
    """The median of the replays of each pass in each block, from runs that count."""
    times: dict[ForwardPass, dict[int, float]] = {}
    for run in experiment.results.runs:
        settings = experiment.settings(run.record)
        if settings is None or settings.server.forward_pass is None:
            continue
        median_ms = experiment.metrics(run)["p50_step_ms"]
        if median_ms is not None and experiment.usability(run).is_usable:
            times.setdefault(settings.server.forward_pass, {})[run.record.block] = median_ms * NS_PER_MS
    return times


def _planned_passes(experiment: Experiment) -> Iterator[ForwardPass]:
    for planned in experiment.results.plan.runs:
        settings = experiment.settings(planned)
        if settings is not None and settings.server.forward_pass is not None:
            yield settings.server.forward_pass


def _verdicts(times: BlockTimes) -> tuple[tuple[tuple[BonusDesign, BackfillVerdict], ...], tuple[str, ...]]:
    """The verdict of each design in the passes, and the reason why one has none."""
    verdicts, problems = [], []
    for design in measured_designs(times):
        try:
            verdicts.append((design, judge_backfill(times, design)))
        except UsageError as error:
            problems.append(str(error))
    return tuple(verdicts), tuple(problems)


def _missing_rows(planned: Iterable[BonusDesign], judged: Iterable[BonusDesign]) -> Iterator[str]:
    """For each context, how many of its comparisons have no row, and at which batch sizes."""
    has_row = {row for design in judged for row in design.rows}
    for design in planned:
        missing = [row for row in design.rows if row not in has_row]
        if missing:
            sizes = dict.fromkeys(str(row.batch_size) for row in missing)
            yield (
                f"{len(missing)} of {len(design.rows)} comparisons behind {design.context_tokens} tokens in the "
                f"cache are missing, at batch {', '.join(sizes)}: not every pass of theirs is in a run that counts"
            )


def _published_beside(times: BlockTimes, context_tokens: int) -> tuple[PublishedBeside, ...]:
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
