"""The operations of ``operations`` as Triton kernels, and the check that they compute the same."""
