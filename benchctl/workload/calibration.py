"""Runs that a step-time model is fitted to: the workloads W1 to W5, V1 for models that the fit has not seen, and
the runs to add by its diagnosis as a profile.

Each workload determines some of the coefficients: W1 prompts alone, W2 single decoding rows after contexts of many
lengths, W3 batches of many sizes, W4 both phases at once, W5 several devices. What each sends is that of its
profile, ``steptime-w1`` and so on. It is written as configurations of kubernetes-sigs/inference-perf, too: a file
has one length of prompts and one of outputs, so a workload with several sizes becomes several files; every request
has a prompt of its own, the number of open requests is fixed rather than a rate, and answers are streamed.

A profile has one set of requests for all its runs. Lengths become lists that prompts take in turn; each concurrency
becomes a limit of the server's batch under a load that keeps the largest of them open. So every length meets every
way of serving that was asked for, which is more than was asked for and never less.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from benchctl.errors import UsageError
from benchctl.profile.engine_table import ENGINES, options_class
from benchctl.profile.load import load_profile, stored_profile
from benchctl.profile.planning import arms
from benchctl.profile.yaml import dump_document
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import write_bytes_atomic
from benchctl.steptime.diagnose import RunToAdd, num_requests
from benchctl.steptime.work import ObservedSteps
from benchctl.untrusted.files import is_there
from benchctl.workload.prepare import prepare_requests

SEED: Final = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationStage:
    """Requests of one size at one concurrency."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationWorkload:
    """One workload: its profile, and the terms of a step that it tells apart from others."""

    name: str
    profile: str
    purpose: str
    remark: str = ""

    @property
    def num_requests(self) -> int:
        """Requests that the profile sends in a block, without warm-up."""
        profile = load_profile(self.profile)
        return len(arms(profile)) * len(prepare_requests(profile).requests)

    @property
    def stages(self) -> tuple[CalibrationStage, ...]:
        """Requests that the profile sends to one server: those of each length, once for each size of the batch."""
        profile = load_profile(self.profile)
        lengths = [(request.prompt_tokens, request.max_tokens) for request in prepare_requests(profile).requests]
        batches = {profile.workload.arrival.max_concurrency, *profile.sweep.get("max_num_seqs", ())}
        return tuple(
            CalibrationStage(
                prompt_tokens=prompt, output_tokens=output, concurrency=batch, num_requests=num_requests
            )
            for (prompt, output), num_requests in Counter(lengths).items()
            for batch in sorted(int(batch) for batch in batches if batch is not None)
        )

    def by_size(self) -> Iterator[tuple[tuple[int, int], tuple[CalibrationStage, ...]]]:
        """Stages of equal lengths together: tools with one length in a file need a file for each."""
        for size, stages in groupby(self.stages, key=lambda stage: (stage.prompt_tokens, stage.output_tokens)):
            yield size, tuple(stages)


WORKLOADS: Final[dict[str, CalibrationWorkload]] = {
    workload.name: workload
    for workload in (
        CalibrationWorkload(
            name="W1",
            profile="steptime-w1",
            purpose="time of a prompt by its length, and of a step with nothing else in it",
        ),
        CalibrationWorkload(
            name="W2",
            profile="steptime-w2",
            purpose="time of one decoding row by its context",
        ),
        CalibrationWorkload(
            name="W3",
            profile="steptime-w3",
            purpose="time by the number of rows, and experts read in a batch",
        ),
        CalibrationWorkload(
            name="W4",
            profile="steptime-w4",
            purpose="prompts beside decoding rows",
        ),
        CalibrationWorkload(
            name="W5",
            profile="steptime-w5",
            purpose="communication between devices: W3 on 1, 2 and 4 of them",
            remark="run it against a server of each tensor-parallel size",
        ),
        CalibrationWorkload(
            name="V1",
            profile="steptime-v1",
            purpose="validation on a model that the fit has not seen",
            remark="never fit to these runs",
        ),
    )
}


def calibration_workload(name: str) -> CalibrationWorkload:
    """The workload of a name. Raises UsageError for an unknown one."""
    if (workload := WORKLOADS.get(name.upper())) is None:
        raise UsageError(f"unknown workload {name!r}; name one of {', '.join(WORKLOADS)}")
    return workload


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
    described, served = _engine(engine, baseline["server.tensor_parallel_size"] or 1), model or baseline["model"]
    document: dict[str, Any] = {
        "extends": "steptime-w1",
        "description": "Runs that make a step-time model better, by its diagnosis",
        "seed": seed,
        **({"engine": described} if described else {}),
        **({"model": served} if served else {}),
        "workload": {
            "num_prompts": -(-num_prompts // len(sizes)) * len(sizes),
            "input_len": [prompt for prompt, _ in sizes],
            "output_len": [output for _, output in sizes],
            "arrival": {"max_concurrency": largest},
        },
    }
    cells = [{name: value for name, value in way.items() if name in factors} for way in others]
    if factors:
        document |= {
            "variants": {"added": {"description": "the same requests, otherwise served"}},
            "sweep": {name: list(dict.fromkeys(cell[name] for cell in cells)) for name in cells[0]},
            "allowed_differences": [_SETTINGS[factor] for factor in cells[0]],
            "primary_metrics": ["step_ms", "wall_s"],
        }
    if factors == {"max_num_seqs"}:
        document["per_engine"] = {
            kind: {"variants": {"added": None}, "sweep": {"max_num_seqs": None}}
            for kind, spec in ENGINES.items()
            if spec.serves_requests and "max_num_seqs" not in options_class(kind).model_fields
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
    options = {**named.pop("options", {}), **({"tensor_parallel_size": devices} if devices > 1 else {})}
    return {**named, **({"options": options} if options else {})}


DEFAULT_URL: Final = "http://127.0.0.1:8000"


def inference_perf_config(
    stages: tuple[CalibrationStage, ...], *, base_url: str = DEFAULT_URL, model_name: str | None = None
) -> dict[str, Any]:
    """The document of stages with equal lengths."""
    return {
        "api": {"type": "completion", "streaming": True},
        "server": {
            "type": "vllm",
            "base_url": base_url,
            **({} if model_name is None else {"model_name": model_name}),
            "ignore_eos": True,
        },
        "load": {
            "type": "concurrent",
            "base_seed": SEED,
            "num_workers": 1,
            "worker_max_concurrency": max(100, *(stage.concurrency for stage in stages)),
            "stages": [
                {"num_requests": stage.num_requests, "concurrency_level": stage.concurrency} for stage in stages
            ],
        },
        "data": {
            "type": "shared_prefix",
            "shared_prefix": {
                "seed": SEED,
                "num_unique_system_prompts": sum(stage.num_requests for stage in stages),
                "num_users_per_system_prompt": 1,
                "system_prompt_len": 0,
                "question_len": stages[0].prompt_tokens,
                "output_len": stages[0].output_tokens,
            },
        },
        "report": {"request_lifecycle": {"summary": True, "per_stage": True, "per_request": True}},
    }


def write_inference_perf(
    workload: CalibrationWorkload, out: Path, *, base_url: str = DEFAULT_URL, model_name: str | None = None
) -> tuple[Path, ...]:
    """Write the files of one workload, such as ``w1-128-1.yaml``, and return them."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for (prompt, output), stages in workload.by_size():
        path = out / f"{workload.name.lower()}-{prompt}-{output}.yaml"
        header = f"# {workload.name}: {workload.purpose}{'; ' + workload.remark if workload.remark else ''}.\n"
        document = inference_perf_config(stages, base_url=base_url, model_name=model_name)
        write_bytes_atomic(path, (header + dump_document(document)).encode())
        paths.append(path)
    return tuple(paths)
