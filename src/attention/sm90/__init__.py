"""Attention kernels for Hopper. The modules import the DSL."""
