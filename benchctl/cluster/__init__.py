"""One experiment on several machines or devices: blocks are handed out, and each is measured in one place.

The unit is the block, because its arms are compared with each other. Whoever measures a block runs
``benchctl run --block I --into DIR`` beside the device; nothing here measures anything itself.
"""
