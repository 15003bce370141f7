"""Which order of columns a chain of policies demands, and what therefore cannot follow what."""

from __future__ import annotations

from dataclasses import dataclass

from epicute.epilogues.operands import check_declared, heads_of
from epicute.epilogues.policy import Pairwise, Policy
from epicute.errors import CompositionError, require

__all__ = ["Form"]


@dataclass(frozen=True)
class Form:
    """How a chain wants its columns: which order, and who decided.

    ``kind`` is None until a policy decides, then ``halves`` or ``heads``.
    """

    kind: str | None = None
    head_dim: int = 0
    rotary_dim: int = 0
    decided_by: str = ""
    consumed_by: str = ""

    def after(self, policy: Policy) -> Form:
        """The form once ``policy`` stands at the end; refuses what cannot stand there."""
        check_declared(policy.title, policy.operands, getattr(policy, "over", 0))
        heads = heads_of(policy.operands)
        if isinstance(policy, Pairwise):
            require(
                not heads,
                f"{policy.title}",
                f"an operand for each head of {heads} columns in a pairwise policy",
                "operands of pairs: RowVector, ColumnVector, HeadVector, Scalar",
                "put it in a policy of its own",
                CompositionError,
            )
        if isinstance(policy, Pairwise) and policy.consumes:
            return self._consumed(policy)
        require(
            not heads or policy.head_dim in (0, heads),
            f"{policy.title}",
            f"head_dim {policy.head_dim} and an operand for heads of {heads}",
            "one head dimension in a policy",
            "give both the same head_dim",
            CompositionError,
        )
        if policy.head_dim or heads:
            rotates = isinstance(policy, Pairwise) and policy.pairs == "halves"
            head_dim = policy.head_dim or heads
            return self._heads(policy, head_dim, policy.rotary_dim if rotates else 0)
        if isinstance(policy, Pairwise):
            raise CompositionError(
                f"{policy.title}: got pairs that are kept outside heads, expected heads. "
                "Fix: give head_dim, or consume the pair by returning one value"
            )
        return self

    def _consumed(self, policy: Pairwise) -> Form:
        require(
            policy.pairs == "halves" and not policy.head_dim,
            f"{policy.title}",
            "a pair consumed inside heads or interleaved",
            "halves of the whole stream",
            "return both values, or pair halves",
            CompositionError,
        )
        require(
            not self.consumed_by,
            f"{self.consumed_by} >> {policy.title}",
            "a second pairwise policy after the pair is consumed",
            "one",
            f"drop {policy.title}, or put it in a projection of its own",
            CompositionError,
        )
        require(
            self.kind is None,
            f"{self.decided_by} >> {policy.title}",
            "a pair of halves after heads were formed",
            "no head-wide policy before it",
            f"drop {self.decided_by}",
            CompositionError,
        )
        return Form("halves", decided_by=policy.title, consumed_by=policy.title)

    def _heads(self, policy: Policy, head_dim: int, rotary_dim: int) -> Form:
        require(
            self.kind != "halves",
            f"{self.decided_by} >> {policy.title}",
            "a head-wide policy on halves of a stream",
            "whole heads",
            f"put {policy.title} in a chain without {self.decided_by}",
            CompositionError,
        )
        require(
            self.head_dim in (0, head_dim),
            f"{self.decided_by} >> {policy.title}",
            f"heads of {self.head_dim} and of {head_dim}",
            "one head dimension in a chain",
            "give both the same head_dim",
            CompositionError,
        )
        require(
            not rotary_dim or self.rotary_dim in (0, rotary_dim),
            f"{self.decided_by} >> {policy.title}",
            f"rotary dimensions {self.rotary_dim} and {rotary_dim}",
            "one pairing in a chain",
            "give both the same rotary_dim",
            CompositionError,
        )
        decided = self.decided_by or policy.title
        return Form("heads", head_dim, rotary_dim or self.rotary_dim, decided)
