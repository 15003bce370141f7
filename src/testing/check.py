"""``check``: property-test a policy or a composition against reference math.

    def reference(x, cap_values):                 # float64 tensors, operands by name
        return cap_values * torch.tanh(x / cap_values)

    check(soft_cap(), reference)                  # CPU: the NumPy interpreter
    check(soft_cap(), reference, device="cuda")   # the fused kernel as well

Accumulators and operands are drawn by hypothesis according to the operands' kinds; the failing case
that is reported is the smallest it found. Needs ``hypothesis`` (extra ``test``).
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from epicute.epilogues import (
    Composition,
    Counter,
    Maximum,
    Operand,
    Output,
    PartialsOutput,
    Policy,
    RowScale,
    Store,
    compose,
)
from epicute.epilogues.reference import E4M3_MAX, round_to
from epicute.errors import ArgumentError, EpicuteError, UnsupportedError, require
from epicute.testing.budgets import Budget, Errors, assert_within, float64, ulp

if TYPE_CHECKING:
    from epicute.testing.draws import Case, Ranges

__all__ = ["ARITHMETIC", "Summary", "check"]

ARITHMETIC = 1e-5
"""Relative FP32 error a body is allowed beside its storage rounding."""

Reference = Callable[..., Any]


@dataclass
class Summary:
    """What ``check`` saw: the number of cases, and for every output the worst errors among them."""

    title: str
    cases: int = 0
    worst: dict[str, Errors] = field(default_factory=dict)

    def note(self, name: str, errors: Errors) -> None:
        """Keep the worse of ``errors`` and what is known."""
        known = self.worst.get(name)
        if known is None or errors.worst_row > known.worst_row:
            self.worst[name] = errors

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.cases} cases"]
        lines += [f"  {name}: worst {errors}" for name, errors in self.worst.items()]
        return "\n".join(lines)


def check(
    policy: Policy | Composition,
    reference: Reference,
    *,
    examples: int = 100,
    columns: int | Sequence[int] | None = None,
    budget: Budget | Mapping[str, Budget] | None = None,
    ranges: Ranges | None = None,
    device: str | torch.device = "cpu",
) -> Summary:
    """Compare ``policy`` with ``reference`` on drawn cases; raise with the smallest failing one.

    Args:
        policy: a policy, or a composition. One that writes nothing gets a float32 ``Store`` at its
            end.
        reference: ``reference(acc, **operands)``: acc (M, N) and floating operands as float64
            tensors, integers as they are, under the names ``run`` binds. It may leave out outputs'
            start values (``Maximum``, ``Counter``, ``Cells``) but must name every operand that is
            read. Returns values before storage rounding: one tensor where one output is written,
            otherwise a dict with every output's name.
        examples: cases to draw.
        columns: N, or several to draw from; by default what the composition accepts out of 8 to 320.
            M is drawn from 0 on.
        budget: allowed errors, for all outputs or by name. By default a rounding to the output's
            dtype, ``ARITHMETIC`` relative and a few FP32 ulps of the largest operand absolute;
            counters must be equal.
        ranges: what values are drawn from.
        device: a CUDA device also runs the fused kernel, on accumulators it reproduces exactly (a
            product with the identity, so finite BF16 values), into poisoned and guarded outputs.

    Returns:
        A summary, printed as well.

    Raises:
        AssertionError: a case outside the budget, with the output, the worst row and the case.
        ArgumentError: the reference's parameters or results do not fit the operands, it raised on a
            case, or ``ranges`` names an operand that there is not.
        UnsupportedError: a CUDA device where there is none, or no hypothesis.
    """
    require_hypothesis("check")
    import hypothesis

    from epicute.testing import draws

    composition = _with_sink(policy)
    on_device = _on_device(device)
    ranges = ranges or draws.Ranges()
    draws.check_ranges(composition, ranges)
    if on_device:
        ranges = replace(ranges, exact=True, non_finite=False)
    depth = _depth(composition) if on_device else None
    widths = _within(draws.legal_columns(composition, columns, on_device, depth), depth)
    runners: list[Runner] = [_Interpreter(composition)]
    if on_device:
        from epicute.testing.fused import FusedRunner

        runners.append(FusedRunner(composition, torch.device(device), depth))
    call = _bind_reference(reference, composition)
    title = policy.title if isinstance(policy, Policy) else "composition"
    summary = Summary(title)

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,  # one error, of the documented type, and not a group of them
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[p for p in hypothesis.Phase if p.name != "explain"],
    )
    @hypothesis.given(case=draws.cases(composition, widths, ranges))
    def every_case(case: Case) -> None:
        summary.cases += 1
        expected = call(case)
        for runner in runners:
            _compare(runner, composition, case, expected, budget, summary)

    every_case()
    print(summary)
    return summary


def _depth(composition: Composition) -> int | None:
    """The K that a composition asks for: the width of its ``RowScale``, None where it has none."""
    policies = (policy for *_, chain in composition.branches() for policy in chain)
    return next((p.width for p in policies if isinstance(p, RowScale)), None)


def _within(widths: list[int], depth: int | None) -> list[int]:
    """Of ``widths`` those of at most ``depth`` columns, which a product with the identity of that K reproduces."""
    found = [n for n in widths if depth is None or n <= depth]
    require(
        bool(found),
        "columns",
        widths,
        f"on a GPU at most {depth}, the width of RowScale, as the weight is an identity of that K",
        f"pass columns of at most {depth}, or a wider RowScale",
    )
    return found


def require_hypothesis(asked: str) -> None:
    """Refuse ``asked`` where hypothesis is not installed."""
    require(
        importlib.util.find_spec("hypothesis") is not None,
        f"epicute.testing.{asked}",
        "no hypothesis, which draws the cases",
        "the extra test",
        "pip install -e '.[test]' in the checkout, or pip install hypothesis",
        UnsupportedError,
    )


def _on_device(device: str | torch.device) -> bool:
    """Whether the fused kernel runs as well; refuses a device that it cannot run on."""
    name = str(device)
    require(
        name == "cpu" or name.partition(":")[0] == "cuda",
        "device",
        repr(name),
        "'cpu', 'cuda' or 'cuda:0' and so on",
        "name a CUDA device, or leave it out",
    )
    require(
        name == "cpu" or torch.cuda.is_available(),
        "device",
        repr(name),
        "a GPU that torch can use, and here is none",
        "leave device out; the NumPy interpreter runs the same bodies",
        UnsupportedError,
    )
    return name != "cpu"


class Runner:
    """Something that turns a case into outputs by name."""

    name = ""

    def run(self, case: Case) -> dict[str, torch.Tensor]:
        """Outputs of the case, on any device."""
        raise NotImplementedError


class _Interpreter(Runner):
    name = "NumPy interpreter"

    def __init__(self, composition: Composition) -> None:
        self._composition = composition

    def run(self, case: Case) -> dict[str, torch.Tensor]:
        return self._composition.evaluate(case.acc, **case.operands)


def _with_sink(policy: Policy | Composition) -> Composition:
    composition = compose(policy)
    writes = [chain[-1].writes for _, _, chain in composition.branches() if chain]
    if composition.columns is None and not all(writes):
        return composition >> Store(torch.float32)
    return composition


def _written(composition: Composition) -> dict[str, Operand]:
    return {name: kind for name, kind in composition.operands.items() if kind.written}


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64) if x.dtype.is_floating_point else x


def _bind_reference(
    reference: Reference, composition: Composition
) -> Callable[[Case], dict[str, Any]]:
    """The reference as a function of a case, its parameters checked against the operands."""
    read = [name for name, kind in composition.operands.items() if not kind.written]
    starts = [
        name
        for name, kind in _written(composition).items()
        if not isinstance(kind, Output | PartialsOutput)
    ]
    try:
        parameters = list(inspect.signature(reference).parameters.values())
    except (TypeError, ValueError):  # torch.tanh and its like have no signature
        parameters = []
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    given = [n for n in (*read, *starts) if takes_all or n in named[1:] or n in read]
    optional = {p.name for p in parameters if p.default is not p.empty}
    unknown = [n for n in named[1:] if n not in given and n not in optional]
    missing = [n for n in read if not takes_all and n not in named]
    require(
        not unknown and not missing,
        "reference",
        f"parameters ({', '.join(named)})",
        f"the accumulator, then {', '.join(read) or 'nothing'}"
        + (f", and if wanted {', '.join(starts)}" if starts else ""),
        "name the operands as the composition binds them",
    )
    outputs = list(_written(composition))

    def call(case: Case) -> dict[str, Any]:
        operands = {name: _wide(case.operands[name]) for name in given}
        found = _asked(reference, case, operands)
        if not isinstance(found, Mapping):
            require(
                len(outputs) == 1,
                "reference",
                "one result",
                f"a dict with {', '.join(outputs)}",
                "return every output by name",
            )
            found = {outputs[0]: found}
        require(
            set(found) == set(outputs),
            "reference",
            f"results {', '.join(found) or 'none'}",
            ", ".join(outputs),
            "return every output by name",
        )
        return dict(found)

    return call


def _asked(reference: Reference, case: Case, operands: Mapping[str, torch.Tensor]) -> Any:
    """What the reference makes of a case; what it raises is told as the reference's."""
    from hypothesis.errors import HypothesisException

    try:
        return reference(case.acc.to(torch.float64), **operands)
    except (EpicuteError, HypothesisException):
        raise
    except Exception as error:
        rows, columns = case.acc.shape
        empty = "M = 0 is drawn too, where reshape cannot infer -1: name every dimension of it, or "
        raise ArgumentError(
            f"reference: got {type(error).__name__}: {' '.join(str(error).split())} on acc of shape "
            f"({rows}, {columns}), expected values for any number of rows and every N that is drawn. "
            f"Fix: {'' if rows else empty}pass columns=[…] with the N it is written for"
        ) from error


def _reference_result(name: str, given: Any, shape: tuple[int, ...]) -> np.ndarray:
    """float64 array of what the reference returned for an output of ``shape``."""
    came = "None" if given is None else f"{type(given).__name__}"
    values = None
    if given is not None:
        try:
            values = float64(given)
            came = f"shape {values.shape}"
        except (TypeError, ValueError):
            values = None
    fits = values is not None and (values.shape == shape or values.size == 1 == math.prod(shape))
    require(
        fits,
        f"reference: {name}",
        came,
        f"a tensor of shape {shape}",
        f"return {name} with that shape, before storage rounding",
    )
    assert values is not None
    return values.reshape(shape)


def _in_range(expected: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The reference where ``dtype`` can hold it, otherwise what a store makes of it."""
    if dtype == torch.float8_e4m3fn:
        return np.clip(expected, -E4M3_MAX, E4M3_MAX)
    if not dtype.is_floating_point:
        return expected
    stored = float64(round_to(expected, dtype))
    return np.where(np.isinf(stored), stored, expected)


def _default_budget(kind: Operand, expected: np.ndarray, case: Case) -> Budget:
    """A rounding to the output's dtype, ``ARITHMETIC``, and an absolute term for rows that cancel
    or are subnormal.
    """
    if isinstance(kind, Counter):
        return Budget(0.0, 0.0)
    dtype = torch.float32 if isinstance(kind, Maximum | PartialsOutput) else kind.dtype
    half = float(ulp(1.0, dtype)) / 2
    row = (0.0 if dtype == torch.float32 else half) + ARITHMETIC
    magnitudes = [case.acc, *(x for x in case.operands.values() if x.dtype.is_floating_point)]
    largest = 1.0
    for values in (*map(float64, magnitudes), expected):
        finite = np.abs(values[np.isfinite(values)])
        largest = max(largest, float(finite.max(initial=0.0)))
    width = expected.shape[-1] if expected.ndim else 1
    absolute = width**0.5 * (4 * 2.0**-24 * largest + float(ulp(0.0, dtype)) / 2)
    rows = expected.size // max(width, 1)
    return Budget(norm=row * (1 + rows) ** 0.5, worst_row=row, floor=absolute / row)


def _compare(
    runner: Runner,
    composition: Composition,
    case: Case,
    expected: Mapping[str, Any],
    budget: Budget | Mapping[str, Budget] | None,
    summary: Summary,
) -> None:
    outputs = runner.run(case)
    for name, kind in _written(composition).items():
        out = float64(outputs[name])
        ref = _in_range(_reference_result(name, expected[name], out.shape), kind.dtype)
        chosen = budget.get(name) if isinstance(budget, Mapping) else budget
        allowed = chosen or _default_budget(kind, ref, case)
        label = f"{summary.title}: {name} ({runner.name})"
        try:
            summary.note(name, assert_within(out, ref, allowed, label))
        except AssertionError as error:
            raise AssertionError(f"{error}\n  case       {case!r}") from None
