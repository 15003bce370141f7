"""Whether a candidate computed the reference's numbers: by norm, and by worst row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Error", "View", "WrongResult", "budget", "checker", "compare"]

View = Callable[[str, Tensor], Tensor]


class WrongResult(AssertionError):
    """A candidate computed something else than the reference."""


@dataclass(frozen=True)
class Error:
    """‖out − ref‖ / ‖ref‖, and the same of the worst row."""

    norm: float
    worst_row: float

    def within(self, budget: Error) -> bool:
        """Whether neither exceeds the budget's; NaN does."""
        return self.norm <= budget.norm and self.worst_row <= budget.worst_row

    def json(self) -> dict[str, float]:
        """As it stands in a table."""
        return {"norm": self.norm, "worst_row": self.worst_row}


def budget(output: str) -> Error:
    """What an output may be off by.

    BF16: rounding 0.0017, fast FP8 accumulation at K = 53248 about 0.004. FP8: rounding 0.026.
    """
    return Error(0.04, 0.06) if output.endswith("fp8") else Error(0.01, 0.02)


def compare(out: Tensor, reference: Tensor) -> Error:
    """Error of ``out`` against ``reference`` float64, both (rows, n); NaN makes it infinite."""
    if out.shape != reference.shape:
        raise WrongResult(f"shape {tuple(out.shape)} instead of {tuple(reference.shape)}")
    difference = torch.linalg.vector_norm(out.double() - reference, dim=1)
    size = torch.linalg.vector_norm(reference, dim=1)
    norm = (torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(size)).item()
    rows = (difference / size).max().item()
    return Error(*(math.inf if math.isnan(found) else found for found in (norm, rows)))


def checker(
    reference: Mapping[str, Tensor], view: View, allowed: Callable[[str], Error] = budget
) -> Callable[[Callable[[int], Mapping[str, Tensor]]], Error]:
    """A check of copy 0's outputs, all of which must be in ``reference`` by name, (rows, n)
    float64.

    ``view`` picks the checked rows of an output, dequantised; ``allowed`` is an output's budget by
    name. The check returns the largest errors and raises WrongResult, naming the output, where one
    exceeds its budget.
    """

    def check(run: Callable[[int], Mapping[str, Tensor]]) -> Error:
        errors = []
        for name, tensor in run(0).items():
            found = compare(view(name, tensor), reference[name])
            if not found.within(allowed(name)):
                raise WrongResult(f"{name}: {found}, allowed {allowed(name)}")
            errors.append(found)
        return Error(max(e.norm for e in errors), max(e.worst_row for e in errors))

    return check
