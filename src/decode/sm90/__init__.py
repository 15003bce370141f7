"""Few-row kernels for Hopper."""
