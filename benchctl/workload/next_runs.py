"""Runs to add to the data of a step-time model, as a profile that is ready to run.

A profile has one set of requests for all its runs. Lengths become lists that prompts take in turn; each concurrency
becomes a limit of the server's batch under a load that keeps the largest of them open. So every length meets every
way of serving that was asked for, which is more than was asked for and never less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchctl.errors import UsageError
from benchctl.profile.engine_options import options_class
from benchctl.profile.load import stored_profile
from benchctl.profile.yaml import dump_document
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
    models, or on several numbers of devices, become cells of a sweep, each once. ``seed`` makes the prompts differ
    from those measured before. Raises UsageError without runs, and for several devices of an unknown engine.
    """
    if not runs:
        raise UsageError("no runs to add: the diagnosis asks for none, so there is no profile to write")
    if engine is None and any((run.tensor_parallel or 1) > 1 for run in runs):
        raise UsageError(
            "the runs to add need several devices, which the simulator of a profile without an engine has not: "
            "name the engine that was measured with --engine, such as vllm"
        )
    lines = ["# Runs that make a step-time model better:"]
    for run in runs:
        size = f"prompts of {run.prompt_tokens}, outputs of {run.output_tokens}, {run.concurrency} open"
        names = f" ({', '.join(run.coefficients)})" if run.coefficients else ""
        lines.append(f"# * {size}: {run.reason}{names}")
    return "\n".join(lines) + "\n" + dump_document(_document(runs, engine, model, seed))


def _document(
    runs: Sequence[RunToAdd], engine: str | Mapping[str, Any] | None, model: str | None, seed: int
) -> dict[str, Any]:
    """One arm for each way of serving. The baseline has the largest concurrency, which needs no limit."""
    sizes = list(dict.fromkeys((run.prompt_tokens, run.output_tokens) for run in runs))
    ways = sorted(_ways(runs), key=lambda way: way["max_num_seqs"])
    baseline, others = ways[-1], ways[:-1]
    factors = {name for way in others for name in way if way[name] != baseline[name]}
    largest = baseline["max_num_seqs"]
    num_prompts = max(num_requests(largest), num_requests(1) * len(sizes))
    document: dict[str, Any] = {
        "extends": _BASE,
        "description": "Runs that make a step-time model better, by its diagnosis",
        "seed": seed,
    }
    if described := _engine(engine, baseline["server.tensor_parallel_size"] or 1):
        document["engine"] = described
    if served := model or baseline["model"]:
        document["model"] = served
    document["workload"] = {
        "num_prompts": -(-num_prompts // len(sizes)) * len(sizes),
        "input_len": [prompt for prompt, _ in sizes],
        "output_len": [output for _, output in sizes],
        "arrival": {"max_concurrency": largest},
    }
    if factors:
        cells = [{name: value for name, value in way.items() if name in factors} for way in others]
        document["variants"] = {"added": {"description": "the same requests, otherwise served"}}
        document["sweep"] = {name: list(dict.fromkeys(cell[name] for cell in cells)) for name in cells[0]}
        document["allowed_differences"] = [_SETTINGS[factor] for factor in cells[0]]
        document["primary_metrics"] = ["step_ms", "wall_s"]
    if factors == {"max_num_seqs"}:
        document["per_engine"] = {
            kind: {"variants": {"added": None}, "sweep": {"max_num_seqs": None}} for kind in _UNLIMITED_ENGINES
        }
    if len(factors) > 1:
        document["cells"] = cells
    return document


_SETTINGS: Final = {
    "model": "model",
    "server.tensor_parallel_size": "server.tensor_parallel_size",
    "max_num_seqs": "server.max_num_seqs",
}


def _ways(runs: Sequence[RunToAdd]) -> list[dict[str, Any]]:
    """Ways of serving that the runs ask for, each once; where any model or size will do, the first named one."""
    model = next((run.model for run in runs if run.model is not None), None)
    devices = next((run.tensor_parallel for run in runs if run.tensor_parallel is not None), None)
    ways = [(run.model or model, run.tensor_parallel or devices, run.concurrency) for run in runs]
    return [dict(zip(_SETTINGS, way, strict=True)) for way in dict.fromkeys(ways)]


def _engine(engine: str | Mapping[str, Any] | None, devices: int) -> dict[str, Any]:
    named: dict[str, Any] = {"preset": engine} if isinstance(engine, str) else dict(engine or {})
    spread = {"tensor_parallel_size": devices} if devices > 1 else {}
    options = {**named.pop("options", {}), **spread}
    return {**named, **({"options": options} if options else {})}
