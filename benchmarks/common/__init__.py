"""A server whose truth is known, commands whose cost is measured, and tables: shared by the benchmarks."""
