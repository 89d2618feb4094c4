"""GPUs read through NVML and through nvidia-smi, without a GPU: in order, in trouble, and under unknown names."""

import itertools
import os
import threading
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from support.nvidia_smi import NEW, OLD, FakeSmi, devices
from support.nvml import FakeNvml
from support.waiting import wait_until

from benchctl.measure.telemetry.gpus import SmiReader, gpu_inventory, open_gpu, open_smi
from benchctl.measure.telemetry.reading import (
    foreign_processes,
    memory_used_bytes,
    throttle_reasons,
    visible_devices,
    wait_memory_returned,
)
from benchctl.measure.telemetry.samplers import sampler, sampling
from benchctl.profile.sections import Telemetry
from benchctl.records.directory import RunDirectory
from benchctl.records.files import read_jsonl
from benchctl.records.schema import GpuSample, NodeGpu
from benchctl.units import MIB, NS_PER_MS

LOST = "GPU is lost"
UNTOLD = (
    "[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!", "[GPU requires reset]", "[Insufficient Permissions]",
    "[GPU is lost]", "nan", "inf", "1e300", "-3", "",
)  # fmt: skip


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A program named nvidia-smi that lists two devices."""
    fake = FakeSmi(tmp_path / "bin")
    fake.behave(devices=devices(2))
    monkeypatch.setenv("PATH", str(fake.directory), prepend=os.pathsep)
    monkeypatch.setattr(SmiReader, "least_pause_s", 0.01)
    return fake


@pytest.fixture
def no_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


def opened(visible, nvml, system=Path("/dev")):
    """The indices that are read, and the warnings by code."""
    warnings = []
    with open_gpu(visible, nvml, warnings.append, system) as reader:
        indices = None if reader is None else [sample.index for sample in reader.read()]
    assert nvml.depth == 0
    return indices, {warning.code: warning.message for warning in warnings}


def sampled(reader, directory, during):
    """The samples and warnings of a load during which ``during`` is called with them."""
    directory.mkdir(exist_ok=True)
    rates = Telemetry(gpu_hz=50, host_hz=0, prometheus_hz=0)
    with sampling(RunDirectory(directory).log, rates, gpu=reader) as warnings:
        during(directory / "gpu.jsonl", warnings)
    return tuple(read_jsonl(directory / "gpu.jsonl", GpuSample)), warnings


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_nvml_readings_are_in_base_units_and_unknown_is_absent():
    with open_gpu(None, FakeNvml()) as reader:
        first, second = reader.read()
    assert msgspec.structs.replace(first, t_ns=0) == GpuSample(
        t_ns=0, index=0, uuid="GPU-00", source="nvml", utilization_frac=0.55, memory_used_bytes=1000 * MIB,
        power_w=345.6, energy_j=5000.0, sm_clock_hz=1_980_000_000, memory_clock_hz=2_619_000_000, temperature_c=41,
        throttle_reasons=("sw-power-cap", "sw-thermal"),
    )  # fmt: skip
    assert (second.power_w, second.energy_j, second.throttle_reasons) == (None, None, ("gpu-idle",))
    assert throttle_reasons(0x8048) == ("hw-slowdown", "hw-thermal", "bit-0x8000")


def test_the_sampler_writes_readings_at_its_rate(no_smi, tmp_path):
    with open_gpu("0", FakeNvml()) as reader:
        samples, warnings = sampled(
            reader, tmp_path / "run", lambda path, _: wait_until("8", lambda: num_lines(path) > 7)
        )
    assert warnings == []
    assert min(later.t_ns - earlier.t_ns for earlier, later in itertools.pairwise(samples)) > 15 * NS_PER_MS


def test_a_sampler_that_breaks_off_is_a_warning(tmp_path):
    def samples(_stopped):
        yield GpuSample(t_ns=1, index=0, source="nvml")
        raise OSError("the device fell off the bus")

    warnings = []
    with sampler("gpu", tmp_path / "gpu.jsonl", samples, warnings):
        pass
    assert [(each.code, "fell off the bus" in each.message) for each in warnings] == [("gpu-sampler-failed", True)]


def test_memory_that_comes_back_is_awaited_and_memory_that_does_not_is_a_warning_of_its_device():
    nvml = FakeNvml()
    with open_gpu(None, nvml) as reader:
        nvml.used_mib_of = {0: 30_000, 1: 1000}
        before = memory_used_bytes(reader)
        assert before == {0: 30_000 * MIB, 1: 1000 * MIB}
        nvml.used_mib_of = {0: 30_200, 1: 1200}
        assert wait_memory_returned(reader, before) == ()
        nvml.used_mib_of = {0: 1000, 1: 21_000}
        (warning,) = wait_memory_returned(reader, before, limit_s=0.3)
    assert warning.code == "gpu-memory-held"
    assert warning.message.startswith("20000 MiB of GPU 1 are still held")


def test_other_programs_on_a_device_are_named_with_their_moment_when_the_driver_had_time_to_forget_them():
    nvml = FakeNvml()
    nvml.pids_of = {1: [2**22 + 1, os.getpid()]}
    with open_gpu(None, nvml) as reader:
        (warning,) = foreign_processes(reader, "before the server was started")
        ended = threading.Timer(0.3, nvml.pids_of.clear)
        ended.start()
        assert foreign_processes(reader, "after the server was stopped", limit_s=20) == ()
        nvml.pids_of = {0: [7]}
        assert len(foreign_processes(reader, "after the server was stopped", limit_s=0.3)) == 1
        nvml.refuses = {("GetComputeRunningProcesses", index): "no permission" for index in (0, 1)}
        assert reader.compute_processes() == {0: (), 1: ()}
    processes = f"process {os.getpid()} ({psutil.Process().name()}), {2**22 + 1}"
    said = f"{processes} computed on GPU 1 before the server was started"
    assert (warning.code, warning.message) == ("foreign-gpu-process", said)


def test_a_device_that_cannot_be_opened_hides_no_other_and_is_named_with_its_reason(no_smi):
    for reason in ("GPU is lost", "Insufficient Permissions", "Unknown Error"):
        for question in ("GetHandleByIndex", "GetName"):
            indices, warnings = opened(None, FakeNvml(count=4, refuses={(question, 2): reason}))
            assert indices == [0, 1, 3]
            unknown = f"GPU 2 cannot be read ({reason}): its use, power, clocks and throttling are unknown"
            assert warnings == {"gpu-unreadable": unknown}


def test_a_broken_device_matters_only_where_the_server_is_given_it_by_name_and_a_failing_shutdown_nowhere(
    no_smi,
):
    broken = FakeNvml(count=4, refuses={("GetHandleByIndex", 1): LOST})
    assert opened("3,0", broken) == ([3, 0], {})
    assert opened("GPU-3", broken) == ([3], {})
    indices, warnings = opened("GPU-11", broken)
    assert indices is None
    assert "names none of the 4 devices here (the identity of GPU 1 is unknown)" in warnings["gpu-unknown-name"]
    assert opened(None, FakeNvml(refuses={"Shutdown": LOST}))[0] == [0, 1]


@pytest.mark.parametrize(
    ("trouble", "problem"),
    [
        (
            {"refuses": {("GetHandleByIndex", 0): LOST, ("GetHandleByIndex", 1): LOST}},
            "GPU 0: GPU is lost; GPU 1: GPU is lost",
        ),
        ({"refuses": {("GetCount", None): "Unknown Error"}}, "it cannot count devices: Unknown Error"),
        ({"count": 0}, "it lists no device"),
        ({"has_driver": False}, "no library"),
    ],
)
def test_without_any_device_through_nvml_nvidia_smi_is_asked_and_then_both_reasons_are_told(
    smi, trouble, problem, tmp_path, monkeypatch
):
    nvml = FakeNvml(**trouble)
    assert opened(None, nvml)[0] == [0, 1]
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia0").touch()
    indices, warnings = opened(None, nvml, tmp_path)
    assert indices is None
    assert f"(NVML: {problem}; nvidia-smi: no program nvidia-smi is on the PATH)" in warnings["gpu-sampler-missing"]
    assert opened("", nvml, tmp_path) == (None, {}), "hidden on purpose"
    assert opened(None, FakeNvml(has_driver=False), tmp_path / "empty") == (None, {}), "a machine without a GPU"
    assert gpu_inventory() == ()


def test_a_device_that_is_lost_in_the_middle_ends_its_samples_and_the_others_go_on(no_smi, tmp_path):
    nvml = FakeNvml()

    def lose_one(path, _warnings):
        wait_until("samples", lambda: num_lines(path) >= 20)
        nvml.refuses = {("*", 0): "Timeout"}  # a reading that fails once is no loss
        time.sleep(0.02)
        nvml.refuses = {("*", 1): LOST}
        before = num_lines(path)
        wait_until("more samples", lambda: num_lines(path) >= before + 20)

    with open_gpu(None, nvml) as reader:
        samples, (warning,) = sampled(reader, tmp_path / "run", lose_one)
    last_ns = max(sample.t_ns for sample in samples if sample.index == 1)
    assert sum(sample.index == 0 and sample.t_ns > last_ns for sample in samples) >= 10
    assert all(sample.utilization_frac is not None for sample in samples)
    assert warning.code == "gpu-lost"
    assert warning.message.startswith("GPU 1 has not answered since 20")
    since_s = (last_ns - samples[0].t_ns) / 1e9
    assert f" UTC, {since_s:.1f} s after the first sample (GPU is lost)" in warning.message


def test_a_device_that_never_answers_is_a_warning_and_does_not_hold_up_the_load(no_smi, tmp_path):
    nvml = FakeNvml(count=1, refuses={("*", 0): "Insufficient Permissions"})
    with open_gpu(None, nvml) as reader:
        samples, (warning,) = sampled(reader, tmp_path / "run", lambda *_: None)
    assert samples == ()
    assert warning.message.startswith("GPU 0 answered no question during the load (Insufficient Permissions)")


@pytest.mark.parametrize(
    ("visible", "positions", "says"),
    [
        (None, (0, 1, 2), ""),
        ("2,0", (2, 0), ""),
        ("GPU-b", (1,), ""),
        ("GPU-c0,0", (2, 0), ""),
        ("GPU-zz", (), "entry 'GPU-zz' names none of the 3 devices here"),
        ("0,GPU-", (0,), "entry 'GPU-' names 3 devices"),
        ("1, 9, 0", (1,), "entry '9' names none"),
        ("\u00b2", (), "names none"),
        ("9" * 5000, (), "names none"),
        ("0,,1", (0,), "entry '' names none"),
        ("MIG-aa", (), "entry 'MIG-aa' names none"),
        ("\x1b[2J", (), r"'\x1b[2J'"),
        ("0,0", (0,), ""),
        ("", (), ""),
        ("-1", (), ""),
        ("NoDevFiles", (), ""),
    ],
)
def test_devices_are_chosen_as_cuda_does_and_a_name_of_none_is_a_warning(visible, positions, says):
    chosen, warnings = visible_devices(visible, ["GPU-a0", "GPU-b0", "GPU-c0"])
    assert chosen == positions
    assert [warning.code for warning in warnings] == (["gpu-unknown-name"] if says else [])
    assert all(says in warning.message and "\x1b" not in warning.message for warning in warnings)


def test_a_mig_device_is_sampled_as_the_gpu_that_it_is_part_of_and_a_note_says_so(no_smi):
    nvml = FakeNvml(count=4, parts={1: ["MIG-c6d4f1ef", "MIG-77aa"]})
    for visible in ("MIG-c6d4f1ef", "MIG-c6,MIG-77aa"):
        indices, warnings = opened(visible, nvml)
        assert indices == [1]
        assert "a part of GPU 1, a MIG device" in warnings["gpu-partitioned"]
    indices, warnings = opened("MIG-nowhere", nvml)
    assert indices is None
    assert "'MIG-nowhere' names none of the 4 devices" in warnings["gpu-unknown-name"]


def test_without_nvml_the_program_nvidia_smi_is_asked_of_the_visible_devices_alone(smi):
    untold = {"utilization.gpu": "[N/A]", "power.draw": "[Not Supported]"}
    smi.behave(devices=devices(2, **untold), apps=["GPU-bb, 4242", "GPU-cc, 11", "GPU-bb, [Not Found]"])
    with open_gpu("GPU-bb", FakeNvml(has_driver=False)) as reader:
        (gpu,), (sample,) = reader.described(), reader.read()
        assert reader.compute_processes() == {1: (4242,)}
    assert gpu == NodeGpu(
        index=1, name="NVIDIA H200", uuid="GPU-bb", driver="570.1", memory_bytes=143_771 * MIB
    )  # fmt: skip
    assert "-i GPU-bb" in smi.asked[-1]
    assert (sample.source, sample.memory_used_bytes, sample.sm_clock_hz) == ("nvidia-smi", 512 * MIB, 1_980_000_000)
    assert (sample.utilization_frac, sample.power_w, sample.throttle_reasons) == (None, None, ("sw-power-cap",))


def test_throttle_reasons_are_read_from_drivers_of_every_age(smi):
    for fields in (NEW, NEW - {"clocks_throttle_reasons.active"}, OLD):
        smi.behave(fields=fields, devices=devices(1))
        (sample,) = open_smi(None).reader.read()
        assert sample.throttle_reasons == ("sw-power-cap",)
        assert (sample.power_w, sample.utilization_frac, sample.memory_used_bytes) == (700.25, 0.37, 512 * MIB)
    asked = ["clocks_event_reasons.active" in query for query in smi.asked if "utilization.gpu" in query]
    assert asked == [True] * 4 + [True, False] * 2, (
        "an old driver that refuses the new name is asked by the old one"
    )


def test_a_value_that_the_device_does_not_tell_is_the_only_one_that_is_lost(smi):
    reader = open_smi(None).reader
    names = {"power.draw": "power_w", "memory.used": "memory_used_bytes"}
    names["clocks_throttle_reasons.active"] = "throttle_reasons"
    for number, value in enumerate(UNTOLD):
        field = sorted(names)[number % 3]
        smi.behave(devices=devices(2, **{field: value}))
        first, second = ({name: getattr(sample, name) for name in names.values()} for sample in reader.read())
        assert None not in first.values()
        assert second == first | {names[field]: None}, value


def test_a_device_off_the_bus_hides_no_other_in_nvidia_smi_nor_do_lines_that_are_no_rows(smi):
    lost = "Unable to determine the device handle for GPU1: 0000:04:00.0: Unknown Error"
    noise = [
        "WARNING: infoROM is corrupted at gpu 0000:04:00.0",
        "0, GPU-aa, 37, 51",
        "0, GPU-aa, 37, 5120, 1, 2, 3",
    ]
    smi.behave(devices=[devices(3)[0], devices(3)[2]], stderr=lost, code=15, noise=noise)
    opening = open_smi(None)
    assert [(sample.index, sample.memory_used_bytes) for sample in opening.reader.read()] == [
        (0, 512 * MIB), (2, 512 * MIB)
    ]  # fmt: skip
    assert [warning.message for warning in opening.warnings] == [
        f"GPU 1 cannot be read ({lost}): its use, power, clocks and throttling are unknown"
    ]
    assert open_smi("2,0").warnings == ()


def test_the_reason_of_an_nvidia_smi_that_fails_is_kept(smi):
    for message in ("Failed to initialize NVML: Driver/library version mismatch", "\x1b[31mNVIDIA-SMI has failed"):
        smi.behave(fails=message)
        assert open_smi(None).problem == message.replace("\x1b", r"\x1b")
    smi.behave(fails=None, fields=set())
    assert "is not a valid field to query" in open_smi(None).problem


def test_a_device_of_which_nvidia_smi_tells_nothing_more_ends_its_samples_as_its_failure_ends_all(smi, tmp_path):
    nothing = dict.fromkeys(OLD, "[GPU is lost]") | {"index": "1", "uuid": "GPU-bb"}
    for number, trouble in enumerate(({"devices": [devices(2)[0], nothing]}, {"fails": LOST})):
        smi.behave(devices=devices(2))
        reader = open_smi(None).reader

        def lose(path, warnings, trouble=trouble):
            wait_until("samples", lambda: num_lines(path) >= 4)
            smi.behave(**trouble)
            wait_until("a warning", lambda: warnings)

        samples, warnings = sampled(reader, tmp_path / str(number), lose)
        assert {sample.throttle_reasons for sample in samples} == {("sw-power-cap",)}
        assert {(each.code, "(GPU is lost)" in each.message) for each in warnings} == {("gpu-lost", True)}
        assert len(warnings) == 1 or "fails" in trouble
