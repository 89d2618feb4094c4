"""Largest values of quantities that profiles and options of the command line share; see ``quantities``."""

from typing import Final

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
MAX_JOBS: Final = 100_000
"""Blocks measured at the same time."""
MAX_LEASE_S: Final = 3600.0
MAX_RESUBMISSIONS: Final = 100
MAX_SEED: Final = 2**63 - 1
MAX_LAYERS: Final = 1000
MAX_TOTAL_TOKENS: Final = 10**15
"""Tokens of all answers together."""
