"""Guidance inside a vLLM server, as a logits processor of either of its model runners.

``plugin`` is what vLLM loads; ``server`` holds the value model of one process.
"""
