"""What stands before and behind a model's blocks as float64 PyTorch, written from its formula.

An independent text: no kernel, planner or policy may import it. Values are exact up to float64; nothing is rounded on
the way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epicute.epilogues.reference import sum_squares, wide

__all__ = ["embedding", "final_norm", "sum_squares"]


def embedding(ids: Any, table: Any) -> Tensor:
    """(M, hidden) rows of ``table`` (V, hidden) by ``ids`` (M,); zeros where an id is no row."""
    table, ids = wide(table), torch.as_tensor(ids).cpu().to(torch.int64)
    found = torch.zeros(len(ids), table.shape[1], dtype=torch.float64)
    for m, token in enumerate(ids.tolist()):
        if 0 <= token < table.shape[0]:
            found[m] = table[token]
    return found


def final_norm(x: Any, gain: Any, eps: float, offset: float = 0.0, rows: Any = None) -> Tensor:
    """(R, hidden): x (M, hidden) / sqrt(mean(x²) + eps) * (gain (hidden,) + offset), of ``rows`` (R,).

    Zeros where an index is no row of x; all rows where there are no indices.
    """
    x = wide(x)
    mean = (x * x).mean(dim=1, keepdim=True)
    found = x / torch.sqrt(mean + eps) * (wide(gain) + offset)
    return found if rows is None else embedding(rows, found)
