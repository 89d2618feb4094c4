"""What answers say beside times: accuracy where gold answers exist, and where texts of two sides diverge.

The question is the unit of statistics here, not the block.
"""
