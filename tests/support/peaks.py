"""Measured peaks that were planted, not measured."""

from benchctl.records.peaks import MeasuredPeaks, PeakSeries
from benchctl.records.schema import SCHEMA_VERSION

CPU = "AMD EPYC"
H100 = "NVIDIA H100 80GB HBM3"


def series(quantity, *values, dtype=None, setting="1024"):
    return PeakSeries(quantity=quantity, dtype=dtype, setting=setting, values=values)


def cpu_peaks(**changes):
    """A CPU of two threads: 800 and 200 GFLOP/s, 48 GB/s to read and 43 to copy, 2 us for one call."""
    fields = {
        "schema_version": SCHEMA_VERSION,
        "measured_at": "2026-11-22T19:05:01Z",
        "host": "box",
        "kind": "cpu",
        "device": CPU,
        "threads": 2,
        "memory_bytes": 25_000_000_000,
        "cache_bytes": 32 * 2**20,
        "buffer_bytes": 256 * 2**20,
        "torch_version": "2.13.0+cpu",
        "busy_frac": 0.01,
        "series": (
            series("matmul", 0.7e12, 0.71e12, 0.72e12, dtype="bfloat16", setting="512"),
            series("matmul", 0.79e12, 0.8e12, 0.81e12, dtype="bfloat16", setting="1024"),
            series("matmul", 0.2e12, 0.2e12, 0.2e12, dtype="float32", setting="1024"),
            series("copy", 43e9, 43e9, 43e9, setting=f"{256 * 2**20}"),
            series("read", 47e9, 48e9, 49e9, setting=f"{256 * 2**20}"),
            series("launch", 2e-6, 2e-6, 2e-6, setting="in a row"),
        ),
    }
    return MeasuredPeaks(**{**fields, **changes})


def gpu_peaks(bfloat16=790e12, read=3.1e12, fp8=1500e12, link=390e9, **changes):
    """A GPU of the hardware table, by its driver's name."""
    return cpu_peaks(
        **{
            "kind": "cuda",
            "device": H100,
            "threads": None,
            "memory_bytes": 80_000_000_000,
            "cache_bytes": 50 * 2**20,
            "buffer_bytes": 2**30,
            "series": (
                series("matmul", bfloat16, bfloat16, bfloat16, dtype="bfloat16"),
                series("matmul", fp8, fp8, fp8, dtype="fp8"),
                series("copy", 2.9e12, 2.9e12, 2.9e12),
                series("read", read, read, read),
                series("launch", 5e-6, 5e-6, 5e-6, setting="in a row"),
                series("all-reduce", link, link, link),
            ),
            **changes,
        }
    )
