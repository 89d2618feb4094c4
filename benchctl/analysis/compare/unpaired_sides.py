"""A side of an unpaired comparison: result files of other tools, or one arm of a result directory.

Each run is a replicate of its own: it shares no block with a run of the other side.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchctl.analysis.experiment.arms import Arm
from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.experiment.pairing import Side, arms_of, parse_side
from benchctl.analysis.metrics.request_timing import is_completed, latencies_ns, measured
from benchctl.errors import UsageError
from benchctl.interop.readers.files import exists, is_foreign, read_foreign
from benchctl.interop.readers.run import ForeignRun, Setting, drop_unknown, unanswered
from benchctl.profile.sections.workload import Arrival
from benchctl.records.loaded import LoadedRun
from benchctl.units import ms_from_ns

_VIRTUAL = "the simulator's clock is virtual: its times are scaled, those of another tool are not"
_CHOICES = "requests of benchctl asked for several choices each; other tools ask for one"


def is_unpaired(a: str, b: str) -> bool:
    """True where either side is a result file of another tool."""
    return is_foreign(a) or is_foreign(b)


def runs_of_side(text: str, *, allow_suspect: bool = False) -> tuple[ForeignRun, ...]:
    """The runs of a side. Raises UsageError where a directory has several arms and none is named."""
    if is_foreign(text):
        return read_foreign(text)
    side = parse_side(text)
    experiment = load_experiment(side.path, allow_suspect=allow_suspect)
    arm = _one_arm(arms_of(experiment), side)
    return tuple(_run(experiment, arm, run) for _, run in sorted(arm.runs.items()))


def name_of_side(text: str) -> str:
    """The shortest name of a side: its variant, or the last part of its path."""
    if is_foreign(text):
        paths = [Path(part) for part in ([text] if exists(Path(text)) else text.split(","))]
        return paths[0].resolve().name if len(paths) == 1 else f"{paths[0].name} and {len(paths) - 1} more"
    side = parse_side(text)
    return side.variant or side.path.resolve().name


def _one_arm(arms: Sequence[Arm], side: Side) -> Arm:
    matching = [arm for arm in arms if side.variant in (None, arm.variant)]
    if len(matching) == 1:
        return matching[0]
    labels = " | ".join(arm.label for arm in (matching or arms))
    if not matching:
        raise UsageError(f"{side.path} has no variant {side.variant!r}; it has {labels}")
    raise UsageError(
        f"{side} holds {labels}; only one of them can be compared with result files of another tool: name it as "
        "DIR:variant, or export the directory and name the files ('benchctl export')"
    )


def _run(experiment: Experiment, arm: Arm, run: LoadedRun) -> ForeignRun:
    metrics = experiment.counted_metrics(run)
    requests = measured(run.requests)
    model = run.record.effective_config.get("model")
    failed = sum(not is_completed(request) for request in requests)
    notes = [f"left out: {why}" for _, why in sorted(arm.excluded.items())]
    notes += [f"the client's times are left out: {why}" for _, why in sorted(arm.client_excluded.items())]
    notes += [_VIRTUAL] if run.record.clock_factor != 1 else []
    notes += [_CHOICES] if any(len(request.choices) > 1 for request in requests) else []
    return ForeignRun(
        source="benchctl",
        where=f"{experiment.source}/runs/{run.record.run_id}",
        metrics=drop_unknown(metrics),
        settings={
            "model_id": None if model is None else str(model),
            "num_prompts": float(len(requests)),
            "total_input_tokens": metrics["prompt_tokens"],
            **_load(experiment.profile.workload.arrival),
        },
        failure=unanswered(failed, len(requests)),
        notes=tuple(notes),
        latencies_ms=_latencies_ms(run, metrics),
    )


def _latencies_ms(run: LoadedRun, metrics: Mapping[str, float | None]) -> dict[str, tuple[float, ...]]:
    """The latencies of its completed requests, as far as they count."""
    completed = [request for request in measured(run.requests) if is_completed(request)]
    factor = run.record.clock_factor
    return {
        name: tuple(ms_from_ns(value * factor) for value in values)
        for name, values in latencies_ns(completed).items()
        if metrics.get(f"{name}_ms") is not None
    }


def _load(arrival: Arrival) -> dict[str, Setting]:
    is_immediate = arrival.kind in {"closed-loop", "burst"}
    limit = arrival.max_concurrency
    return {
        "request_rate": "inf" if is_immediate else arrival.request_rate,
        "max_concurrency": None if limit is None else float(limit),
    }
