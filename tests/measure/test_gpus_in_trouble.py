"""GPUs that cannot be opened, fall silent or have unknown names, and drivers of different ages."""

import os
import time

import pytest
from support.nvidia_smi import NEW, OLD, FakeSmi, devices
from support.nvml import FakeNvml, wait_for_lines

from benchctl.measure.telemetry.gpus import SmiReader, open_gpu, open_smi
from benchctl.measure.telemetry.reading import SILENT_READINGS, visible_devices
from benchctl.measure.telemetry.samplers import sampling
from benchctl.profile.sections import Telemetry
from benchctl.records.files import read_jsonl
from benchctl.records.schema import GpuSample
from benchctl.units import MIB

LOST = "GPU is lost"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    fake = FakeSmi(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(fake.directory), prepend=os.pathsep)
    monkeypatch.setattr(SmiReader, "least_pause_s", 0.01)
    return fake


@pytest.fixture
def no_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


def opened(visible, nvml):
    """The indices that are read, and the warnings by code."""
    warnings = []
    with open_gpu(visible, nvml, warnings.append) as reader:
        indices = None if reader is None else [sample.index for sample in reader.read()]
    assert nvml.depth == 0
    return indices, {warning.code: warning.message for warning in warnings}


def test_a_device_that_cannot_be_opened_hides_no_other_and_is_named_with_its_reason(no_smi):
    for reason in ("GPU is lost", "Insufficient Permissions", "Unknown Error"):
        for question in ("GetHandleByIndex", "GetName"):
            indices, warnings = opened(None, FakeNvml(count=4, refuses={(question, 2): reason}))
            assert indices == [0, 1, 3]
            unknown = f"GPU 2 cannot be read ({reason}): its use, power, clocks and throttling are unknown"
            assert warnings == {"gpu-unreadable": unknown}


def test_a_broken_device_matters_only_where_the_server_is_given_it_by_name(no_smi):
    broken = FakeNvml(count=4, refuses={("GetHandleByIndex", 1): LOST})
    assert opened("3,0", broken) == ([3, 0], {})
    assert opened("GPU-3", broken) == ([3], {})
    indices, warnings = opened("GPU-11", broken)
    assert indices is None
    assert "names none of the 4 devices here (the identity of GPU 1 is unknown)" in warnings["gpu-unknown-name"]


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
    with open_gpu(None, nvml) as reader:
        assert [sample.source for sample in reader.read()] == ["nvidia-smi"]
    monkeypatch.setenv("PATH", str(tmp_path))
    indices, warnings = opened(None, nvml)
    assert indices is None
    assert f"(NVML: {problem}; nvidia-smi: no program nvidia-smi is on the PATH)" in warnings["gpu-sampler-missing"]


def test_an_nvml_that_cannot_be_shut_down_does_not_end_the_run(no_smi):
    assert opened(None, FakeNvml(refuses={"Shutdown": LOST}))[0] == [0, 1]


def sampled(reader, directory, during):
    """The samples and warnings of a load during which ``during`` is called with the path of the samples."""
    directory.mkdir(exist_ok=True)
    with sampling(directory, Telemetry(gpu_hz=50, host_hz=0, prometheus_hz=0), gpu=reader) as warnings:
        during(directory / "gpu.jsonl")
    return tuple(read_jsonl(directory / "gpu.jsonl", GpuSample)), warnings


def test_a_device_that_is_lost_in_the_middle_ends_its_samples_and_the_others_go_on(no_smi, tmp_path):
    nvml = FakeNvml()

    def lose_one(path):
        wait_for_lines(path, 20)
        nvml.refuses = {("*", 0): "Timeout"}  # a reading that fails once is no loss
        time.sleep(0.02)
        nvml.refuses = {("*", 1): LOST}
        lines = path.read_bytes().count(b"\n")
        wait_for_lines(path, lines + 20)

    with open_gpu(None, nvml) as reader:
        samples, (warning,) = sampled(reader, tmp_path / "run", lose_one)
    of = {index: [s for s in samples if s.index == index] for index in (0, 1)}
    assert len(of[0]) >= len(of[1]) + 10
    assert all(sample.utilization_frac is not None for sample in samples)
    assert warning.code == "gpu-lost"
    since_s = (of[1][-1].t_ns - samples[0].t_ns) / 1e9
    assert warning.message.startswith("GPU 1 has not answered since 20")
    assert f" UTC, {since_s:.1f} s after the first sample (GPU is lost)" in warning.message


def test_a_device_that_never_answers_is_a_warning_and_does_not_hold_up_the_load(no_smi, tmp_path):
    nvml = FakeNvml(count=1, refuses={("*", 0): "Insufficient Permissions"})
    with open_gpu(None, nvml) as reader:
        began_s = time.monotonic()
        samples, (warning,) = sampled(reader, tmp_path / "run", lambda _: None)
    assert time.monotonic() - began_s < 4
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


def test_throttle_reasons_are_read_from_drivers_of_every_age(smi):
    for fields in (NEW, NEW - {"clocks_throttle_reasons.active"}, OLD):
        smi.behave(fields=fields)
        found = open_smi(None)
        (sample,) = found.reader.read()
        assert sample.throttle_reasons == ("sw-power-cap",)
        assert (sample.power_w, sample.utilization_frac, sample.memory_used_bytes) == (700.25, 0.37, 512 * MIB)
        assert found.warnings == ()
    queries = [line for line in smi.asked if "utilization.gpu" in line]
    asked = ["clocks_event_reasons.active" in query for query in queries]
    assert asked == [True] * 4 + [True, False] * 2, (
        "an old driver that refuses the new name is asked by the old one"
    )
    smi.behave(fields=set())
    assert open_smi(None).reader is None
    assert "is not a valid field to query" in open_smi(None).problem


UNTOLD = (
    "[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!", "[GPU requires reset]", "[Insufficient Permissions]",
    "[GPU is lost]", "nan", "inf", "1e300", "-3", "",
)  # fmt: skip


def test_a_value_that_the_device_does_not_tell_is_the_only_one_that_is_lost(smi):
    smi.behave(devices=devices(2))
    reader = open_smi(None).reader
    names = {"power.draw": "power_w", "memory.used": "memory_used_bytes"}
    names["clocks_throttle_reasons.active"] = "throttle_reasons"
    for number, value in enumerate(UNTOLD):
        field = sorted(names)[number % 3]
        smi.behave(devices=devices(2, **{field: value}))
        first, second = reader.read()
        expected = {name: getattr(first, name) for name in names.values()}
        assert None not in expected.values()
        assert {name: getattr(second, name) for name in expected} == expected | {names[field]: None}, value


def test_a_device_off_the_bus_hides_no_other_in_nvidia_smi(smi):
    lost = "Unable to determine the device handle for GPU1: 0000:04:00.0: Unknown Error"
    smi.behave(devices=[devices(3)[0], devices(3)[2]], stderr=lost, code=15)
    found = open_smi(None)
    assert [device.index for device in found.reader.described()] == [0, 2]
    assert [warning.message for warning in found.warnings] == [
        f"GPU 1 cannot be read ({lost}): its use, power, clocks and throttling are unknown"
    ]
    assert open_smi("2,0").warnings == ()


def test_the_reason_of_an_nvidia_smi_that_fails_is_kept(smi):
    for message in ("Failed to initialize NVML: Driver/library version mismatch", "\x1b[31mNVIDIA-SMI has failed"):
        smi.behave(fails=message)
        assert open_smi(None).problem == message.replace("\x1b", r"\x1b")


def test_lines_that_are_no_rows_are_passed_over(smi, tmp_path):
    smi.behave(
        noise=[
            "WARNING: infoROM is corrupted at gpu 0000:04:00.0",
            "0, GPU-aa, 37, 51",
            "0, GPU-aa, 37, 5120, 1, 2, 3, 4, 5, 6",
        ]
    )
    reader = open_smi(None).reader
    samples, warnings = sampled(reader, tmp_path / "run", lambda path: wait_for_lines(path, 2))
    assert warnings == []
    assert {sample.memory_used_bytes for sample in samples} == {512 * MIB}


def test_a_device_of_which_nvidia_smi_tells_nothing_more_ends_its_samples(smi, tmp_path):
    smi.behave(devices=devices(2))
    reader = open_smi(None).reader
    nothing = dict.fromkeys(OLD, "[GPU is lost]") | {"index": "1", "uuid": "GPU-bb"}

    def lose_one(path):
        wait_for_lines(path, 4)
        smi.behave(devices=[devices(2)[0], nothing])
        wait_for_lines(path, path.read_bytes().count(b"\n") + SILENT_READINGS + 1)

    samples, (warning,) = sampled(reader, tmp_path / "run", lose_one)
    assert samples[-1].index == 0
    assert warning.code == "gpu-lost"
    assert "(GPU is lost)" in warning.message
