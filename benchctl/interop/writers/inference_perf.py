"""Calibration workloads as configurations of kubernetes-sigs/inference-perf (schema of commit 7de5ef2).

A file has one length of prompts and one of outputs, so a workload with several sizes becomes several files. Every
request has a prompt of its own (a group of one), the number of open requests is fixed rather than a rate, and
answers are streamed and reported one by one.
"""

from pathlib import Path
from typing import Any, Final

from benchctl.profile.yaml import dump_document
from benchctl.records.files import write_bytes_atomic
from benchctl.workload.calibration import SEED, CalibrationStage, CalibrationWorkload

DEFAULT_URL: Final = "http://127.0.0.1:8000"


def inference_perf_config(
    stages: tuple[CalibrationStage, ...], *, base_url: str = DEFAULT_URL, model_name: str | None = None
) -> dict[str, Any]:
    """The document of stages with equal lengths."""
    num_requests = sum(stage.num_requests for stage in stages)
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
                "num_unique_system_prompts": num_requests,
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
        purpose = f"{workload.name}: {workload.purpose}"
        header = f"# {purpose}{'; ' + workload.remark if workload.remark else ''}.\n"
        document = inference_perf_config(stages, base_url=base_url, model_name=model_name)
        write_bytes_atomic(path, (header + dump_document(document)).encode())
        paths.append(path)
    return tuple(paths)
