"""The operations that a worker offers: each is a function of the worker's state with arguments by name.

To add one: write it, with ``state`` as its first parameter and a JSON document as its result, and name it in
``OPERATIONS``.
"""

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchctl.micro.inside.devices import CpuDevice, CudaDevice, open_device
from benchctl.micro.inside.dimensions import Dimensions, PassPoint
from benchctl.micro.inside.failures import WorkerError
from benchctl.micro.inside.llama import DenseModel, ModelSettings
from benchctl.micro.inside.passes import PassStore
from benchctl.micro.inside.peaks import PeakSettings, measure_peaks

Arguments = Mapping[str, Any]


class WorkerState:
    """Device, model and passes of one process."""

    device: CpuDevice | CudaDevice
    model: DenseModel | None = None
    passes: PassStore | None = None

    def __init__(self, settings: Arguments) -> None:
        """Opens the device and draws the weights of the model, if there is one. Raises WorkerError.

        Nothing that a worker computes is recorded for gradients.
        """
        torch.inference_mode().__enter__()
        if settings["threads"] is not None:
            torch.set_num_threads(settings["threads"])
        self.device = open_device(settings["device"])
        if settings["model"] is not None:
            names = ("dtype", "kv_layout", "page_tokens", "seed")
            model = ModelSettings(
                name=settings["model"]["name"],
                dimensions=Dimensions.of(settings["model"]),
                **{name: settings[name] for name in names},
            )
            self.model = DenseModel(model, self.device)
            self.passes = PassStore(self.device, self.model)


def describe(state: WorkerState) -> dict[str, Any]:
    """Interpreter, device, and number of parameters of the model."""
    return {
        "python": sys.executable,
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "device": str(state.device.torch_device),
        "num_threads": torch.get_num_threads(),
        "float32_precision": torch.get_float32_matmul_precision(),
        "num_params": state.model.weights.num_params() if state.model is not None else None,
        "free_bytes": state.device.free_bytes(),
        **state.device.describe(),
    }


def check_fits(state: WorkerState, *, points: Sequence[Arguments]) -> dict[str, Any]:
    """Nothing; WorkerError for a point that does not fit into memory by itself."""
    _passes(state).check_fits(PassPoint(**point) for point in points)
    return {}


def measure(state: WorkerState, *, point: Arguments, mode: str, warmups: int, replays: int) -> dict[str, Any]:
    """Times of one point in one mode."""
    return _passes(state).measure(PassPoint(**point), mode, warmups=warmups, replays=replays)


def peaks(state: WorkerState, **arguments: Any) -> dict[str, Any]:
    """Rates that kernels reach on the device; see ``PeakSettings`` for the arguments."""
    lists = {name: tuple(value) for name, value in arguments.items() if isinstance(value, list)}
    return measure_peaks(PeakSettings(device=str(state.device.torch_device), **(arguments | lists)))


def _passes(state: WorkerState) -> PassStore:
    if state.passes is None:
        raise WorkerError("settings", "this worker was started without a model; start one with a shape")
    return state.passes


OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "describe": describe,
    "check_fits": check_fits,
    "measure": measure,
    "peaks": peaks,
}
