"""From a profile to ordered runs: cells, blocks, and an order within blocks that is as balanced as possible."""
