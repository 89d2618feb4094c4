"""The fewest blocks that give a verdict; fewer are a screening. Imports neither numpy nor scipy, which are slow."""

from typing import Final

MIN_PAIRED_BLOCKS: Final = 6
"""With five, the sign-flip test cannot reach p < 0.05."""
MIN_UNPAIRED_BLOCKS: Final = 4
"""On each side; with three, the Mann-Whitney test cannot reach p < 0.05."""
