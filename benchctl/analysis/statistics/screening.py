"""How many blocks are enough for a verdict; fewer are a screening."""

from typing import Final

MIN_PAIRED_BLOCKS: Final = 6
"""Fewer give no verdict: the sign-flip test of five cannot reach p < 0.05."""
MIN_UNPAIRED_BLOCKS: Final = 4
"""On each side; the Mann-Whitney test of three against three cannot reach p < 0.05."""
