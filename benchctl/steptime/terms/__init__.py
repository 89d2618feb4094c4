"""Terms of a step's time at the peaks: compute, memory, experts, all-reduce, elementwise kernels, guided work."""
