"""Revisions of SGLang's LenVM fork that could have written a step log or a server's log.

V1  a line for each step
V2  averages in the server's log, no lines
V3  the lines of V1, and whether a step took the fused path
V4  the lines of V1 with some thirty more keys
V0  nothing
"""

from collections.abc import Iterable
from typing import Final

from benchctl.interop.readers.lenvm_averages import read_averages
from benchctl.interop.readers.lenvm_timing import TimingRecord

ALL: Final = ("V0", "V1", "V2", "V3", "V4")
_ONLY_V4: Final = frozenset({"lvm_guided_rows", "lvm_n_candidates", "lvm_forward_rows", "lvm_gpu_guidance_path"})
_ONLY_V4_SECTIONS: Final = frozenset({"preprocess_logits", "guided_override", "lvm_get_inproc"})


def revisions_of(records: Iterable[TimingRecord], log_lines: Iterable[str] = ()) -> tuple[str, ...]:
    """The revisions that fit a server's output, in their order; at least one.

    An early V3 without the fused path writes what V1 writes, and unguided lines of V4 may look like that, too.
    """
    candidates = {_of_record(record) for record in records}
    if candidates:
        return min(candidates, key=len)
    lines = list(log_lines)
    if read_averages(lines):
        return ("V2",)
    return ("V3",) if any("LENVM_STRIDE=" in line for line in lines) else ("V0", "V2")


def _of_record(record: TimingRecord) -> tuple[str, ...]:
    """The revisions that write such a line."""
    if _ONLY_V4 & record.other.keys() or _ONLY_V4_SECTIONS & record.sections_ms.keys():
        return ("V4",)
    if "lvm_fused_path" in record.other:
        return ("V3",)
    return ("V1", "V3") if "lvm_forward" in record.sections_ms else ("V1", "V3", "V4")
