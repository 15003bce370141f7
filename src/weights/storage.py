"""What every packed weight shares: its file, and the checks of its order and scales."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from epicute.errors import ArgumentError, require
from epicute.layouts import RowOrder

__all__ = [
    "read_file",
    "require_columns",
    "require_positive_scales",
    "require_version",
    "same_order",
    "write_file",
]

Path_ = str | os.PathLike[str]


def write_file(
    path: Path_, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file that appears whole or not at all."""
    from safetensors.torch import save_file

    partial = Path(f"{os.fspath(path)}.{os.getpid()}.partial")
    try:
        save_file(dict(tensors), partial, dict(metadata))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_file(
    path: Path_, device: torch.device | str, version: int, kind: str | None = None
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a file of this layout ``version`` (and ``kind``, where files say one).

    Raises:
        ArgumentError: another kind or version, before any tensor is read; or what is no safetensors
            file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            found = file.metadata() or {}
            if kind is not None:
                require(
                    found.get("kind") == kind,
                    f"{os.fspath(path)}: kind",
                    found.get("kind", "none"),
                    kind,
                    "load it with the class that saved it",
                )
            require_version(path, found, version)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ArgumentError(
            f"{os.fspath(path)}: got a file that safetensors cannot read ({error}), expected a packed "
            "weight. Fix: write it with save, or copy the whole file again"
        ) from error
    return found, tensors


def require_version(path: Path_, found: Mapping[str, str], version: int) -> None:
    """Raise unless a file's metadata name layout ``version``."""
    require(
        found.get("layout_version") == str(version),
        f"{os.fspath(path)}: layout_version",
        found.get("layout_version", "none"),
        str(version),
        "pack the checkpoint again with this version of epicute",
    )


def same_order(one: RowOrder, other: RowOrder) -> bool:
    """Whether both put every row in the same place, whatever they call their ranges."""
    if one == other:
        return True
    same_size = (one.rows, one.columns) == (other.rows, other.columns)
    return same_size and np.array_equal(one.logical(), other.logical())


def require_columns(name: str, order: RowOrder, columns: int) -> None:
    """Raise unless ``order`` is a RowOrder, and for ``columns`` output features."""
    asked = hasattr(order, "row_order")  # a composition, which makes orders
    require(
        isinstance(order, RowOrder),
        f"{name}: order",
        f"{order!r:.60}" if isinstance(order, int) else type(order).__name__,
        "a RowOrder",
        f"{'ask it for one' if asked else 'ask the epilogue for one'}: pack(epilogue.row_order({columns}))",
    )
    require(
        order.columns == columns,
        f"{name}.order",
        f"[{order}]",
        f"an order of {columns} columns, one per output feature",
        "build the order from this projection's shape",
    )


def require_positive_scales(name: str, scale: torch.Tensor | None) -> None:
    """Raise unless all scales are finite and positive. Waits for the device."""
    if scale is None:
        return
    broken = int((~(scale.isfinite() & (scale > 0))).sum())
    require(
        broken == 0,
        f"{name}.scale",
        f"{broken} values that are NaN, infinite, zero or negative",
        "finite positive multipliers",
        "give a feature of zeros the scale 1, and check the checkpoint",
    )
