"""How a composition looks when printed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from epicute.epilogues.policy import Pairwise, Policy

if TYPE_CHECKING:
    from epicute.epilogues.composition import Composition

__all__ = ["draw"]


def _operands(policy: Policy, prefix: str) -> str:
    from epicute.epilogues.composition import bound_name

    names = {n: bound_name(policy, n, kind, prefix) for n, kind in policy.operands.items()}
    read = [names[n] for n, k in policy.operands.items() if not k.written]
    written = [names[n] for n, k in policy.operands.items() if k.written]
    arrow = f" → {', '.join(written)}" if written else ""
    text = f"{', '.join(read)}{arrow}".strip()
    return f"    {text}" if text else ""


def _chain(
    policies: tuple[Policy, ...], indent: str, last: bool, prefix: str = ""
) -> Iterator[str]:
    for i, policy in enumerate(policies):
        branch = "└─" if last and i == len(policies) - 1 else "├─"
        halves = "    columns: n → n/2" if isinstance(policy, Pairwise) and policy.consumes else ""
        yield f"{indent}{branch} {policy}{_operands(policy, prefix)}{halves}"


def draw(composition: Composition) -> str:
    """One line per policy: fields, operands read → operands written."""
    columns = composition.columns
    width = f"N = {columns.width}" if columns else "N"
    lines = [f"acc (M, {width})", *_chain(composition.policies, " ", columns is None)]
    start = 0
    for i, (name, count, chain) in enumerate(columns.ranges if columns else ()):
        last = columns is not None and i == len(columns.ranges) - 1
        lines.append(f" {'└' if last else '├'}─ {name}: columns {start} to {start + count - 1}")
        lines += _chain(chain.policies, "     " if last else " │   ", True, name)
        start += count
    return "\n".join(lines)
