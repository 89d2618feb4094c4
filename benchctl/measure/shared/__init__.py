"""Experiments whose blocks several processes measure: one block, the blocks that are free, and what comes after."""
