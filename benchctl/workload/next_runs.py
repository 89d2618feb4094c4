"""Runs to add to the data of a step-time model, as a profile that is ready to run.

A profile has one set of requests for all its runs. Lengths become lists that prompts take in turn; each concurrency
becomes a limit of the server's batch under a load that keeps the largest of them open. So every length meets every
concurrency, which is more than was asked for and never less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchctl.errors import UsageError
from benchctl.profile.engine_table import options_class
from benchctl.profile.load import stored_profile
from benchctl.profile.sources.yaml_text import dump_document
from benchctl.records.directory import ResultDirectory
from benchctl.steptime.diagnosis.run_to_add import RunToAdd, num_requests
from benchctl.steptime.work import ObservedSteps
from benchctl.untrusted.files import is_there

_BASE: Final = "steptime-w1"
_UNLIMITED_ENGINES: Final = ("transformers", "attach")
"""Engines without a limit of the batch."""


def measured_engine(sources: Sequence[Path]) -> dict[str, Any] | None:
    """Kind and options of the engine of the first result directory; None among tables of steps.

    Options that have their default, or that the runs to add set themselves, are left out.
    """
    for directory in sources:
        if is_there(path := directory / "profile.yaml", within=directory):
            engine = stored_profile(ResultDirectory(directory).profile_yaml(), str(path)).engine
            fields = options_class(engine.kind).model_fields
            defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
            options = {
                name: value
                for name, value in engine.options.items()
                if name != "max_num_seqs" and (tuple(value) if isinstance(value, list) else value) != defaults[name]
            }
            return {"kind": engine.kind, **({"options": options} if options else {})}
    return None


def named_as_measured(runs: Sequence[RunToAdd], observed: Sequence[ObservedSteps]) -> tuple[RunToAdd, ...]:
    """Runs whose models are called as those of the measured runs: by a directory, not its last name."""
    names = {run.deployment.shape.name: run.model for run in observed}
    return tuple(replace(run, model=None if run.model is None else names.get(run.model, run.model)) for run in runs)


def profile_text_of_runs(
    runs: Sequence[RunToAdd],
    *,
    engine: str | Mapping[str, Any] | None = None,
    model: str | None = None,
    seed: int = 0,
) -> str:
    """The profile of ``runs`` as YAML, on top of ``steptime-w1``; each run with its reason as a comment.

    ``engine``, a name or kind and options, and ``model`` replace those of ``steptime-w1``. Runs of several
    models, or on several numbers of devices, become values of a sweep. ``seed`` makes the prompts differ from
    those measured before. Raises UsageError without runs.
    """
    if not runs:
        raise UsageError("no runs to add: the diagnosis asks for none, so there is no profile to write")
    lines = ["# Runs that make a step-time model better:"]
    for run in runs:
        size = f"prompts of {run.prompt_tokens}, outputs of {run.output_tokens}, {run.concurrency} open"
        names = f" ({', '.join(run.coefficients)})" if run.coefficients else ""
        lines.append(f"# * {size}: {run.reason}{names}")
    return "\n".join(lines) + "\n" + dump_document(_document(runs, engine, model, seed))


def _document(
    runs: Sequence[RunToAdd], engine: str | Mapping[str, Any] | None, model: str | None, seed: int
) -> dict[str, Any]:
    sizes = list(dict.fromkeys((run.prompt_tokens, run.output_tokens) for run in runs))
    largest = max(run.concurrency for run in runs)
    num_prompts = max(num_requests(largest), num_requests(1) * len(sizes))
    factors = _factors(runs)
    document: dict[str, Any] = {
        "extends": _BASE,
        "description": "Runs that make a step-time model better, by its diagnosis",
        "seed": seed,
    }
    models, devices = _models(runs), _devices(runs)
    described = _engine(engine, devices[0] if len(devices) == 1 else 1)
    if described:
        document["engine"] = described
    if model is not None or len(models) == 1:
        document["model"] = models[0] if model is None else model
    document["workload"] = {
        "num_prompts": -(-num_prompts // len(sizes)) * len(sizes),
        "input_len": [prompt for prompt, _ in sizes],
        "output_len": [output for _, output in sizes],
        "arrival": {"max_concurrency": largest},
    }
    if factors:
        document["variants"] = {"added": {"description": "the same requests, otherwise served"}}
        document["sweep"] = factors
        document["allowed_differences"] = [_SETTINGS[factor] for factor in factors]
        document["primary_metrics"] = ["step_ms", "wall_s"]
    if set(factors) == {"max_num_seqs"}:
        document["per_engine"] = {
            kind: {"variants": {"added": None}, "sweep": {"max_num_seqs": None}} for kind in _UNLIMITED_ENGINES
        }
    return document


_SETTINGS: Final = {
    "max_num_seqs": "server.max_num_seqs",
    "model": "model",
    "server.tensor_parallel_size": "server.tensor_parallel_size",
}


def _engine(engine: str | Mapping[str, Any] | None, devices: int) -> dict[str, Any]:
    named: dict[str, Any] = {"preset": engine} if isinstance(engine, str) else dict(engine or {})
    spread = {"tensor_parallel_size": devices} if devices > 1 else {}
    options = {**named.pop("options", {}), **spread}
    return {**named, **({"options": options} if options else {})}


def _models(runs: Sequence[RunToAdd]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(run.model for run in runs if run.model is not None))


def _devices(runs: Sequence[RunToAdd]) -> tuple[int, ...]:
    return tuple(sorted({run.tensor_parallel for run in runs if run.tensor_parallel is not None}))


def _factors(runs: Sequence[RunToAdd]) -> dict[str, list[Any]]:
    """Values of each factor that the baseline does not have.

    The baseline serves the largest concurrency without a limit, as the base profile's model on its devices. With
    several factors every combination is measured, so that the largest concurrency is listed as well.
    """
    concurrencies = sorted({run.concurrency for run in runs})
    factors: dict[str, list[Any]] = {}
    if len(_models(runs)) > 1:
        factors["model"] = [*_models(runs)]
    if len(_devices(runs)) > 1:
        factors["server.tensor_parallel_size"] = [*_devices(runs)]
    if len(concurrencies) > 1:
        factors["max_num_seqs"] = concurrencies if factors else concurrencies[:-1]
    return factors
