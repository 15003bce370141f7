"""What loads the kernels: an idle launch that fits each of them."""

from __future__ import annotations

from typing import Any

import pytest

from epicute import Target
from epicute.attention import (
    AttentionSpec,
    DecodeSpec,
    MixedSpec,
    plan_attention,
    plan_decode,
    plan_mixed,
)
from epicute.attention.arguments import ARGUMENTS
from epicute.attention.decode_arguments import DECODE_ARGUMENTS
from epicute.attention.launch import Loaded
from epicute.attention.mixed import MIXED_ARGUMENTS

HOPPER = Target("sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize(
    ("make", "spec", "names"),
    [
        (plan_attention, AttentionSpec(8, 2, 64), ARGUMENTS),
        (plan_decode, DecodeSpec(8, 2, 64, page=64), DECODE_ARGUMENTS),
        (plan_mixed, MixedSpec(8, 2, 64, page=128), MIXED_ARGUMENTS),
    ],
    ids=["prefill", "decode", "mixed"],
)
def test_cg_02_an_idle_launch_has_an_argument_for_each(
    make: Any, spec: Any, names: tuple[str, ...]
) -> None:
    plan = make(spec, target=HOPPER)
    assert isinstance(plan._loaded, Loaded)
    found = dict(zip(names, plan._idle(4096), strict=True))
    assert found.get("batch", 0) == 0
    assert found[next(name for name in ("clusters", "ctas") if name in found)] == 1
