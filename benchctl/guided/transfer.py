"""Numbers between host and device, for which neither waits."""

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


class Arriving:
    """Whole numbers on their way from the device to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            there = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))
            numbers = there
        self._numbers = numbers

    @property
    def is_here(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> list[int]:
        """The numbers; waits for them if necessary."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return numbers
