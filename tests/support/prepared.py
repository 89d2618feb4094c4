"""Prepared request sets of small profiles."""

import json
from pathlib import Path
from typing import Any

from benchctl.profile.model import Profile
from benchctl.workload.prepare import PreparedSet, prepare_requests


def profile_of(workload: dict[str, Any], *, seed: int = 7, stop: str = "natural") -> Profile:
    document = {
        "name": "built",
        "seed": seed,
        "stop": stop,
        "engine": {"kind": "sim"},
        "workload": {"dataset": "generated", "num_prompts": 3, "arrival": {"kind": "burst"}} | workload,
        "variants": {"baseline": {}},
    }
    return Profile.model_validate_json(json.dumps(document))


def prepare(workload: dict[str, Any], directory: Path = Path("/no/data"), **settings: Any) -> PreparedSet:
    return prepare_requests(profile_of(workload, **settings), directory)
