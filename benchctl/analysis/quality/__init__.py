"""Quality of the answers: accuracy where gold answers exist, and divergence of the texts of two sides.

The unit of statistics here is the question, not the block.
"""
