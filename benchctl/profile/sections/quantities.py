"""The quantities of a profile: each with its unit and the range beyond which a value is a mistake.

Ranges are wide enough for any server and load, and narrow enough that nothing computed from them overflows or
fills a machine.
"""

from typing import Annotated, Final

from pydantic import Field

from benchctl.profile.sections.ranges import (
    MAX_BLOCKS,
    MAX_CONCURRENCY,
    MAX_CONTEXT,
    MAX_DEVICES,
    MAX_DRAFT_TOKENS,
    MAX_JOBS,
    MAX_LEASE_S,
    MAX_OUTPUTS,
    MAX_RESUBMISSIONS,
    MAX_SEED,
    MAX_THREADS,
    MAX_TOKENS,
    MAX_WARMUPS,
)

LEAST, MOST = 1e-6, 1e6
"""Rates, factors and durations lie between, so that no time computed from them overflows."""
NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9._-]*$"
"""A name that is a part of a path as well."""

Seconds = Annotated[float, Field(ge=LEAST, le=MOST)]
Delay = Annotated[float, Field(ge=0, le=MOST)]
"""Seconds that may be none."""
Rate = Annotated[float, Field(ge=LEAST, le=MOST)]
"""Per second."""
Factor = Annotated[float, Field(ge=LEAST, le=MOST)]
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
"""A part of something, which cannot be none of it."""
CostShare = Annotated[float, Field(ge=0, le=1000)]
"""A time as a share of another."""
Temperature = Annotated[float, Field(ge=0, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]

RequestCount = Annotated[int, Field(ge=1, le=MAX_OUTPUTS)]
WarmupCount = Annotated[int, Field(ge=0, le=MAX_WARMUPS)]
Concurrency = Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)]
"""Requests open at the same time, and sequences in one batch."""
TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
"""Tokens of one prompt or answer."""
ContextLength = Annotated[int, Field(ge=1, le=MAX_CONTEXT)]
"""Tokens of prompt and answer together, and tokens of one step."""
CachedTokens = Annotated[int, Field(ge=0, le=1 << 24)]
BlockCount = Annotated[int, Field(ge=1, le=1 << 30)]
"""Blocks of a KV cache."""
BlockTokens = Annotated[int, Field(ge=1, le=1 << 16)]
"""Tokens in one block of a KV cache."""
VocabularyRank = Annotated[int, Field(ge=-1, le=1 << 24)]
"""Tokens of a vocabulary; -1: all."""
DraftTokens = Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)]
"""Tokens drafted in one step."""
StepCount = Annotated[int, Field(ge=1, le=MAX_OUTPUTS)]
DeviceCount = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
OptionalDevices = Annotated[int, Field(ge=0, le=MAX_DEVICES)]
"""Devices that may be none."""
ThreadCount = Annotated[int, Field(ge=1, le=MAX_THREADS)]
CoreCount = Annotated[int, Field(ge=0, le=4096)]
LayerCount = Annotated[int, Field(ge=0, le=100_000)]
AdapterCount = Annotated[int, Field(ge=1, le=65_536)]
ByteCount = Annotated[int, Field(ge=1, le=1 << 50)]
ReplicateCount = Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
"""Blocks of an experiment."""
JobCount = Annotated[int, Field(ge=1, le=MAX_JOBS)]
"""Blocks measured at the same time."""
ResubmissionCount = Annotated[int, Field(ge=0, le=MAX_RESUBMISSIONS)]
LeaseTime = Annotated[float, Field(ge=1, le=MAX_LEASE_S)]
"""Seconds without a sign of life after which the owner of a block counts as dead."""
Port = Annotated[int, Field(ge=1, le=65_535)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
