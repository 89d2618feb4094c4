"""A profile of the engine ``vllm`` whose server is ``programs/busy_server.py``: a real clock and a known truth."""

import shutil
import sys
from pathlib import Path

import yaml

_PROGRAM = Path(__file__).parent / "programs" / "busy_server.py"


def busy_profile(directory: Path, **variables: object) -> Path:
    """A profile file; ``variables`` are those of the server, such as ``BUSY_WORK``."""
    document = {
        "name": "busy",
        "model": "qwen2.5-0.5b",
        "engine": {
            "kind": "vllm",
            "python": str(_interpreter(directory)),
            "options": {
                "step_log": False,
                "client_cores": 1,
                "extra_args": ["--of", str(directory)],
                "env": {name: str(value) for name, value in variables.items()},
            },
        },
        "workload": {
            "dataset": "synthetic",
            "input_len": 8,
            "num_prompts": 1,
            "output_len": 96,
            "arrival": {"kind": "closed-loop", "max_concurrency": 1},
            "num_warmups": 1,
            "warmup_shapes": False,
        },
        "variants": {"baseline": {}, "other": {}},
        "primary_metrics": ["wall_s"],
        "blocks": 6,
        "timeouts": {"ready_s": 60.0, "stop_s": 3.0},
        "telemetry": {"gpu_hz": 0.0, "host_hz": 20.0, "prometheus_hz": 0.0},
    }
    path = directory / "busy.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def _interpreter(directory: Path) -> Path:
    """An interpreter in whose environment the busy server is the program that starts vLLM's."""
    site = directory / "site"
    package = site / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    shutil.copy(_PROGRAM, package / "api_server.py")
    about = site / "vllm-0.32.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    python = directory / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python
