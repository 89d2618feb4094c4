"""Samples taken during a load: GPUs, the host, and the server's own Prometheus page.

``telemetry`` starts and stops all samplers of a run.
"""
