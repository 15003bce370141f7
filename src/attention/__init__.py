"""Attention: one spec, one legality table; prefill kernels for Hopper in ``sm90``."""

from epicute.attention.build import AttentionKernel, kernel_for
from epicute.attention.decode import DecodePlan, DecodeWorkspace, plan_decode
from epicute.attention.decode_build import DecodeKernel, decode_kernel_for
from epicute.attention.decode_schedule import DecodeSchedule, choose_decode
from epicute.attention.decode_spec import DECODE_LEGALITY, DecodeSpec, decode_unsupported
from epicute.attention.mixed import MixedSchedule, MixedSpec, choose_mixed, mixed_kernel_for
from epicute.attention.mixed_plan import MixedPlan, plan_mixed
from epicute.attention.plan import AttentionPlan, plan_attention
from epicute.attention.schedule import AttentionSchedule, choose
from epicute.attention.spec import LEGALITY, AttentionSpec, unsupported

__all__ = [
    "DECODE_LEGALITY",
    "LEGALITY",
    "AttentionKernel",
    "AttentionPlan",
    "AttentionSchedule",
    "AttentionSpec",
    "DecodeKernel",
    "DecodePlan",
    "DecodeSchedule",
    "DecodeSpec",
    "DecodeWorkspace",
    "MixedPlan",
    "MixedSchedule",
    "MixedSpec",
    "choose",
    "choose_decode",
    "choose_mixed",
    "decode_kernel_for",
    "decode_unsupported",
    "kernel_for",
    "mixed_kernel_for",
    "plan_attention",
    "plan_decode",
    "plan_mixed",
    "unsupported",
]
