"""Benchmarks of benchctl itself, listed in README.md; from the root: ``python -m benchmarks.load.clients``."""
