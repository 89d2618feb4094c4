"""The scripts for GPU machines, as far as a machine without one can show: the simulator stands in for an engine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import preloaded_directory
from support.servers.real_engines import needs, tiny_model, turn_of

from benchctl.engines.environment import engines_directory
from benchctl.records.schema import GpuSample
from benchctl.units import MIB, NS_PER_MS
from benchmarks.measure.nvml_agreement import differences, paired, report

ROOT = Path(__file__).parents[2]
STEADY = ["--set", "workload.output_len=16"]


def smoke(cwd: Path, *arguments: str, script: str = "gpu_smoke.sh", log=subprocess.PIPE, **env: str):
    """The script with this interpreter's benchctl on PATH; its summary is on stdout, all else goes to ``log``."""
    return subprocess.run(
        [ROOT / "scripts" / script, *arguments],
        cwd=cwd,
        env={
            **os.environ,
            "PATH": os.pathsep.join(
                [str(preloaded_directory()), str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "ENGINE": "sim-exact",
            "BLOCKS": "2",
            "CUDA_VISIBLE_DEVICES": "",
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_the_first_run_becomes_the_baseline_and_the_next_is_compared_with_it(tmp_path):
    first = smoke(tmp_path, "--cpu", *STEADY)
    assert first.returncode == 0, first.stderr
    assert "this run is stored as the baseline" in first.stdout
    assert (tmp_path / "results/gpu-smoke-baseline/sim-exact/manifest.json").is_file()
    second = smoke(tmp_path, "--cpu", *STEADY, GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"), THRESHOLD="50%")
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "summary.md").read_text() == second.stdout
    assert second.stdout.startswith("## Smoke of sim-exact\n")
    assert "| step\\_ms |" in second.stdout


@pytest.mark.slow
def test_a_slower_engine_fails_the_smoke_and_another_experiment_is_not_comparable(tmp_path):
    baseline = str(tmp_path / "baseline")
    studied = [*STEADY, "--set", "allowed_differences=[server.overlap_schedule]"]
    assert smoke(tmp_path, "--cpu", *studied, BASELINE=baseline, BLOCKS="6").returncode == 0
    unlapped = ["--set", "engine.options.overlap_schedule=false"]
    slower = smoke(tmp_path, "--cpu", *studied, *unlapped, BASELINE=baseline, BLOCKS="6", THRESHOLD="1%")
    other = smoke(tmp_path, "--cpu", "--set", "workload.output_len=8", BASELINE=baseline)
    assert slower.returncode == 1, slower.stdout
    assert "\n**regression: " in slower.stdout
    assert other.returncode == 4
    assert "request_set_sha256" in other.stdout
    assert "store a new baseline" in other.stdout


@pytest.mark.slow
def test_a_run_that_fails_is_told_and_nothing_is_stored(tmp_path):
    failed = smoke(tmp_path, "--cpu", "--set", "workload.num_promts=1")
    assert failed.returncode == 2
    assert "The run ended with exit code 2" in failed.stdout
    assert not (tmp_path / "results" / "gpu-smoke-baseline").exists()


def test_a_gpu_is_demanded_before_anything_is_measured(tmp_path):
    refused = smoke(tmp_path)
    assert refused.returncode == 2
    assert "gpu device missing" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.real_engine
@needs("transformers")
def test_a_real_engine_is_smoked_against_itself(tmp_path):
    model = str(tiny_model(tmp_path))
    # Two runs are compared: nothing heavy runs beside one of them.
    with turn_of("transformers", is_alone=True), turn_of("vllm", is_alone=True):
        runs = [
            smoke(tmp_path, "--cpu", ENGINE="transformers-cpu", MODEL=model, BLOCKS="1", THRESHOLD="90%")
            for _ in range(2)
        ]
    assert [run.returncode for run in runs] == [0, 0], runs[-1].stderr
    assert "stored as the baseline" in runs[0].stdout
    assert "| sampled top\\_k=5 | step\\_ms |" in runs[1].stdout


@pytest.mark.slow
@pytest.mark.real_engine
@needs("llamacpp")
def test_an_engine_of_gguf_files_gets_a_model_of_its_own_and_a_log_in_a_file_is_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(engines_directory()))
    kept = tmp_path / "cache" / "benchctl" / "models" / "tiny-random"
    kept.parent.mkdir(parents=True)
    shutil.copytree(tiny_model(tmp_path), kept)
    with (tmp_path / "log").open("wb") as log:
        done = smoke(
            tmp_path, "--cpu", ENGINE="llamacpp-cpu", BLOCKS="1", XDG_CACHE_HOME=str(tmp_path / "cache"), log=log
        )
    said = (tmp_path / "log").read_text()
    assert done.returncode == 0, said
    assert list(kept.parent.glob("tiny-random-gguf/*.gguf"))
    assert said.index("finding") < said.index("results in ") < said.index("runs: 2 done")
    assert "\0" not in said


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
def test_two_ways_agree_when_their_medians_do(capsys, off_w, agrees):
    pairs = [(sample(t), sample(t, 300.0 + off_w)) for t in range(5)]
    assert report(pairs) is agrees
    assert f"{off_w:.2f}" in capsys.readouterr().out


def test_without_readings_nothing_agrees(capsys):
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
