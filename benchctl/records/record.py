"""Records: frozen structs, the lines and documents of a result directory.

``None`` means *unknown*, never zero, and is left out of the JSON. Times are integer nanoseconds of the measuring
host's monotonic clock unless the field says otherwise; the text below a field is its entry in
``docs/reference/result-format.md``.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

RunState: TypeAlias = Literal["planned", "running", "done", "failed", "suspect"]
ExperimentState: TypeAlias = Literal["planned", "running", "done", "failed", "suspect", "interrupted"]
"""``interrupted``: Ctrl-C or SIGTERM ended it; directories of older versions say ``failed``."""
Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A number that fits into a column of 64 bits; a line with a larger one cannot be read."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""A number of things, such as tokens, rows or requests. The sum over the steps of a log fits into 64 bits."""
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""Bytes, hertz or nanoseconds without a bound of their own."""
MomentNs: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
"""A time on any clock, until the year 2116 on one that counts from 1970; below 0 before the beginning of an import.
Differences fit into 64 bits."""
DurationNs: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=86_400 * 10**9)]
"""A duration of a step or a part of it: at most a day."""
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
"""A measured quantity that is never negative."""
Cell: TypeAlias = dict[str, str | Int64 | float | bool | None]
"""One point of the sweep: a value for each swept factor. Empty for the baseline."""
FOREIGN_GPU_PROCESS = "foreign-gpu-process"
"""Code of the warning that another program computed on a device of the run."""
GPU_UNREADABLE = "gpu-unreadable"
"""Code of the warning that a visible device cannot be read."""
GPU_LOST = "gpu-lost"
"""Code of the warning that a device of the run stopped answering."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of all records: frozen, keyword-only, absent where unknown."""


class ResultWarning(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A limit on the use of a result: attached to it, printed as a footnote, kept in the JSON."""

    code: str
    """Stable name for programs, such as ``gpu-sampler-missing``."""
    message: str
    """Consequence for the numbers, and remedy."""
    where: str | None = None
    """Run, file or metric that it concerns."""
