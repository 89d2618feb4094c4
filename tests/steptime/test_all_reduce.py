"""All-reduces: the time that their links and kernels allow, and the kernel that an engine chooses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.costs.hardware import hardware_for
from benchctl.steptime.features import all_reduce_us, kernel_name


@given(st.integers(1, 10**9), st.sampled_from([2, 4, 8]))
def test_an_all_reduce_never_beats_its_links_nor_its_floor(num_bytes: int, devices: int) -> None:
    for name in ("h100-sxm", "a100-sxm", "l40s"):
        hardware = hardware_for(name)
        time_us = all_reduce_us(float(num_bytes), hardware, devices)
        assert time_us > 4
        assert time_us > 2 * (devices - 1) / devices * num_bytes / hardware.link_bytes_per_s * 1e6
        array = all_reduce_us(np.array([float(num_bytes)] * 2), hardware, devices)
        assert array == pytest.approx([time_us, time_us])


def test_engines_choose_the_kernel_by_size_and_devices() -> None:
    assert [kernel_name(size, 4) for size in (1e3, 6e5, 1e7)] == ["one_shot", "two_shot", "ring"]
    assert [kernel_name(size, 2) for size in (1e3, 6e5, 1e7)] == ["one_shot", "one_shot", "ring"]
    assert kernel_name(3e5, 8) == "two_shot"
