"""What ``benchctl doctor`` says of the ways in which GPUs are sampled: NVML, nvidia-smi, both, or neither."""

import os

import pytest
from support.nvidia_smi import FakeSmi, devices
from support.nvml import FakeNvml

from benchctl.measure.doctor.gpu import gpu_checks

NAMES = [{"name": "GPU 0"}, {"name": "GPU 1"}]


class Nvml(FakeNvml):
    """The devices of ``FakeNvml`` with the questions of the doctor, which they do not answer."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except KeyError:
            return self.refusing

    def refusing(self, *_):
        raise self.NVMLError("Not Supported")


@pytest.fixture
def smi(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeSmi(tmp_path / "bin")
    fake.behave(devices=[device | name for device, name in zip(devices(2), NAMES, strict=True)])
    monkeypatch.setenv("PATH", str(fake.directory), prepend=os.pathsep)
    return fake


def checks_of(nvml):
    return {check.name: check for check in gpu_checks(is_needed=True, nvml=nvml)}


def test_the_reader_in_use_is_told_with_what_each_device_does_not_tell(smi):
    checks = checks_of(Nvml())
    assert checks["sampling"].finding == "through NVML; GPU 1 does not tell power_w, energy_j"
    assert checks["sampling"].facts["unknown"] == ("1 power_w", "1 energy_j")
    assert checks["sampling"].state == "ok"


def test_without_nvml_the_reason_and_the_fields_that_nvidia_smi_lacks_are_told(smi):
    untold = {"temperature.gpu": "[N/A]"}
    smi.behave(devices=[device | name | untold for device, name in zip(devices(2), NAMES, strict=True)])
    checks = checks_of(Nvml(has_driver=False))
    assert checks["sampling"].state == "warning"
    assert checks["sampling"].finding.startswith(
        "through nvidia-smi, because NVML cannot be used: no library; GPU 0 does not tell energy_j, temperature_c"
    )
    assert "1 device" in checks


def test_a_device_that_cannot_be_opened_is_a_warning_beside_the_others(smi):
    class Broken(Nvml):
        def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
            if index == 1:
                raise self.NVMLError("GPU is lost")
            return index

    checks = checks_of(Broken())
    assert "GPU 1 cannot be read (GPU is lost)" in checks["gpu-unreadable"].finding
    assert checks["gpu-unreadable"].state == "warning"
    assert "0 device" in checks
    assert "1 device" not in checks


def test_a_machine_without_any_reader_is_told_both_reasons(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = checks_of(Nvml(has_driver=False))["device"]
    assert check.is_obstacle
    reasons = "NVML: no library; nvidia-smi: no program nvidia-smi is on the PATH"
    assert check.finding == f"neither NVML nor nvidia-smi finds a driver ({reasons})"


@pytest.mark.parametrize("value", ["", "-1", "7"])
def test_devices_that_a_variable_hides_from_nvidia_smi_are_told_with_it(smi, monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    check = checks_of(Nvml(has_driver=False))["device"]
    assert check.finding.startswith(f"CUDA_VISIBLE_DEVICES is {value!r} and selects no device")
    assert check.remedy == "unset CUDA_VISIBLE_DEVICES"
