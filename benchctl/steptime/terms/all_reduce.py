"""Time of an all-reduce among the devices that share a layer.

A small message costs a synchronisation of all devices, which no bandwidth explains: bandwidth alone is 40 times
too little for a megabyte among four H100.
Engines choose among three kernels by the size m of the message, as vLLM does:

one-shot   each of n devices reads the message of every other:   f + p (n - 1) + e (n - 1) m / link
two-shot   each reduces its part and reads the others':          f + p (n - 1) + e 2 (n - 1) / n m / link
ring       NCCL beyond 8 MiB, the same bytes with a larger floor

f, p and e of H100 and A100 are fitted to measured times of vLLM 0.14 in CUDA graphs (``benchmarks/steptime``),
which they meet within 6 %; other devices have the H100's, with their own links.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from benchctl.costs.hardware import Hardware
from benchctl.steptime.terms.elementwise import is_above
from benchctl.steptime.terms.peak_times import US_PER_S
from benchctl.steptime.work import Deployment
from benchctl.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchctl.steptime.work import Quantity

    PricedTokens: TypeAlias = Callable[[Quantity], Quantity]

_ACTIVATION_BYTES: Final = 2
_RING_FROM: Final = 8 * MIB
_TWO_SHOT_FROM: Final = ((2, _RING_FROM), (4, MIB // 2), (8, MIB // 4))
"""Message from which two-shot is used, by the number of devices at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """``floor_us`` and ``peer_us`` for each other device; the link's time for the bytes times ``link_factor``."""

    floor_us: float
    peer_us: float
    link_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceKernels:
    """The three kernels of one kind of device."""

    one_shot: Kernel
    two_shot: Kernel
    ring: Kernel


_H100: Final = AllReduceKernels(
    one_shot=Kernel(floor_us=4.3, peer_us=0.05, link_factor=1.65),
    two_shot=Kernel(floor_us=6.2, peer_us=0.85, link_factor=1.35),
    ring=Kernel(floor_us=27.5, peer_us=0.7, link_factor=1.32),
)
_A100: Final = AllReduceKernels(
    one_shot=Kernel(floor_us=4.9, peer_us=0.15, link_factor=1.57),
    two_shot=Kernel(floor_us=9.9, peer_us=0.65, link_factor=1.28),
    ring=Kernel(floor_us=50.0, peer_us=2.5, link_factor=1.41),
)
KERNELS: Final = {"h100-sxm": _H100, "h200-sxm": _H100, "a100-sxm": _A100, "a100-sxm-40gb": _A100}


def all_reduce_us(num_bytes: "Quantity", hardware: Hardware, devices: int) -> "Quantity":
    """One all-reduce of a message of so many bytes, in microseconds; 0 for a single device."""
    if devices == 1:
        return 0.0 * num_bytes
    kernels = KERNELS.get(hardware.device, _H100)
    if isinstance(num_bytes, float | int):
        return _kernel_us(num_bytes, kernels, kernel_name(num_bytes, devices), hardware, devices)
    one_shot, two_shot, ring = (
        _kernel_us(num_bytes, kernels, name, hardware, devices) for name in ("one_shot", "two_shot", "ring")
    )
    is_large, is_ring = is_above(num_bytes, _two_shot_from(devices) - 1), is_above(num_bytes, _RING_FROM - 1)
    return (1.0 - is_ring) * ((1.0 - is_large) * one_shot + is_large * two_shot) + is_ring * ring


def kernel_name(num_bytes: float, devices: int) -> str:
    """The kernel that an engine chooses: ``one_shot``, ``two_shot`` or ``ring``."""
    if num_bytes >= _RING_FROM:
        return "ring"
    return "one_shot" if num_bytes < _two_shot_from(devices) else "two_shot"


def moved_bytes(num_bytes: "Quantity", kernel: str, devices: int) -> "Quantity":
    """Bytes that a device reads from its peers."""
    peers = devices - 1
    return num_bytes * (peers if kernel == "one_shot" else 2 * peers / devices)


def _two_shot_from(devices: int) -> int:
    return next((size for most, size in _TWO_SHOT_FROM if devices <= most), 0)


def _kernel_us(
    num_bytes: "Quantity", kernels: AllReduceKernels, name: str, hardware: Hardware, devices: int
) -> "Quantity":
    kernel: Kernel = getattr(kernels, name)
    link_us = moved_bytes(num_bytes, name, devices) * (US_PER_S / hardware.link_bytes_per_s)
    return kernel.floor_us + kernel.peer_us * (devices - 1) + kernel.link_factor * link_us


def step_all_reduces(deployment: Deployment) -> "PricedTokens | None":
    """Time of a step's all-reduces from its tokens, two for each layer; None on one device."""
    shape, hardware, devices = deployment.shape, deployment.hardware, deployment.tensor_parallel
    if devices == 1:
        return None
    token_bytes, num_all_reduces = shape.hidden * _ACTIVATION_BYTES, 2 * shape.layers
    return lambda tokens: num_all_reduces * all_reduce_us(tokens * token_bytes, hardware, devices)
