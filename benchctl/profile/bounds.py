"""Bounds of what a profile says, and what it says by default, as options of the command line have them too.

A command that validates no profile begins without the library that does, so nothing is imported here.
"""

from typing import Final

DEFAULT_MODEL: Final = "qwen2.5-7b"
"""Model of a profile that names none."""
PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Parameters of sampling that depend on the tokens so far, and that few requests have."""

MAX_OUTPUTS: Final = 1_000_000
"""Answers to all requests of a run."""
MAX_TOKENS: Final = 1_000_000
"""Tokens of one prompt or answer."""
MAX_CONTEXT: Final = 1 << 24
"""Tokens of prompt and answer together, and tokens of one step."""
MAX_CONCURRENCY: Final = 65_536
"""Requests open at the same time, and sequences in one batch."""
MAX_DRAFT_TOKENS: Final = 256
MAX_DEVICES: Final = 4096
MAX_THREADS: Final = 4096
MAX_WARMUPS: Final = 10_000
MAX_BLOCKS: Final = 10_000
"""Complete replicates of an experiment."""
MAX_LOADS: Final = 50
"""Loads that one server gets, one after the other."""
PILOT_LOADS: Final = 3
"""Loads of each server until their number is chosen: as many as tell scatter between loads, and few enough to cost
little where one load is the cheapest."""
MAX_SEED: Final = 2**63 - 1
MAX_LAYERS: Final = 1000
MAX_TOTAL_TOKENS: Final = 10**15
"""Tokens of all answers together."""

LEAST, MOST = 1e-6, 1e6
"""Rates, factors and durations lie between, so that no time computed from them overflows."""
