"""An environment that has the LenVM fork as far as anybody looks, and settings for its engine."""

import json
from pathlib import Path
from typing import Any

from support import engine_settings
from support.engine_settings import interpreter_with, model_in

from benchctl.profile.model import Guidance, Profile, Sampling, VariantSettings

SERVER = Path(__file__).parent / "programs" / "lenvm_server.py"


def environment(directory: Path, *, has_fork: bool = True) -> str:
    """The interpreter of an environment whose ``sglang.launch_server`` is the stand-in."""
    python = interpreter_with(directory, "sglang", "0.5.7")
    package = directory / "packages" / "sglang"
    (package / "srt" / ("lvm" if has_fork else "models")).mkdir(parents=True)
    (package / "__init__.py").write_text("")
    start = f"import runpy\nrunpy.run_path({str(SERVER)!r}, run_name='__main__')\n"
    (package / "launch_server.py").write_text(start)
    return python


def model(directory: Path, name: str, **config: Any) -> str:
    """A model on disk, as far as anybody looks."""
    return model_in(directory / name, max_position_embeddings=4096, **config)


def settings_of(
    guidance: Guidance | None = None, sampling: Sampling | None = None, *, model: str = "m", **options: Any
) -> VariantSettings:
    """Settings of a run; a guided one has its scheduler as guidance needs it."""
    if guidance is not None:
        options = {"overlap_schedule": False, "value_model": "qwen2.5-1.5b", **options}
    sampling = sampling or Sampling(top_k=5)
    return engine_settings.settings_of("sglang-lenvm", model, sampling=sampling, guidance=guidance, **options)


def profile(python: str, base: str, value_model: str, how: dict[str, Any], **changes: Any) -> Profile:
    """A small experiment on the stand-in, which ``how`` tells what to be; ``options`` are the engine's."""
    options = {"env": {"STAND_IN": json.dumps(how)}, **changes.pop("options", {})}
    guided = {
        "server": {"value_model": value_model, "overlap_schedule": False},
        "sampling": {"top_k": 5},
        "guidance": {"mode": "centered_exp", "value_scale": -10.0},
    }
    return Profile.model_validate(
        {
            "name": "forked",
            "engine": {"kind": "sglang-lenvm", "python": python, "options": options},
            "model": base,
            "workload": {
                "dataset": "generated",
                "num_prompts": 2,
                "output_len": 12,
                "arrival": {"kind": "closed-loop", "max_concurrency": 2},
                "warmup_shapes": False,
            },
            "variants": {"baseline": {}, "guided": guided},
            "timeouts": {"ready_s": 60.0, "stop_s": 5.0, "request_s": 60.0},
            "telemetry": {"gpu_hz": 0.0, "host_hz": 0.0, "prometheus_hz": 0.0},
            **changes,
        }
    )
