"""Experiments in which each server gets several load points, simulated in virtual time, in a moment."""

import hashlib
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.profile.load import dump_profile, profile_sha256
from benchctl.profile.settings import load_part, server_part, under_load
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import encode
from benchctl.records.loaded import LoadedRun
from benchctl.records.loads import record_of_load, server_id
from benchctl.records.record import Plan
from benchctl.records.schema import SCHEMA_VERSION, Cell

LADDER: Final[dict[str, Any]] = {
    "name": "curve",
    "blocks": 4,
    "per_server": "ladder",
    "gates": [],
    "engine": {"kind": "sim", "options": {"noise": "published"}},
    "model": "qwen2.5-7b",
    "workload": {
        "dataset": "synthetic",
        "num_prompts": 24,
        "input_len": 64,
        "output_len": 16,
        "arrival": {"kind": "closed-loop", "max_concurrency": 4},
    },
    "sweep": {"max_concurrency": [2, 4, 8]},
    "variants": {"baseline": {}, "narrow": {"server": {"max_num_seqs": 3}}},
}
"""A profile whose step times have noise of their own in every load."""


def alone(ladder: Experiment, point: Cell, directory: Path) -> Experiment:
    """The experiment of one load point of a ladder alone, with exactly its records, as if there were no other."""
    stored, results = ResultDirectory(ladder.path), ResultDirectory(directory)
    profile = under_load(ladder.profile, point).model_copy(update={"per_server": "fresh", "sweep": {}})
    directory.mkdir(parents=True)
    results.write_profile(dump_profile(profile))
    content = b"".join(encode(request) + b"\n" for request in ladder.results.sets.of(point))
    results.write_prepared_requests(content)
    planned, names = [], {"steps", "requests", "host", "client", "gpu", "prometheus"}
    for run in stored.plan().runs:
        number = run.ladder.index(point) + 1
        planned.append(msgspec.structs.replace(run, ladder=()))
        record = stored.run(run.run_id).read()
        (load,) = (load for load in record.loads if load.number == number)
        of_point = record_of_load(record, load)
        cell, run_id = server_part(of_point.cell), server_id(of_point)
        warnings = tuple(msgspec.structs.replace(each, where=run_id) for each in of_point.warnings)
        target, source = results.run(run_id), stored.run(run.run_id).of_load(number)
        target.write(
            msgspec.structs.replace(of_point, cell=cell, run_id=run_id, warnings=warnings, ladder=(), files={})
        )
        for name in names:
            if source.log(name).exists():
                shutil.copy(source.log(name), target.log(name))
    results.write_plan(Plan(schema_version=SCHEMA_VERSION, runs=tuple(planned)))
    results.write_manifest(
        msgspec.structs.replace(
            stored.manifest(),
            profile_sha256=profile_sha256(profile),
            request_set_sha256=hashlib.sha256(content).hexdigest(),
            request_sets=(),
        )
    )
    return load_experiment(directory)


def runs_at(experiment: Experiment, point: Cell) -> list[LoadedRun]:
    """The runs of one load point, in plan order."""
    return [run for run in experiment.results.runs if load_part(run.record.cell) == point]
