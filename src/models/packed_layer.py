"""What the weights of a layer have in common, whichever kernels they are packed for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Self

import torch

from epicute.errors import require
from epicute.models.block_spec import PROJECTIONS

__all__ = ["PackedLayer"]

VECTORS = ("bias", "q_gain", "k_gain", "x_gain", "x1_gain", "y_gain")
"""What a layer may have beside its projections: float32 vectors, or None."""


class PackedLayer:
    """Base of dataclasses that have a field for each of ``PROJECTIONS`` and for some of ``VECTORS``."""

    def _check_vector(self, name: str, wanted: bool, length: int, fix: str) -> None:
        given: torch.Tensor | None = getattr(self, name)
        right = given is not None and given.shape == (length,) and given.dtype == torch.float32
        require(
            right if wanted else given is None,
            name,
            "None" if given is None else f"{tuple(given.shape)} {given.dtype}",
            f"({length},) float32" if wanted else "None, as the spec has none",
            fix,
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        found: torch.device = getattr(self, PROJECTIONS[0]).device
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self._tensors().values())

    def to(self, device: torch.device | str) -> Self:
        """The same weights on ``device``."""
        moved = {name: x.to(device) for name, x in self._tensors().items()}
        return replace(self, **moved)  # type: ignore[type-var]

    def _tensors(self) -> dict[str, Any]:
        names = [f.name for f in fields(self) if f.name in (*PROJECTIONS, *VECTORS)]  # type: ignore[arg-type]
        found = {name: getattr(self, name) for name in names}
        return {name: x for name, x in found.items() if x is not None}
