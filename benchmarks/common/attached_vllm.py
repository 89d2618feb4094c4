"""A vLLM with a prefix cache on this machine's CPU, to which ``benchctl run`` attaches."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.engines.engine import LaunchSite
from benchctl.engines.vllm import VllmEngine
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchmarks.common.fresh_server import fresh_server

PORT: Final = 18431
Measure: TypeAlias = Callable[[str, Mapping[str, Any]], tuple[Experiment, int]]
"""Measures a profile under a name: the experiment, and the exit code of ``benchctl run``."""


@contextmanager
def attached_vllm(directory: Path) -> Iterator[Measure]:
    """A server of the preset vllm-cpu with a tiny model of its own in ``directory``, for as many experiments as it
    is given.
    """
    model, command = directory / "tiny", [sys.executable, "-m", "benchctl"]
    subprocess.run([*command, "models", "make-tiny", str(model)], check=True)
    overrides = (f"model={model}", "engine.options.enable_prefix_caching=true")
    profile, engine = load_profile("aa", engine="vllm-cpu", overrides=overrides), VllmEngine()
    settings, site = variant_settings(profile, profile.baseline, {}), LaunchSite(port=PORT, directory=directory)
    with fresh_server(engine, profile, settings, site, {**os.environ, **engine.env(settings, site)}) as url:

        def measure(name: str, document: Mapping[str, Any]) -> tuple[Experiment, int]:
            file, results = directory / f"{name}.yaml", directory / name
            attached = {"kind": "attach", "options": {"url": url, "send_seed": False}}
            file.write_text(json.dumps({**document, "engine": attached, "model": str(model)}))
            ended = subprocess.run(
                [*command, "run", "--profile", str(file), "--output", str(results), "--no-store-noise", "--quiet"],
                check=False,
            )
            return load_experiment(results), ended.returncode

        yield measure
