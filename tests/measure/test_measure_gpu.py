"""GPU readings through both ways, without a GPU: an object shaped like the NVML binding, a script as nvidia-smi."""

import itertools
import os
import threading
import time
from functools import partial

import psutil
import pytest
from support.nvidia_smi import FakeSmi, devices
from support.nvml import FakeNvml, wait_for_lines

from benchctl.measure.telemetry.gpus import SmiReader, gpu_inventory, open_gpu, open_smi
from benchctl.measure.telemetry.reading import (
    foreign_processes,
    memory_used_bytes,
    throttle_reasons,
    wait_memory_returned,
)
from benchctl.measure.telemetry.samplers import sampler
from benchctl.records.files import read_jsonl
from benchctl.records.schema import GpuSample
from benchctl.units import MIB, NS_PER_MS


def test_nvml_readings_are_in_base_units_and_unknown_is_absent():
    nvml = FakeNvml()
    with open_gpu(None, nvml) as reader:
        first, second = reader.read()
        assert nvml.depth == 1
    assert nvml.depth == 0
    assert (first.index, first.uuid, first.source) == (0, "GPU-00", "nvml")
    assert (first.utilization_frac, first.memory_used_bytes, first.power_w) == (0.55, 1000 * MIB, 345.6)
    assert (first.energy_j, first.sm_clock_hz, first.memory_clock_hz) == (5000.0, 1_980_000_000, 2_619_000_000)
    assert (first.temperature_c, first.throttle_reasons) == (41, ("sw-power-cap", "sw-thermal"))
    assert (second.power_w, second.energy_j, second.throttle_reasons) == (None, None, ("gpu-idle",))


def test_the_inventory_names_the_visible_devices():
    with open_gpu("1", FakeNvml()) as reader:
        (gpu,) = reader.described()
    assert (gpu.index, gpu.name, gpu.uuid, gpu.memory_bytes) == (1, "GPU 1", "GPU-11", 80 << 30)
    assert gpu.driver == "570.1"


def test_throttle_reasons_have_names_and_unknown_bits_keep_their_number():
    assert throttle_reasons(0) == ()
    assert throttle_reasons(0x48) == ("hw-slowdown", "hw-thermal")
    assert throttle_reasons(0x8001) == ("gpu-idle", "bit-0x8000")


def test_the_sampler_writes_readings_at_its_rate_until_the_load_ends(tmp_path):
    path = tmp_path / "gpu.jsonl"
    with open_gpu("0", FakeNvml()) as reader:
        warnings = []
        with sampler("gpu", path, lambda stopped: reader.samples(50, stopped, warnings.append), warnings):
            wait_for_lines(path, 8)
        seen = tuple(read_jsonl(path, GpuSample))
        time.sleep(0.1)
        assert tuple(read_jsonl(path, GpuSample)) == seen
    assert warnings == []
    gaps_ns = [later.t_ns - earlier.t_ns for earlier, later in itertools.pairwise(seen)]
    assert min(gaps_ns) > 15 * NS_PER_MS
    assert min(gaps_ns) < 60 * NS_PER_MS


def test_a_sampler_that_breaks_off_is_a_warning(tmp_path):
    def samples(_stopped):
        yield GpuSample(t_ns=1, index=0, source="nvml")
        raise OSError("the device fell off the bus")

    warnings = []
    with sampler("gpu", tmp_path / "gpu.jsonl", samples, warnings):
        pass
    (warning,) = warnings
    assert warning.code == "gpu-sampler-failed"
    assert "fell off the bus" in warning.message


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


def test_other_programs_on_a_device_are_named_with_their_moment():
    nvml = FakeNvml()
    nvml.pids_of = {1: [2**22 + 1, os.getpid()]}
    with open_gpu(None, nvml) as reader:
        (warning,) = foreign_processes(reader, "before the server was started")
    assert warning.code == "foreign-gpu-process"
    mine = psutil.Process().name()
    said = f"process {os.getpid()} ({mine}), {2**22 + 1} computed on GPU 1 before the server was started"
    assert warning.message == said


def test_a_program_that_ended_is_given_the_time_in_which_the_driver_forgets_it():
    nvml = FakeNvml()
    nvml.pids_of = {0: [7]}
    with open_gpu("0", nvml) as reader:
        timer = threading.Timer(0.3, nvml.pids_of.clear)
        timer.start()
        assert foreign_processes(reader, "after the server was stopped", limit_s=20) == ()
        timer.join()
        nvml.pids_of = {0: [7]}
        assert len(foreign_processes(reader, "after the server was stopped", limit_s=0.3)) == 1


def test_a_driver_that_hides_its_users_shows_none():
    hiding = {("GetComputeRunningProcesses", index): "no permission" for index in (0, 1)}
    with open_gpu(None, FakeNvml(refuses=hiding)) as reader:
        assert reader.compute_processes() == {0: (), 1: ()}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A program named nvidia-smi that lists two devices."""
    fake = FakeSmi(tmp_path / "bin")
    fake.behave(devices=devices(2))
    monkeypatch.setenv("PATH", str(fake.directory), prepend=os.pathsep)
    monkeypatch.setattr(SmiReader, "least_pause_s", 0.01)
    return fake


def test_without_nvml_the_program_nvidia_smi_is_asked(smi):
    smi.behave(devices=devices(2, **{"utilization.gpu": "[N/A]", "power.draw": "[Not Supported]"}))
    with open_gpu("GPU-bb", FakeNvml(has_driver=False)) as reader:
        (gpu,), (sample,) = reader.described(), reader.read()
    assert (gpu.index, gpu.name, gpu.uuid, gpu.driver) == (1, "NVIDIA H200", "GPU-bb", "570.1")
    assert gpu.memory_bytes == 143_771 * MIB
    assert "-i GPU-bb" in smi.asked[-1]
    assert (sample.source, sample.memory_used_bytes, sample.sm_clock_hz) == ("nvidia-smi", 512 * MIB, 1_980_000_000)
    assert (sample.utilization_frac, sample.power_w, sample.throttle_reasons) == (None, None, ("sw-power-cap",))


def test_nvidia_smi_names_the_programs_of_the_visible_devices_alone(smi):
    smi.behave(apps=["GPU-bb, 4242", "GPU-cc, 11", "GPU-bb, [Not Found]"])
    reader = open_smi(None).reader
    assert reader.compute_processes() == {0: (), 1: (4242,)}
    assert "-i GPU-aa,GPU-bb" in smi.asked[-1]


def test_nvidia_smi_gives_samples_until_it_fails_which_is_a_warning(smi, tmp_path):
    reader, path, warnings = open_smi("1").reader, tmp_path / "gpu.jsonl", []
    with sampler("gpu", path, partial(reader.samples, 20, warn=warnings.append), warnings):
        wait_for_lines(path, 3)
        smi.behave(fails="GPU is lost")
        deadline = time.monotonic() + 20
        while not warnings and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [(each.code, "(GPU is lost)" in each.message) for each in warnings] == [("gpu-lost", True)]
    first, *_ = read_jsonl(path, GpuSample)
    assert (first.power_w, first.utilization_frac, first.throttle_reasons) == (700.25, 0.37, ("sw-power-cap",))
    assert "-i GPU-bb" in smi.asked[-1]


def test_a_machine_without_nvidia_anything_has_no_devices_and_no_reader(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_inventory() == ()
    with open_gpu(None, FakeNvml(has_driver=False)) as reader:
        assert reader is None
    with open_gpu("7", FakeNvml()) as reader:
        assert reader is None
