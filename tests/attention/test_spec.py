"""What can be asked for, and what is refused with its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute import Target
from epicute.attention import (
    LEGALITY,
    AttentionSchedule,
    AttentionSpec,
    choose,
    kernel_for,
    unsupported,
)
from epicute.attention.spec import HEAD_DIMS, PAGES
from epicute.errors import ArgumentError, UnsupportedError

FP8 = torch.float8_e4m3fn
PLAIN = AttentionSpec(heads=32, kv_heads=8, head_dim=128)
HOPPER = Target("sm_90a")


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """Any spec that makes sense, served or not."""
    kv_heads = draw(st.sampled_from((1, 3, 4, 8, 40)))
    causal = draw(st.booleans())
    return AttentionSpec(
        heads=kv_heads * draw(st.sampled_from((1, 2, 3, 4, 5, 7, 71))),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((32, 64, 72, 80, 96, 128, 192, 256))),
        dtype=draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32))),
        kv_dtype=draw(st.sampled_from((None, torch.bfloat16, torch.float16, FP8))),
        out_dtype=draw(st.sampled_from((None, torch.float16, FP8))),
        causal=causal,
        window=draw(st.sampled_from((None, 1, 128, 4096))),
        softcap=draw(st.sampled_from((None, 30.0))),
        sinks=draw(st.booleans()),
        lse=draw(st.booleans()),
        page=draw(st.sampled_from((None, 1, 8, 16, 32, 64, 128, 256))),
        packed=draw(st.booleans()),
    )


@given(specs())
def test_a_spec_has_a_kernel_or_a_reason(spec: AttentionSpec) -> None:
    reason = unsupported(spec, HOPPER)
    if reason is None:
        kernel = kernel_for(spec, target=HOPPER)
        assert kernel.shared_memory <= HOPPER.smem_per_block
        assert kernel.key.digest
    else:
        assert "got" in reason
        assert "expected" in reason
        with pytest.raises(UnsupportedError, match="LEGALITY"):
            kernel_for(spec, target=HOPPER)


def test_each_rule_refuses_something_and_passes_the_plain_spec() -> None:
    broken = {
        "head_dim": {"head_dim": 72},
        "dtype": {"dtype": torch.float32},
        "kv_dtype": {"kv_dtype": torch.float32},
        "out_dtype": {"out_dtype": torch.float32},
        "page": {"page": 8},
        "window": {"window": 5, "causal": False},
    }
    assert {rule.argument for rule in LEGALITY} == set(broken)
    for rule in LEGALITY:
        assert rule.holds(PLAIN)
    for argument, change in broken.items():
        reason = unsupported(replace(PLAIN, **change))
        assert reason is not None
        assert reason.startswith(argument)


def test_pages_below_sixteen_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"page: got 1, expected one of \(16, 32, 64, 128\)"):
        kernel_for(replace(PLAIN, page=1), target=HOPPER)
    assert all(unsupported(replace(PLAIN, page=page)) is None for page in PAGES)
    assert all(unsupported(replace(PLAIN, head_dim=d)) is None for d in HEAD_DIMS)


def test_another_target_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sm_90a"):
        kernel_for(PLAIN, target=Target("sm_100a"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_heads": 5}, "kv_heads"),
        ({"heads": 0}, "heads"),
        ({"head_dim": 128.0}, "head_dim"),
        ({"window": 0}, "window"),
        ({"window": -1}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": -1.0}, "scale"),
        ({"causal": 1}, "causal"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(change: dict[str, object], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        replace(PLAIN, **change)  # type: ignore[arg-type]


def test_defaults() -> None:
    assert (PLAIN.kv_dtype, PLAIN.out_dtype) == (torch.bfloat16, torch.bfloat16)
    assert PLAIN.scale == 128**-0.5
    assert AttentionSpec(9, 3, 64, dtype=torch.float16).out_dtype == torch.float16
    assert choose(PLAIN).cluster == 2
    assert choose(replace(PLAIN, heads=24)).cluster == 1  # three heads to a KV head


def test_every_field_is_in_the_key() -> None:
    changes: dict[str, object] = {
        "heads": 16,
        "kv_heads": 4,
        "head_dim": 64,
        "dtype": torch.float16,
        "kv_dtype": FP8,
        "out_dtype": FP8,
        "causal": False,
        "window": 7,
        "softcap": 5.0,
        "sinks": True,
        "lse": True,
        "page": 16,
        "packed": False,
        "scale": 1.0,
    }
    digests = {kernel_for(PLAIN, target=HOPPER).key.digest}
    for name, value in changes.items():
        spec = replace(PLAIN, **{name: value})  # type: ignore[arg-type]
        if unsupported(spec) is None:
            digests.add(kernel_for(spec, target=HOPPER).key.digest)
    kept = [n for n, x in changes.items() if unsupported(replace(PLAIN, **{n: x})) is None]  # type: ignore[arg-type]
    assert len(digests) == len(kept) + 1
    assert len(kept) >= len(changes) - 1


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("tile_n", [64, 96, 128, 160, 176])
def test_a_cta_loads_whole_pages_or_parts_that_divide_one(
    page: int, cluster: int, tile_n: int
) -> None:
    """A box must not reach from one page into the next, which lies elsewhere."""
    spec = replace(PLAIN, head_dim=64, scale=None, page=page)
    schedule = AttentionSchedule(tile_n=tile_n, cluster=cluster)
    rows = tile_n // cluster
    box = min(page, rows)
    if rows % box == 0 and page % box == 0:
        schedule.check(spec)
    else:
        with pytest.raises(ArgumentError, match="tile_n"):
            schedule.check(spec)
