"""The NumPy interpreter: every policy of a composition on whole float32 matrices, rounded after every operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from epicute.epilogues.composition import Composition, check_operands
from epicute.epilogues.context import Context, run_body
from epicute.epilogues.numpy_ops import NUMPY_OPERATIONS, round_to
from epicute.epilogues.operands import (
    Cells,
    ColumnVector,
    Counter,
    HeadVector,
    Matrix,
    Maximum,
    Operand,
    Output,
    Partials,
    PartialsOutput,
    PerHead,
    RowVector,
    Scalar,
    cells_fix,
    check_number,
    per_row_fix,
)
from epicute.epilogues.policy import Pairwise
from epicute.epilogues.resolve import Domain, Resolved, Step, resolve
from epicute.epilogues.values import Value
from epicute.errors import require

__all__ = ["evaluate"]


def evaluate(composition: Composition, acc: Any, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate on the CPU.

    Args:
        composition: a complete composition.
        acc: (M, N) array or CPU tensor; taken as float32.
        operands: by name, tensors or arrays as ``run`` takes them; numbers and tensors without dimensions for those of
            shape (1,). Written ones may be left out; ``Maximum``,
            ``Counter`` and ``Cells`` given are started from and not changed.

    Returns:
        Every written operand by name, as a new CPU tensor of the operand's dtype.
    """
    matrix = _array(acc)
    require(matrix.ndim == 2, "acc", f"shape {matrix.shape}", "(M, N)", "pass a matrix")
    resolved = resolve(composition, matrix.shape[1])
    check_operands(composition, operands)
    state = _State(resolved, matrix.shape[0], operands)
    for span in resolved.ranges:
        x = matrix[:, span.first_column : span.first_column + span.range.columns]
        for step in span.steps:
            x = _run(step, x, state)
    return state.results()


def _array(given: Any) -> np.ndarray:
    """float32 array of a tensor or array; float8 and bfloat16 tensors included."""
    if isinstance(given, torch.Tensor):
        return given.detach().cpu().to(torch.float32).numpy()
    return np.asarray(given, np.float32)


def _run(step: Step, x: np.ndarray, state: _State) -> np.ndarray:
    if isinstance(step.policy, Pairwise):
        return _run_pair(step, x, state)
    columns = np.arange(x.shape[1])
    ctx = _NumpyContext(step, columns, x.shape, state)
    out = run_body(ctx, Value(x, NUMPY_OPERATIONS))
    return x if out is None else np.broadcast_to(out.raw, x.shape).astype(np.float32)


def _pair_columns(policy: Pairwise, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns of first and second members, in the order of the pairs."""
    if not policy.head_dim:
        return np.arange(columns // 2), np.arange(columns // 2) + columns // 2
    base = np.arange(columns // policy.head_dim)[:, None] * policy.head_dim
    pair = np.arange(policy.rotary_dim // 2)[None, :]
    half = policy.pairs == "halves"
    first = base + (pair if half else 2 * pair)
    second = first + (policy.rotary_dim // 2 if half else 1)
    return first.ravel(), second.ravel()


def _run_pair(step: Step, x: np.ndarray, state: _State) -> np.ndarray:
    policy = step.policy
    first, second = _pair_columns(policy, x.shape[1])  # type: ignore[arg-type]
    shape = (x.shape[0], len(first))
    ctx = _NumpyContext(step, np.arange(len(first)), shape, state)
    pair = (Value(x[:, c], NUMPY_OPERATIONS) for c in (first, second))
    out = run_body(ctx, *pair)
    if policy.consumes:  # type: ignore[attr-defined]
        return np.broadcast_to(out.raw, shape).astype(np.float32)
    found = x.copy()
    found[:, first], found[:, second] = out[0].raw, out[1].raw
    return found


class _State:
    """Operands and outputs of one evaluation."""

    def __init__(self, resolved: Resolved, rows: int, given: Mapping[str, Any]) -> None:
        self.rows = rows
        self.kinds = resolved.kinds
        self.shapes: dict[str, Any] = {
            n: tuple(rows if d == "M" else d for d in shape) for n, shape in resolved.shapes.items()
        }
        self.given = given
        self.written: dict[str, Any] = {}
        for name, kind in self.kinds.items():
            _check_dtype(name, kind, given.get(name))
            check_number(f"operands: {name}", kind, given.get(name))
            if isinstance(kind, (Output, PartialsOutput)):
                self.written[name] = np.full(self.shapes[name], np.nan, np.float32)
            elif isinstance(kind, (Maximum, Counter)):
                dtype = np.float32 if isinstance(kind, Maximum) else np.int64
                start = given.get(name)
                self.written[name] = np.zeros(1, dtype) if start is None else _copy(start, dtype)
            elif isinstance(kind, Cells):
                require(
                    name in given,
                    f"operands: {name}",
                    "nothing",
                    "the cache the cells are written to",
                    f"pass {name}=cache; evaluate returns a written copy",
                )
                _check_cells(name, kind, self.shapes[name], tuple(np.shape(given[name])))
                self.written[name] = _as_tensor(given[name]).clone()
            else:
                self._check(name, kind)

    def _check(self, name: str, kind: Operand) -> None:
        shape = tuple(np.shape(self.given[name]))
        wanted = self.shapes[name]
        scalar = wanted == (1,) and shape == ()
        per_row = isinstance(kind, ColumnVector) and shape in ((), (1,))
        require(
            shape == wanted or scalar,
            f"operands: {name}",
            f"shape {shape}",
            f"{kind} of shape {wanted}",
            per_row_fix(name) if per_row else "pass it in logical order with that shape",
        )

    def array(self, name: str) -> np.ndarray:
        return _array(self.given[name]).reshape(self.shapes[name])

    def slots(self, name: str) -> np.ndarray:
        given = _as_tensor(self.given[name]).cpu().to(torch.int64).numpy()
        return given.reshape(self.shapes[name])

    def results(self) -> dict[str, Any]:
        found = {}
        for name, value in self.written.items():
            kind = self.kinds[name]
            tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
            if isinstance(kind, Output):
                tensor = tensor.to(kind.dtype)
            found[name] = tensor
        return found


def _check_cells(name: str, kind: Cells, wanted: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Refuse a cache view of other heads or another order of axes; those of pages and tokens are free."""
    heads, dim = wanted[2:]
    require(
        len(shape) == 4 and shape[2:] == (heads, dim),
        f"operands: {name}",
        f"shape {shape}",
        f"{kind} of shape (pages, page_size, {heads}, {dim})",
        cells_fix(name, shape, heads, dim),
    )


def _check_dtype(name: str, kind: Operand, given: Any) -> None:
    """Refuse a tensor whose dtype no kernel would take; arrays and numbers are converted."""
    allowed = (kind.dtype,) if kind.written else kind.dtypes
    require(
        not isinstance(given, torch.Tensor) or given.dtype in allowed,
        f"operands: {name}",
        getattr(given, "dtype", None),
        f"{kind} in {' or '.join(map(str, allowed))}",
        "convert it",
    )


def _copy(start: Any, dtype: Any) -> np.ndarray:
    return np.array(_as_tensor(start).cpu().numpy(), dtype).reshape(1)


def _as_tensor(given: Any) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else torch.as_tensor(given)


class _NumpyContext(Context):
    """A policy's view of whole columns: ``columns`` are the positions of the value's columns in its domain."""

    def __init__(
        self, step: Step, columns: np.ndarray, shape: tuple[int, ...], state: _State
    ) -> None:
        super().__init__(step.policy, NUMPY_OPERATIONS, step.kept)
        self._step = step
        self._columns = columns
        self._shape = shape
        self._state = state

    def _read(self, name: str, kind: Operand) -> Any:
        values = self._state.array(self._step.names[name])
        at = self._columns
        if isinstance(kind, Scalar):
            return values.reshape(1, 1)
        if isinstance(kind, RowVector):
            return values[self._step.first_column + at][None, :]
        if isinstance(kind, ColumnVector):
            return values[:, None]
        if isinstance(kind, PerHead):
            return values[at // kind.head_dim][None, :]
        if isinstance(kind, HeadVector):
            return values[(self._step.first_column + at) % kind.length][None, :]
        if isinstance(kind, Matrix):
            return values[:, self._step.first_column + at]
        assert isinstance(kind, Partials), kind
        total = np.zeros((self._state.rows, 1), np.float32)
        for column in values.T:
            total = total + column[:, None]
        return total

    def _reduce(self, raw: Any, operation: str) -> Any:
        over = self._step.policy.over  # type: ignore[attr-defined]
        combine = NUMPY_OPERATIONS[operation]
        x = np.broadcast_to(np.asarray(raw, np.float32), self._shape)
        return _by_group(x, self._step.domain, over, combine, operation == "max")

    def _store(self, name: str, kind: Operand, raw: Any) -> Any:
        kept = round_to(np.broadcast_to(raw, self._shape), kind.dtype)
        out = self._state.written[self._step.names[name]]
        out[:, self._step.first_column + self._columns] = kept
        return kept

    def _partials(self, name: str, kind: Operand, raw: Any) -> None:
        over = kind.over  # type: ignore[attr-defined]
        out = self._state.written[self._step.names[name]]
        first = self._step.first_column // over
        groups = np.broadcast_to(raw, self._shape)[:, ::over]
        out[:, first : first + groups.shape[1]] = groups

    def _record_max(self, name: str, raw: Any) -> None:
        finite = np.asarray(raw)[np.isfinite(raw)]
        out = self._state.written[self._step.names[name]]
        if finite.size:
            out[0] = max(out[0], finite.max())

    def _count(self, name: str, raw: Any) -> None:
        mask = np.broadcast_to(raw, self._shape)
        self._state.written[self._step.names[name]][0] += int(mask.sum())

    def _placed(self, name: str, kind: Operand) -> Any:
        cells = self._state.written[self._step.names[name]]
        slots = self._state.slots(self._slots_name(kind))
        return ((slots >= 0) & (slots < cells.shape[0] * cells.shape[1]))[:, None]

    def _slots_name(self, kind: Operand) -> str:
        return self._step.names[kind.slots]  # type: ignore[attr-defined]

    def _place(self, name: str, kind: Operand, raw: Any) -> Any:
        assert isinstance(kind, Cells)
        cells = self._state.written[self._step.names[name]]
        live = self._placed(name, kind)[:, 0]
        slots = self._state.slots(self._slots_name(kind))[live]
        kept = round_to(np.broadcast_to(raw, self._shape), kind.dtype)
        heads = kept[live].reshape(len(slots), *cells.shape[2:])
        page, token = np.divmod(slots, cells.shape[1])
        written = torch.from_numpy(np.ascontiguousarray(heads)).to(kind.dtype)
        for i, (p, t) in enumerate(zip(page, token, strict=True)):
            cells[p, t] = written[i]
        return kept


def _by_group(x: np.ndarray, domain: Domain, over: int, combine: Any, largest: bool) -> np.ndarray:
    """Reduce groups of ``over`` columns in the kernel's order: a lane's columns ascending, then (0 + 1) + (2 + 3)."""
    rows, columns = x.shape
    padded = -(-columns // domain.unit) * domain.unit
    identity = -np.inf if largest else 0.0
    wide = np.full((rows, padded), identity, np.float32)
    if domain.halves:
        half, unit = columns // 2, domain.unit // 2
        slots = np.arange(half) // unit * domain.unit + np.arange(half) % unit
        at = np.concatenate([slots, slots + unit])
    else:
        at = np.arange(columns)
    wide[:, at] = x
    units = wide.reshape(rows, padded // domain.unit, domain.unit)
    out = np.empty_like(units)
    for start in range(0, domain.unit, over):
        lanes = []
        for t in range(4):
            slots = [
                s
                for slot, n in domain.groups
                if start <= slot < start + over
                for s in range(slot + n * t, slot + n * t + n)
            ]
            found = units[:, :, slots[0]]
            for s in slots[1:]:
                found = combine(found, units[:, :, s])
            lanes.append(found)
        total = combine(combine(lanes[0], lanes[1]), combine(lanes[2], lanes[3]))
        out[:, :, start : start + over] = total[:, :, None]
    return out.reshape(rows, padded)[:, at]
