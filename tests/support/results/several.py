"""Experiments in which each server gets several loads, simulated in virtual time, in a moment."""

import json
from pathlib import Path
from typing import Any, Final

from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.measure.directory import Origin
from benchctl.measure.experiment import create_simulation, run_experiment
from benchctl.measure.run import Listener
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import load_profile
from benchctl.workload.prepare import prepare_requests

SEVERAL: Final[dict[str, Any]] = {
    "name": "several",
    "blocks": 2,
    "loads_per_server": 3,
    "gates": [],
    "engine": {"kind": "sim", "options": {"noise": "published"}},
    "workload": {
        "dataset": "synthetic",
        "num_prompts": 12,
        "input_len": 64,
        "output_len": 16,
        "arrival": {"kind": "closed-loop", "max_concurrency": 4},
    },
    "variants": {"baseline": {}, "narrow": {"server": {"max_num_seqs": 3}}},
}
"""A profile whose step times have noise of their own in every load."""


def write_profile(directory: Path, profile: dict[str, Any] = SEVERAL, **changes: Any) -> Path:
    """A profile with some keys changed, as a file that has its name."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{profile['name']}.yaml"
    path.write_text(json.dumps(profile | changes), encoding="utf-8")
    return path


def simulated(directory: Path, profile: dict[str, Any] = SEVERAL, **changes: Any) -> Experiment:
    """The experiment of a profile with some keys changed, whose results are below ``directory``."""
    loaded = load_profile(str(write_profile(directory, profile, **changes)))
    prepared = prepare_requests(loaded)
    results = create_simulation(loaded, prepared, Origin(output_root=directory, argv=()))
    run_experiment(results, loaded, prepared.sets, Listener(), simulate_run)
    return load_experiment(results.path)
