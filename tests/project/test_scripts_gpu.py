"""The scripts for GPU machines, as far as a machine without one can show: the simulator stands in for an engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import preloaded_directory
from support.servers.real_engines import needs, tiny_model, turn_of

from benchctl.records.schema import GpuSample
from benchctl.units import MIB, NS_PER_MS
from benchmarks.measure.nvml_agreement import differences, paired, report

ROOT = Path(__file__).parents[2]
VIRTUAL = """#!/bin/bash
set -o pipefail
[ "$1" = run ] || exec {benchctl} "$@"
shift
{benchctl} simulate "$@" | sed 's/; nothing is measured.*//'
"""
"""A ``benchctl`` whose runs take place in virtual time."""


STEADY = ["--set", "workload.output_len=16"]


def smoke(cwd, *arguments, is_virtual=True, **env):
    """The script with this interpreter's benchctl on PATH: its summary is on stdout, all else on stderr."""
    program = preloaded_directory() / "virtual" / "benchctl"
    program.parent.mkdir(exist_ok=True)
    program.write_text(VIRTUAL.format(benchctl=preloaded_directory() / "benchctl"))
    program.chmod(0o755)
    first = program.parent if is_virtual else preloaded_directory()
    path = os.pathsep.join([str(first), str(Path(sys.executable).parent), os.environ["PATH"]])
    settings = {"PATH": path, "ENGINE": "sim-exact", "BLOCKS": "6", "CUDA_VISIBLE_DEVICES": "", **env}
    argv, env = [ROOT / "scripts" / "gpu_smoke.sh", *arguments], os.environ | settings
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_the_first_run_becomes_the_baseline_and_the_next_ones_are_compared_with_it(tmp_path):
    studied = ["--cpu", *STEADY, "--set", "allowed_differences=[server.overlap_schedule]"]
    failed = smoke(tmp_path, "--cpu", "--set", "workload.num_promts=1")
    assert (failed.returncode, "The run ended with exit code 2" in failed.stdout) == (2, True)
    baseline = tmp_path / "results/gpu-smoke-baseline/sim-exact/manifest.json"
    assert not baseline.exists()
    first = smoke(tmp_path, *studied)
    assert first.returncode == 0, first.stderr
    assert "this run is stored as the baseline" in first.stdout
    assert baseline.is_file()
    same = smoke(tmp_path, *studied, GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"), THRESHOLD="50%")
    assert same.returncode == 0, same.stderr
    assert (tmp_path / "summary.md").read_text() == same.stdout
    assert same.stdout.startswith("## Smoke of sim-exact\n")
    assert "| step\\_ms |" in same.stdout
    slower = smoke(tmp_path, *studied, "--set", "engine.options.overlap_schedule=false", THRESHOLD="1%")
    assert (slower.returncode, "\n**regression: " in slower.stdout) == (1, True), slower.stdout
    other = smoke(tmp_path, "--cpu", "--set", "workload.output_len=8", BLOCKS="1")
    assert other.returncode == 4
    for words in ("request_set_sha256", "store a new baseline"):
        assert words in other.stdout


def test_a_gpu_is_demanded_before_anything_is_measured(tmp_path):
    refused = smoke(tmp_path)
    assert (refused.returncode, "gpu device missing" in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.real_engine
@needs("transformers")
def test_a_real_engine_is_smoked_against_itself(tmp_path):
    asked = {"ENGINE": "transformers-cpu", "MODEL": str(tiny_model(tmp_path)), "BLOCKS": "1", "THRESHOLD": "90%"}
    # Two runs are compared: nothing heavy runs beside one of them.
    with turn_of("transformers", is_alone=True), turn_of("vllm", is_alone=True):
        first, second = (smoke(tmp_path, "--cpu", is_virtual=False, **asked) for _ in range(2))
    assert [first.returncode, second.returncode] == [0, 0], second.stderr
    assert "stored as the baseline" in first.stdout
    assert "| sampled top\\_k=5 | step\\_ms |" in second.stdout


def sample(t_ms: float, power_w: float | None = 300.0, **more) -> GpuSample:
    values = {"uuid": "GPU-a", "power_w": power_w, "memory_used_bytes": 900 * MIB, "source": "nvml", **more}
    return GpuSample(t_ns=round(t_ms * NS_PER_MS), index=0, **values)


def test_each_reading_is_held_against_the_nearest_one_of_the_same_device():
    nvml = [sample(0), sample(100, 310.0), sample(200), sample(100, 0.0, uuid="GPU-b")]
    pairs = list(paired(nvml, [sample(90, 305.0), sample(900)]))
    assert [(first.power_w, second.power_w) for first, second in pairs] == [(310.0, 305.0)]
    assert differences(pairs, "power_w") == [5.0]
    assert differences(pairs, "memory_used_bytes") == [0.0]
    assert differences(pairs, "temperature_c") == []


@pytest.mark.parametrize(("off_w", "agrees"), [(3.0, True), (40.0, False)])
def test_two_ways_agree_when_their_medians_do_and_without_readings_nothing_agrees(capsys, off_w, agrees):
    assert report([(sample(t), sample(t, 300.0 + off_w)) for t in range(5)]) is agrees
    assert f"{off_w:.2f}" in capsys.readouterr().out
    assert report([]) is False


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (["benchmarks/measure/nvml_agreement.py"], "no visible GPU through NVML and nvidia-smi"),
        (["benchmarks/measure/nvml_agreement.py", "--", "true"], "benchctl doctor --gpu"),
    ],
)
def test_the_comparison_of_gpu_readings_refuses_a_machine_without_a_gpu(script, says):
    done = subprocess.run(
        [sys.executable, *script],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert says in done.stdout
