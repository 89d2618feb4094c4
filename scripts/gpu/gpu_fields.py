"""Do NVML and nvidia-smi say the same of this GPU? Every field that both may know, idle and under load.

Readings are taken in turns, and each pair is compared. First the plain answers of both, then the samples of
benchctl's own readers, where their libraries are installed.

    PYTHONPATH=. python scripts/gpu/gpu_fields.py
"""

import argparse
import importlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from paired import table
from smi import asked, number, said

from benchctl.units import MIB

Reading = Mapping[str, float | None]
GAP_S = 0.2
WARM_S = 2.0
"""Power and utilisation are means over up to a second."""
FIELDS: dict[str, tuple[str, Callable[[Any, Any], float]]] = {
    "clocks.sm": ("MHz", lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
    "clocks.mem": ("MHz", lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM)),
    "clocks.gr": ("MHz", lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_GRAPHICS)),
    "clocks.max.sm": ("MHz", lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM)),
    "clocks.max.mem": ("MHz", lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_MEM)),
    "clocks_throttle_reasons.active": ("mask", lambda n, h: n.nvmlDeviceGetCurrentClocksThrottleReasons(h)),
    "power.draw": ("W", lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000),
    "enforced.power.limit": ("W", lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000),
    "power.default_limit": ("W", lambda n, h: n.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1000),
    "temperature.gpu": ("°C", lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)),
    "utilization.gpu": ("%", lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu),
    "utilization.memory": ("%", lambda n, h: n.nvmlDeviceGetUtilizationRates(h).memory),
    "memory.total": ("MiB", lambda n, h: memory_of(n, h).total / MIB),
    "memory.used": ("MiB", lambda n, h: memory_of(n, h).used / MIB),
    "memory.free": ("MiB", lambda n, h: memory_of(n, h).free / MIB),
    "pcie.link.gen.current": ("", lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h)),
    "pcie.link.width.current": ("lanes", lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h)),
    "total_energy_consumption": ("J", lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h) / 1000),
}
"""By nvidia-smi's names: the unit, and NVML's answer in it, from the binding and a handle."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where the load is put; on a cpu there is none")
    parser.add_argument("--pairs", type=int, default=6, help="readings of each in each state (6)")
    parser.add_argument("--tiny", action="store_true", help="two readings of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all readings there as well")
    options = parser.parse_args()
    pairs = 2 if options.tiny else options.pairs
    gpu = visible_gpu()
    with ExitStack() as stack:
        ways = {"plain answers": (smi_way(gpu), stack.enter_context(nvml_way(gpu)))}
        ways["samples of benchctl"] = stack.enter_context(reader_ways())
        readings = {}
        for state, load in (("idle", None), ("under load", options.device)):
            with loaded(load, is_tiny=options.tiny):
                readings[state] = {name: read_in_turns(*both, pairs) for name, both in ways.items()}
    for name, both in ways.items():
        print(f"### {name.capitalize()}\n")
        print(page(both, {state: taken[name] for state, taken in readings.items()}) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(readings, indent=2) + "\n", encoding="utf-8")


class Way:
    """One way to readings; ``reason`` says why there are none."""

    def __init__(self, read: Callable[[], Reading] | None, reason: str = "") -> None:
        self.read, self.reason = read, reason


def visible_gpu() -> str:
    """The first GPU that this process may use, as nvidia-smi names it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def smi_way(gpu: str) -> Way:
    known = said("--help-query-gpu") or ""
    if asked(("name",), gpu) is None:
        return Way(None, "nvidia-smi is not on PATH, or finds no GPU")
    # A question with one unknown field is refused as a whole; old names are understood longer than they are listed.
    fields = [field for field in FIELDS if f'"{field}"' in known or asked((field,), gpu) is not None]

    def read() -> Reading:
        answers = asked(fields, gpu) or {}
        return {field: number(text) for field, text in answers.items()}

    return Way(read)


@contextmanager
def nvml_way(gpu: str) -> Iterator[Way]:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - an absent binding and an absent driver are equally a reason
        yield Way(None, f"NVML cannot be asked ({type(error).__name__}: {error})")
        return
    try:
        is_number = gpu.isdigit()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if is_number else nvml.nvmlDeviceGetHandleByUUID(gpu)
        yield Way(lambda: {field: answer_of(nvml, handle, ask) for field, (_, ask) in FIELDS.items()})
    finally:
        nvml.nvmlShutdown()


def memory_of(nvml: Any, handle: Any) -> Any:
    """In the form that has what the driver keeps apart from what is used."""
    return nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)


def answer_of(nvml: Any, handle: Any, ask: Callable[[Any, Any], float]) -> float | None:
    try:
        return float(ask(nvml, handle))
    except (nvml.NVMLError, AttributeError):  # this device, driver or binding does not know it
        return None


@contextmanager
def reader_ways() -> Iterator[tuple[Way, Way]]:
    """Samples of the first visible device by benchctl's readers, their numbers only."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with ExitStack() as stack:
        try:
            nvml = importlib.import_module("pynvml")
            open_nvml = importlib.import_module("benchctl.measure.telemetry.gpus").open_nvml
            open_smi = importlib.import_module("benchctl.measure.telemetry.gpus").open_smi
            ways = (
                reader_way(open_smi(visible), "nvidia-smi"),
                reader_way(stack.enter_context(open_nvml(nvml, visible)), "NVML"),
            )
        except Exception as error:  # noqa: BLE001 - the plain answers are there whatever these need
            reason = f"benchctl's readers do not work here ({type(error).__name__}: {error})"
            ways = (Way(None, reason), Way(None, reason))
        yield ways


def reader_way(opened: Any, name: str) -> Way:
    if opened.reader is None:
        return Way(None, f"benchctl sees no GPU through {name}: {opened.problem}")

    def read() -> Reading:
        samples = opened.reader.read()
        if not samples:
            return {}
        sample = samples[0]
        names = [field for field in sample.__struct_fields__ if field not in ("t_ns", "index")]
        values = {field: getattr(sample, field) for field in names}
        reasons = values.pop("throttle_reasons", None)
        numbers = {field: value for field, value in values.items() if isinstance(value, int | float | None)}
        return numbers | {"throttle_reasons (how many)": None if reasons is None else len(reasons)}

    return Way(read)


@contextmanager
def loaded(device: str | None, *, is_tiny: bool) -> Iterator[None]:
    """Keep a GPU busy with matrix products; readings begin when their means have settled."""
    if device is None or not device.startswith("cuda"):
        yield
        return
    stopped = threading.Event()
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def work() -> None:
        while not stopped.is_set():
            for _ in range(20):
                matrix @ matrix
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(0 if is_tiny else WARM_S)
        yield
    finally:
        stopped.set()
        thread.join()


def read_in_turns(smi: Way, nvml: Way, pairs: int) -> list[tuple[Reading, Reading]]:
    taken = []
    for _ in range(pairs):
        taken.append((smi.read() if smi.read else {}, nvml.read() if nvml.read else {}))
        if smi.read or nvml.read:
            time.sleep(GAP_S)
    return taken


def page(both: Sequence[Way], states: Mapping[str, list[tuple[Reading, Reading]]]) -> str:
    reasons = [way.reason for way in both if way.read is None]
    parts = list(dict.fromkeys(reasons))
    if len(reasons) < len(both):
        columns = [
            "field",
            *(f"{state}: {what}" for state in states for what in ("nvidia-smi", "NVML", "most apart")),
        ]
        names = list(
            dict.fromkeys(name for taken in states.values() for pair in taken for one in pair for name in one)
        )
        rows = [
            [title(name), *(cell for taken in states.values() for cell in cells(taken, name))] for name in names
        ]
        parts.append(table(columns, rows))
    return "\n\n".join(parts)


def title(name: str) -> str:
    unit = FIELDS[name][0] if name in FIELDS else ""
    return f"{name}, {unit}" if unit else name


def cells(taken: Sequence[tuple[Reading, Reading]], name: str) -> list[str]:
    """Medians of both, and the largest difference of a pair; a field that one does not know is a dash."""
    columns = [[pair[side].get(name) for pair in taken] for side in (0, 1)]
    known = [[value for value in column if value is not None] for column in columns]
    medians = [f"{statistics.median(values):g}" if values else "-" for values in known]
    differences = [
        abs(first - second)
        for first, second in zip(*columns, strict=True)
        if first is not None and second is not None
    ]
    return [*medians, f"{max(differences):g}" if differences else "-"]


if __name__ == "__main__":
    main()
