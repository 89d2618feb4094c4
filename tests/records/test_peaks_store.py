"""The peaks on file, and their use in place of the data sheet's by those who ask for them."""

import platform
from pathlib import Path

import pytest
from support.cli import benchctl
from support.peaks import CPU, H100, cpu_peaks, gpu_peaks
from support.results.builders import edit_manifest, write_results

from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.errors import ProfileError, UsageError
from benchctl.measure.on_file import peaks_on_file
from benchctl.profile.load import dump_profile, load_profile, parse_profile
from benchctl.records.files import write_json_atomic
from benchctl.records.peaks import PEAKS, hardware_of, machine_peaks, named_peaks, newest_peaks, resolved_hardware
from benchctl.records.schema import GpuInfo, ResultWarning

HOST = platform.node()
OLD, NEW = "2026-11-20T08:00:00Z", "2026-11-22T19:05:01Z"


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(PEAKS.variable, str(tmp_path / "peaks"))
    return tmp_path / "peaks"


def test_the_newest_peaks_of_a_device_count_and_older_ones_stay(store) -> None:
    for when in (NEW, OLD):
        PEAKS.add(cpu_peaks(measured_at=when))
    assert [entry.content.measured_at for entry in PEAKS.entries()] == [NEW, OLD]
    assert [peaks.measured_at for peaks in newest_peaks()] == [NEW]


def test_peaks_of_a_busy_machine_do_not_displace_those_of_a_quiet_one(store) -> None:
    warning = ResultWarning(code="peak-on-busy-machine", message="other programs used the cores")
    PEAKS.add(cpu_peaks(measured_at=NEW, warnings=(warning,)))
    assert [peaks.measured_at for peaks in newest_peaks()] == [NEW]
    PEAKS.add(cpu_peaks(measured_at=OLD))
    assert [peaks.measured_at for peaks in newest_peaks()] == [OLD]


def test_the_same_measurement_is_filed_once_and_other_threads_have_a_key_of_their_own(store) -> None:
    assert PEAKS.add(cpu_peaks()) == PEAKS.add(cpu_peaks())
    PEAKS.add(cpu_peaks(threads=1))
    assert len(PEAKS.entries()) == 2
    assert cpu_peaks().key.startswith("box-amd-epyc-2-threads-")


def test_a_damaged_file_is_listed_with_its_problem_and_an_older_one_counts(store) -> None:
    PEAKS.add(cpu_peaks(measured_at=OLD))
    PEAKS.add(cpu_peaks(measured_at=NEW)).write_text("{")
    newest, older = PEAKS.entries()
    assert newest.content is None
    assert "remove the file" in newest.problem
    assert newest_peaks() == [older.content]


def test_a_machine_is_meant_to_be_its_gpu_and_a_name_says_which_device(store) -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    assert named_peaks(None).kind == "cpu"
    PEAKS.add(gpu_peaks(host=HOST))
    assert named_peaks(None).kind == "cuda"
    assert named_peaks("amd-epyc-2-threads").kind == "cpu"
    assert named_peaks(H100).kind == "cuda"
    assert named_peaks(f"{HOST}-amd").device == CPU


def test_peaks_that_are_not_on_file_are_refused_with_what_is_there(store) -> None:
    with pytest.raises(UsageError, match=r"nothing is there.*'benchctl micro roofline' measures them"):
        resolved_hardware("measured")
    PEAKS.add(cpu_peaks())
    with pytest.raises(UsageError, match=r"no measured peaks of .* are on file.*box-amd-epyc-2-threads"):
        resolved_hardware("measured")
    with pytest.raises(UsageError, match="no measured peaks named 'tpu'"):
        resolved_hardware("measured:tpu")
    PEAKS.add(cpu_peaks(threads=1))
    with pytest.raises(UsageError, match=r"those of several devices: .*write measured:KEY"):
        resolved_hardware("measured:box")


def test_the_word_becomes_a_name_that_states_the_peaks_and_any_other_name_stays(store) -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    assert resolved_hardware("measured") == hardware_of(cpu_peaks()).name
    assert resolved_hardware("measured:amd-epyc-2-threads") == hardware_of(cpu_peaks()).name
    for name in ("h100-sxm", "cpu:1.5:80", "measured:1.5:80", "nothing"):
        assert resolved_hardware(name) == name


def test_peaks_of_several_kinds_of_gpu_are_those_of_none(store) -> None:
    PEAKS.add(gpu_peaks(host=HOST))
    assert machine_peaks([H100, H100]) == gpu_peaks(host=HOST)
    assert machine_peaks([H100, "NVIDIA H200"]) is None
    assert machine_peaks([]) is None


def test_a_profile_that_says_measured_states_the_peaks_and_means_the_same_without_the_store(store) -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    profile = load_profile("ci-smoke", overrides=["hardware=measured", "engine.options.hardware=measured"])
    name = hardware_of(cpu_peaks()).name
    assert (profile.hardware, profile.engine.options["hardware"]) == (name, name)
    assert parse_profile(dump_profile(profile), "stored").hardware == name
    assert peaks_on_file(profile, []) == cpu_peaks(host=HOST)


def test_a_profile_that_says_measured_without_peaks_on_file_is_refused(store) -> None:
    with pytest.raises(ProfileError, match=r"hardware: no measured peaks .*'benchctl micro roofline'"):
        load_profile("ci-smoke", overrides=["hardware=measured"])


def test_a_profile_that_does_not_ask_is_the_same_with_and_without_peaks_on_file(store) -> None:
    before = dump_profile(load_profile("ci-smoke"))
    PEAKS.add(cpu_peaks(host=HOST))
    assert dump_profile(load_profile("ci-smoke")) == before
    assert peaks_on_file(load_profile("ci-smoke"), []) is None


def test_a_real_engine_on_this_machine_gets_its_peaks_unless_the_profile_states_other_hardware(store) -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    PEAKS.add(gpu_peaks(host=HOST))
    profile = load_profile("ci-smoke", engine="transformers")
    assert peaks_on_file(profile, []).kind == "cpu"
    assert peaks_on_file(profile, [H100]).kind == "cuda"
    assert peaks_on_file(load_profile("ci-smoke", engine="transformers", overrides=["hardware=l4"]), [H100]) is None


def results_with(path, peaks, *gpus):
    results = write_results(path, block_factors=({"baseline": 1.0, "guided": 1.0},))
    edit_manifest(results, engine="vllm", gpus=tuple(GpuInfo(index=i, name=name) for i, name in enumerate(gpus)))
    if peaks is not None:
        write_json_atomic(results.path / PEAKS.file, peaks)
    return results.path


def test_a_directory_is_compared_with_its_own_peaks_whatever_is_on_file(store, tmp_path) -> None:
    PEAKS.add(cpu_peaks(host=HOST, measured_at="2027-01-01T00:00:00Z"))
    experiment = load_experiment(results_with(tmp_path / "r", cpu_peaks()))
    assert experiment.hardware == hardware_of(cpu_peaks())
    assert experiment.hardware.title == "amd-epyc-2-threads (peaks measured 2026-11-22 19:05 UTC)"


def test_measured_peaks_of_a_gpu_stand_for_its_data_sheet(tmp_path) -> None:
    experiment = load_experiment(results_with(tmp_path / "r", gpu_peaks(), H100))
    assert experiment.hardware.peak_flops_per_s == 790e12
    assert load_experiment(results_with(tmp_path / "s", None, H100)).hardware.peak_flops_per_s == 989.4e12


def test_damaged_peaks_of_a_directory_are_a_warning_and_the_data_sheet_counts(tmp_path) -> None:
    path = results_with(tmp_path / "r", gpu_peaks(), H100)
    (path / PEAKS.file).write_text("{")
    experiment = load_experiment(path)
    assert [warning.code for warning in experiment.warnings] == ["peaks-unreadable"]
    assert experiment.hardware.peak_flops_per_s == 989.4e12


def test_flops_takes_measured_peaks_and_says_when_they_were_measured(store, tmp_path) -> None:
    PEAKS.add(cpu_peaks(host=HOST))
    env = {PEAKS.variable: str(store)}
    measured = benchctl("flops", "--wall", "10", "--hardware", "measured", cwd=tmp_path, **env)
    assert measured.returncode == 0
    assert "% of amd-epyc-2-threads's peak" in measured.stdout
    assert "peak: 0.8000 TFLOP/s, amd-epyc-2-threads (peaks measured 2026-11-22 19:05 UTC)" in measured.stdout
    sheet = benchctl("flops", "--wall", "10", cwd=tmp_path, **env)
    assert "peak: 989.4 TFLOP/s, NVIDIA H100 data sheet and architecture white paper" in sheet.stdout


def test_measured_without_peaks_on_file_is_bad_input_with_the_command_that_measures_them(store, tmp_path) -> None:
    process = benchctl("flops", "--hardware", "measured", cwd=tmp_path, BENCHCTL_PEAKS_DIR=str(store))
    assert process.returncode == 2
    assert "'benchctl micro roofline' measures them" in process.stderr


def test_a_simulation_with_measured_peaks_is_slower_than_one_with_the_data_sheet_and_its_directory_says_so(
    store, tmp_path
) -> None:
    PEAKS.add(gpu_peaks(host=HOST))

    def step_s(name, hardware):
        options = ("cost_model=roofline", f"hardware={hardware}")
        words = [word for option in options for word in ("--set", f"engine.options.{option}")]
        directory = tmp_path / name
        process = benchctl(
            "simulate", "--profile", "ci-smoke", "--engine", "sim", *words, "--output-dir", str(tmp_path / name),
            cwd=tmp_path, BENCHCTL_PEAKS_DIR=str(store),
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        path = next(directory.rglob("manifest.json")).parent
        experiment = load_experiment(path)
        assert ((path / PEAKS.file).is_file(), "measured=2026" in (path / "profile.yaml").read_text()) == (
            (hardware == "measured",) * 2
        )
        return experiment.metrics(experiment.results.runs[0])["step_ms"]

    assert step_s("measured", "measured") > step_s("sheet", "h100-sxm")
