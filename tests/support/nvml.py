"""An object shaped like the NVML binding, for machines without a GPU."""

import time
from types import SimpleNamespace

from benchctl.units import MIB


def wait_for_lines(path, count, limit_s=20):
    deadline = time.monotonic() + limit_s
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, f"{path} has fewer than {count} lines"
        time.sleep(0.01)


class FakeNvml:
    """Two devices; the second is of a kind that knows neither power nor energy, under an old driver."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlMemory_v2 = 2  # noqa: N815
    driver_mib = 615
    """Memory that the first device's driver keeps; the second knows the first form of the answer alone."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_driver=True):
        self.has_driver = has_driver
        self.depth = 0
        self.used_mib = 1000
        self.used_mib_of = {}
        self.pids_of = {}
        self.energy_mj = 5_000_000

    def nvmlInit(self):  # noqa: N802
        if not self.has_driver:
            raise self.NVMLError("no library")
        self.depth += 1

    def nvmlShutdown(self):  # noqa: N802
        self.depth -= 1

    def __getattr__(self, name):
        answers = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlSystemGetDriverVersion": lambda: "570.1",
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: f"GPU {handle}",
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}{handle}",
            "nvmlDeviceGetMemoryInfo": self.memory,
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=55),
            "nvmlDeviceGetPowerUsage": self.known_to_first(345_600),
            "nvmlDeviceGetTotalEnergyConsumption": self.known_to_first(self.energy_mj),
            "nvmlDeviceGetClockInfo": lambda _, clock: {1: 1980, 2: 2619}[clock],
            "nvmlDeviceGetMaxClockInfo": lambda _, clock: {1: 1980, 2: 2619}[clock],
            "nvmlDeviceGetEnforcedPowerLimit": self.known_to_first(700_000),
            "nvmlDeviceGetPciInfo": self.known_to_first(SimpleNamespace(busId="FFFFFFFF:FF:1F.7")),
            "nvmlDeviceGetTemperature": lambda *_: 41,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
                SimpleNamespace(pid=pid) for pid in self.pids_of.get(handle, ())
            ],
            "nvmlDeviceGetCurrentClocksEventReasons": self.known_to_first(0x24),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x1,
        }
        return answers[name]

    def memory(self, handle, version=1):
        if version == self.nvmlMemory_v2 and handle != 0:
            raise self.NVMLError("another version")
        used = self.used_mib_of.get(handle, self.used_mib)
        kept = self.driver_mib if version == 1 and handle == 0 else 0
        return SimpleNamespace(total=80 << 30, used=(used + kept) * MIB)

    def known_to_first(self, value):
        def answer(handle):
            if handle != 0:
                raise self.NVMLError("not supported")
            return value

        return answer
