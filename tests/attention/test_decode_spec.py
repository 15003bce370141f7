"""Specs and schedules of decode attention: what is refused, with its reason, and what fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute import Target
from epicute.attention.decode_build import decode_kernel_for
from epicute.attention.decode_schedule import SHARED, SMEM, DecodeSchedule, choose_decode
from epicute.attention.decode_spec import CACHES, DecodeSpec, decode_unsupported
from epicute.attention.spec import HEAD_DIMS, PAGES
from epicute.errors import ArgumentError, UnsupportedError
from epicute.jit import DEFAULT_TARGET
from tests.attention.decode_specs import FP8, SPECS

SPEC = SPECS["int4"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"head_dim": 72}, "head_dim"),
        ({"head_dim": 256}, "64 or 128 for an INT4 cache"),
        ({"cache": "int8", "rotation": 0, "append": False}, "cache"),
        ({"cache": "fp16", "rotation": 0, "append": False}, "the dtype of q"),
        ({"cache": "bf16", "append": False}, "rotation"),
        ({"cache": "fp8", "rotation": 0}, "append"),
        ({"dtype": torch.float32}, "dtype"),
        ({"out_dtype": torch.float16}, "out_dtype"),
        ({"rows": 9}, "rows"),
        ({"page": 48}, "page"),
        ({"page": 256}, "page"),
        ({"rotation": 48}, "rotation"),
        ({"rotation": 256}, "rotation"),
        ({"rotation": 0, "values_folded": True}, "values_folded"),
    ],
)
def test_what_has_no_kernel_is_refused_with_its_reason(changes: dict[str, Any], word: str) -> None:
    spec = replace(SPEC, **changes)
    reason = decode_unsupported(spec)
    assert reason is not None
    assert word in reason
    with pytest.raises(UnsupportedError, match="DECODE_LEGALITY"):
        decode_kernel_for(spec, target=DEFAULT_TARGET)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 0},
        {"kv_heads": 5},
        {"rows": 0},
        {"rows": 1.0},
        {"window": 0},
        {"softcap": -1.0},
        {"scale": float("inf")},
        {"sinks": 1},
        {"rotation": -1},
        {"batch_invariant": None},
    ],
)
def test_what_makes_no_sense_is_refused_at_once(changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"got .*expected .*Fix: "):
        replace(SPEC, **changes)


def test_blackwell_is_refused() -> None:
    assert "sm_90a" in str(decode_unsupported(SPEC, Target("sm_100a")))


def test_defaults() -> None:
    assert SPEC.rotation == 128
    assert SPEC.append
    assert DecodeSpec(32, 8, 80).rotation == 0
    assert not DecodeSpec(32, 8, 80).append
    assert SPEC.token_bytes == 136
    assert DecodeSpec(32, 8, 128).token_bytes == 512


@pytest.mark.parametrize(("heads", "kv_heads"), [(h * g, h) for h in (1, 8) for g in range(1, 18)])
def test_kd_08_any_ratio_has_a_schedule(heads: int, kv_heads: int) -> None:
    for cache, head_dim, page, rows in product(CACHES, HEAD_DIMS, (None, *PAGES), (1, 5, 8)):
        dtype = torch.float16 if cache == "fp16" else torch.bfloat16
        spec = DecodeSpec(heads, kv_heads, head_dim, cache, dtype, rows=rows, page=page)
        if decode_unsupported(spec) is None:
            found = choose_decode(spec)
            found.check(spec)
            columns = found.columns(spec)
            assert columns * found.blocks(spec) >= spec.columns
            assert found.groups(spec) * found.sharers(spec) == found.warps


def test_two_kernels_of_a_chain_fit_on_an_sm() -> None:
    for cache, group in product(("bf16", "fp8", "int4"), (1, 4, 8)):
        spec = DecodeSpec(8 * group, 8, 128, cache, page=64)
        assert choose_decode(spec).shared_memory(spec) <= SHARED


@given(
    st.sampled_from(list(SPECS.values())),
    st.sampled_from((32, 64, 128)),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 16),
    st.sampled_from(("arithmetic", "table")),
)
def test_a_schedule_fits_or_is_refused(
    spec: DecodeSpec, tile: int, warps: int, stages: int, unpack: str
) -> None:
    found = DecodeSchedule(tile, warps, stages, 2 * tile, unpack)
    try:
        found.check(spec)
    except ArgumentError:
        return
    assert found.shared_memory(spec) <= SMEM
    assert tile // 16 % found.sharers(spec) == 0
    assert found.merge_tiles(spec) * 16 <= max(spec.head_dim, 64)


def test_registers_are_not_traded_where_two_ctas_share_an_sm() -> None:
    """One CTA takes all there are: warps of two would wait for theirs forever."""
    spec = DecodeSpec(17, 1, 128, "int4", page=128)
    shared = DecodeSchedule(tile=128, warps=8, stages=2, resident=2, carveout=100)
    assert shared.trades(spec)
    with pytest.raises(ArgumentError, match="resident"):
        shared.check(spec)
    replace(shared, resident=1).check(spec)
    replace(shared, warps=4).check(spec)


def test_schedules_that_are_none() -> None:
    for changes in ({"tile": 48}, {"warps": 3}, {"stages": 0}, {"part": 100}, {"unpack": "fma"}):
        with pytest.raises(ArgumentError):
            replace(DecodeSchedule(), **changes)  # type: ignore[arg-type]


def test_a_key_names_what_decides_the_code() -> None:
    one = decode_kernel_for(SPEC, target=DEFAULT_TARGET)
    assert one.key.digest == decode_kernel_for(replace(SPEC), target=DEFAULT_TARGET).key.digest
    others = [
        replace(SPEC, page=16),
        replace(SPEC, rotation=64),
        replace(SPEC, append=False),
        replace(SPEC, batch_invariant=True),
        replace(SPEC, out_dtype=FP8),
    ]
    digests = {decode_kernel_for(s, target=DEFAULT_TARGET).key.digest for s in others}
    assert one.key.digest not in digests
    assert len(digests) == len(others)
    assert one.name == "epicute_decode_int4_128_4x1"
    assert "decode 32:8 heads of 128, int4 cache" in str(SPEC)
