"""An object shaped like the NVML binding, for machines without a GPU."""

from types import SimpleNamespace

from benchctl.units import MIB


class FakeNvml:
    """Devices of which all but the first know neither power nor energy, under an old driver.

    ``refuses`` holds the reason of an error for a question, by its name after ``nvmlDevice`` and its device, where
    ``*`` is each question to an open device.
    """

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlMemory_v2 = 2  # noqa: N815
    driver_mib = 615
    """Memory that the first device's driver keeps; the others know the first form of the answer alone."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_driver=True, count=2, refuses=None, parts=None):
        self.has_driver, self.count, self.refuses = has_driver, count, refuses or {}
        self.parts = parts or {}
        """Identities of the MIG devices that a device is divided into."""
        self.depth = 0
        self.used_mib = 1000
        self.used_mib_of = {}
        self.pids_of = {}
        self.energy_mj = 5_000_000
        self.limit_mw = 700_000

    def nvmlInit(self):  # noqa: N802
        if not self.has_driver:
            raise self.NVMLError("no library")
        self.depth += 1

    def nvmlShutdown(self):  # noqa: N802
        self.depth -= 1
        if "Shutdown" in self.refuses:
            raise self.NVMLError(self.refuses["Shutdown"])

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "570.1"

    def __getattr__(self, name):
        of_first = {
            "GetPowerUsage": 345_600,
            "GetTotalEnergyConsumption": self.energy_mj,
            "GetEnforcedPowerLimit": self.limit_mw,
            "GetPowerManagementDefaultLimit": 700_000,
            "GetPersistenceMode": 1,
            "GetPciInfo": SimpleNamespace(busId="FFFFFFFF:FF:1F.7"),
            "GetCurrentClocksEventReasons": 0x24,
        }
        answers = {
            "GetCount": lambda: self.count,
            "GetHandleByIndex": lambda index: index,
            "GetName": lambda handle: f"GPU {handle}",
            "GetUUID": lambda handle: handle if isinstance(handle, str) else f"GPU-{handle}{handle}",
            "GetMaxMigDeviceCount": lambda handle: len(self.parts[handle]),
            "GetMigDeviceHandleByIndex": lambda handle, number: self.parts[handle][number],
            "GetMemoryInfo": self.memory,
            "GetUtilizationRates": lambda _: SimpleNamespace(gpu=55),
            "GetClockInfo": lambda _, clock: {1: 1980, 2: 2619}[clock],
            "GetMaxClockInfo": lambda _, clock: {1: 1980, 2: 2619}[clock],
            "GetTemperature": lambda *_: 41,
            "GetComputeRunningProcesses": lambda handle: [
                SimpleNamespace(pid=pid) for pid in self.pids_of.get(handle, ())
            ],
            "GetCurrentClocksThrottleReasons": lambda _: 0x1,
        }
        question = name.removeprefix("nvmlDevice")
        is_to_open = question in {"GetCount", "GetHandleByIndex", "GetName", "GetUUID"}

        def answer(handle=None, *more):
            reason = self.refuses.get((question, handle), None if is_to_open else self.refuses.get(("*", handle)))
            if reason is not None:
                raise self.NVMLError(reason)
            if question in of_first and handle == 0:
                return of_first[question]
            try:
                return answers[question](*(() if handle is None else (handle,)), *more)
            except KeyError as error:
                raise self.NVMLError("Not Supported") from error

        return answer

    def memory(self, handle, version=1):
        if version == self.nvmlMemory_v2 and handle != 0:
            raise self.NVMLError("another version")
        used = self.used_mib_of.get(handle, self.used_mib)
        kept = self.driver_mib if version == 1 and handle == 0 else 0
        return SimpleNamespace(total=80 << 30, used=(used + kept) * MIB)
