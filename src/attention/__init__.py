"""Attention: one spec, one legality table; prefill kernels for Hopper in ``sm90``."""

from epicute.attention.build import AttentionKernel, kernel_for
from epicute.attention.plan import AttentionPlan, plan_attention
from epicute.attention.schedule import AttentionSchedule, choose
from epicute.attention.spec import LEGALITY, AttentionSpec, unsupported

__all__ = [
    "LEGALITY",
    "AttentionKernel",
    "AttentionPlan",
    "AttentionSchedule",
    "AttentionSpec",
    "choose",
    "kernel_for",
    "plan_attention",
    "unsupported",
]
