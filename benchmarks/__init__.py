"""Measurements of epicute on a GPU, one module per published table.

``python -m benchmarks gemm epilogue calls accuracy`` measures epicute beside its peers and writes one
JSON file per table; ``python -m benchmarks.plots FILE...`` draws them, ``python -m
benchmarks.roofline`` the products under the card's peaks. Nothing here is part of the installed
package.
"""
