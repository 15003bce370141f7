"""Delayed scaling: what is seen now decides the next scale, and nothing else does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from epicute.errors import ArgumentError
from epicute.quant import (
    NOT_RUN,
    SCALE_MAX,
    SCALE_MIN,
    DelayedScale,
    delayed_scale,
    dequantize,
    inverse,
    quantize_tensor,
    reference,
)


def step(state: DelayedScale, x: torch.Tensor | None) -> torch.Tensor | None:
    """One invocation: roll, then quantise; None: the site does not run."""
    state.roll()
    return None if x is None else state.quantize(x)[0].view(torch.uint8)


def of(amax: float, count: int = 8) -> torch.Tensor:
    """A tensor of that amax."""
    return torch.linspace(-1, 1, count) * amax


def bit_equal(a: DelayedScale, b: DelayedScale) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


invocations = st.lists(
    st.none()
    | hnp.arrays(np.uint32, hnp.array_shapes(max_dims=2, max_side=5)).map(
        lambda bits: bits.view(np.float32)
    )
    | hnp.arrays(np.float32, 4, elements=st.floats(-1e4, 1e4, width=32) | st.just(0.0)),
    max_size=12,
)


@given(invocations, st.integers(1, 5), st.integers(0, 4), st.floats(2.0**-8, 2.0**8, width=32))
def test_any_sequence_agrees_with_the_reference(
    sequence: list[np.ndarray | None], history: int, margin: int, initial: float
) -> None:
    state = DelayedScale.create(history=history, margin=margin, initial=initial)
    text = reference.DelayedReference(history, initial, margin)
    for x in sequence:
        state.roll()
        text.roll()
        assert state.scale_used.item() == text.scale
        if x is not None:
            codes, _ = state.quantize(torch.from_numpy(x))
            assert np.array_equal(codes.view(torch.uint8).numpy(), text.quantize(x))
        assert (state.saturated.item(), state.nans.item()) == (text.saturated, text.nans)


@given(invocations, st.integers(1, 4), st.integers(0, 16))
def test_scale_and_history_stay_finite(
    sequence: list[np.ndarray | None], history: int, margin: int
) -> None:
    state = DelayedScale.create(history=history, margin=margin)
    for x in sequence:
        step(state, None if x is None else torch.from_numpy(x))
        assert SCALE_MIN <= state.scale_used.item() <= SCALE_MAX
        assert math.isfinite(inverse(state.scale_used).item())
        assert state.history.isfinite().all()


def test_roll_changes_tensors_in_place_and_no_values_are_read() -> None:
    state = DelayedScale.create(history=4)
    places = {name: tensor.data_ptr() for name, tensor in vars(state).items() if name != "margin"}
    state.quantize(of(3.0))
    # Tensors without memory: whatever reads a value, as .item() and bool() do, raises.
    meta = DelayedScale(
        **{name: getattr(state, name).to("meta") for name in places}, margin=state.margin
    )
    meta.roll()
    state.roll()
    assert {name: getattr(state, name).data_ptr() for name in places} == places
    assert state.amax_next.item() == NOT_RUN


def test_a_scale_is_peak_over_448_times_the_margin() -> None:
    for margin, factor in ((0, 1.0), (1, 2.0), (3, 8.0)):
        state = DelayedScale.create(margin=margin)
        step(state, of(56.0))
        state.roll()
        assert state.scale_used.item() == 0.125 * factor


@pytest.mark.parametrize("amax", [1e-37, 1e-40, 0.0])
def test_df_01_a_tiny_amax_makes_a_finite_scale(amax: float) -> None:
    state = DelayedScale.create(initial=0.5)
    x = of(amax)
    step(state, x)
    codes = step(state, x)
    scale = state.scale_used
    assert 0 < scale.item() < math.inf
    assert math.isfinite(inverse(scale).item())
    assert codes is not None
    back = dequantize(codes.view(torch.float8_e4m3fn), scale)
    assert back.isfinite().all()
    assert (back[x == 0] == 0).all()
    assert (back - x).abs().max() <= scale.item() * 2.0**-9


def test_df_02_a_zero_tensor_keeps_the_scale() -> None:
    zeros, x = torch.zeros(4, 8), of(7.0)
    state, never = DelayedScale.create(initial=0.25), DelayedScale.create(initial=0.25)
    codes = step(state, zeros)  # the very first call, the history empty
    assert codes is not None
    assert (codes == 0).all()
    assert torch.equal(step(state, x), step(never, x))
    state.roll()
    assert state.scale_used.item() == 7 / 448
    # One zeroed row among normal ones changes no other.
    rows = torch.stack([x, torch.zeros(8), -x])
    codes, _ = state.quantize(rows)
    alone, _ = state.quantize(rows[[0, 2]])
    assert torch.equal(codes.view(torch.uint8)[[0, 2]], alone.view(torch.uint8))
    assert (codes.view(torch.uint8)[1] == 0).all()


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_df_02_tensors_of_zeros_are_forgotten_and_nothing_else_is(zero: float) -> None:
    """Idle replays of a captured batch, whose rows are all slack, are such."""
    state = DelayedScale.create(history=3)
    step(state, of(14.0))
    step(state, of(3.0))
    for _ in range(10):
        step(state, torch.full((5,), zero))
    assert state.history.tolist() == [14, 3, 0]
    assert state.cursor.item() == 2
    assert state.scale_used.item() == 14 / 448
    codes, scale = state.quantize(of(14.0))
    assert dequantize(codes, scale)[[0, -1]].tolist() == [-14.0, 14.0]


@pytest.mark.parametrize(("broken", "nans", "saturated"), [(math.nan, 1, 0), (math.inf, 0, 1)])
def test_df_03_a_broken_value_is_counted_and_leaves_no_trace(
    broken: float, nans: int, saturated: int
) -> None:
    state, clean = DelayedScale.create(), DelayedScale.create()
    ones = torch.ones(16)
    bad = ones.clone()
    bad[5] = broken
    step(state, bad)
    step(clean, ones)
    assert (state.nans.item(), state.saturated.item()) == (nans, saturated)
    assert (clean.nans.item(), clean.saturated.item()) == (0, 0)
    assert torch.equal(step(state, ones), step(clean, ones))
    assert torch.equal(state.history, clean.history)
    assert torch.equal(state.scale_used, clean.scale_used)


def test_df_03_a_tensor_without_a_finite_value_is_as_if_it_had_not_come() -> None:
    state, never = DelayedScale.create(), DelayedScale.create()
    for s in (state, never):
        step(s, of(3.0))
    step(state, torch.tensor([math.nan, math.inf]))
    step(never, None)
    assert torch.equal(step(state, of(2.0)), step(never, of(2.0)))
    assert torch.equal(state.history, never.history)
    assert state.nans.item() == 1


@pytest.mark.parametrize("amax", [math.nan, math.inf, -math.inf, -2.0])
def test_df_03_a_maximum_that_is_no_magnitude_is_not_rolled(amax: float) -> None:
    state = DelayedScale.create(initial=0.5)
    state.amax_next.fill_(amax)
    state.roll()
    assert state.scale_used.item() == 0.5
    assert state.history.tolist() == [0.0] * 16
    assert state.cursor.item() == 0
    assert state.amax_next.item() == NOT_RUN


@pytest.mark.parametrize("idle", [None, torch.zeros(0, 32)])
def test_df_04_a_site_that_did_not_run_is_not_rolled(idle: torch.Tensor | None) -> None:
    state = DelayedScale.create(history=4)
    step(state, of(8.0))
    state.roll()
    before = state.state_dict()
    for _ in range(10):
        step(state, idle)
    state.roll()
    after = state.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # The 8 came with roll 0; it leaves with the fourth roll of a real step after it.
    seen = []
    for _ in range(4):
        step(state, of(1.0))
        state.roll()
        seen.append(state.scale_used.item() * 448)
    assert seen == pytest.approx([8.0, 8.0, 8.0, 1.0])


def test_df_06_a_scale_follows_traffic_and_written_codes_keep_theirs() -> None:
    state = DelayedScale.create(history=4)
    warm = of(0.001)
    for _ in range(3):
        step(state, warm)
    codes, scale = state.quantize(warm)
    old = dequantize(codes, scale)
    real = torch.randn(256) * 10
    real[0] = 50
    step(state, real)  # saturates: the scale is that of the warm-up
    assert state.saturated.item() > 0
    state.roll()
    new, new_scale = state.quantize(real)
    assert new_scale.item() == np.float32(np.float32(50) / np.float32(448))
    error = (dequantize(new, new_scale) - real).norm() / real.norm()
    assert error < 0.04
    assert torch.equal(dequantize(codes, scale), old)


def test_df_06_states_used_alternately_do_not_mix() -> None:
    a, b, alone = (DelayedScale.create(history=4) for _ in range(3))
    for i in range(6):
        x = of(1.0 + i / 8)
        mixed = step(a, x)
        step(b, of(400.0))
        assert torch.equal(mixed, step(alone, x))
    assert bit_equal(a, alone)


def test_df_08_a_saved_state_continues_bit_for_bit() -> None:
    state = DelayedScale.create(history=5)
    data = [of(a) for a in (3.0, 9.0, 0.5, 700.0, 2.0, 4.0, 1.0, 8.0, 0.25, 6.0)]
    for x in data[:7]:
        step(state, x)
    saved = state.state_dict()
    again = DelayedScale.create(history=5, initial=99.0)
    again.load_state_dict(saved)
    for x in data[7:] * 2:
        assert torch.equal(step(state, x), step(again, x))
        assert torch.equal(state.scale_used, again.scale_used)
    assert torch.equal(state.saturated, again.saturated)


def test_df_08_a_saved_state_is_a_copy() -> None:
    state = DelayedScale.create()
    saved = state.state_dict()
    step(state, of(900.0))
    state.roll()
    assert saved["scale_used"].item() == 1
    assert saved["history"].sum() == 0
    other = DelayedScale.create()
    other.load_state_dict(saved)
    other.scale_used.fill_(7)
    assert saved["scale_used"].item() == 1


def test_df_08_another_history_length_keeps_the_newest() -> None:
    long = DelayedScale.create(history=16)
    for amax in range(1, 21):
        step(long, of(float(amax)))
    long.roll()
    short = DelayedScale.create(history=4)
    short.load_state_dict(long.state_dict())
    assert sorted(short.history.tolist()) == [17, 18, 19, 20]
    assert torch.equal(short.scale_used, long.scale_used)
    seen = []
    for _ in range(4):  # 17 leaves first, 20 last
        step(short, of(1.0))
        short.roll()
        seen.append(sorted(short.history.tolist()))
    assert seen == [[1, 18, 19, 20], [1, 1, 19, 20], [1, 1, 1, 20], [1, 1, 1, 1]]

    two = DelayedScale.create(history=2).state_dict()
    two |= {"history": torch.tensor([5.0, 3.0]), "cursor": torch.tensor([1])}
    longer = DelayedScale.create(history=6)
    longer.load_state_dict(two)
    assert longer.history.tolist() == [0, 0, 0, 0, 3, 5]
    assert longer.cursor.item() == 0


def test_df_09_a_stale_scale_saturates_and_the_next_is_right() -> None:
    state = DelayedScale.create()
    step(state, of(1.0))
    x = torch.tensor([1000.0, -1000.0, 0.5, math.inf])
    codes = step(state, x)
    assert codes is not None
    back = dequantize(codes.view(torch.float8_e4m3fn), state.scale_used)
    assert back.isfinite().all()
    assert back[:2].tolist() == [1.0, -1.0]
    assert state.saturated.item() == 3
    state.roll()
    assert state.scale_used.item() == np.float32(np.float32(1000) / np.float32(448))


def test_df_10_codes_are_values_over_the_scale() -> None:
    state = DelayedScale.create(initial=0.25)
    codes, scale = state.quantize(torch.tensor([2.0]))
    assert codes.view(torch.uint8).item() == 0x50  # 8.0
    assert scale.item() == 0.25
    assert torch.equal(
        codes.view(torch.uint8), quantize_tensor(torch.tensor([2.0]), scale).view(torch.uint8)
    )


@given(
    st.floats(2.0**-149, 448 * SCALE_MAX, width=32),
    st.integers(0, 16),
    st.integers(1, 3),
    st.data(),
)
def test_what_a_scale_was_chosen_for_does_not_count_as_saturated(
    peak: float, margin: int, history: int, data: st.DataObject
) -> None:
    state = DelayedScale.create(history=history, margin=margin)
    x = torch.tensor([peak, -peak, data.draw(st.floats(-peak, peak, width=32))])
    step(state, x)
    state.reset_counters()
    for _ in range(2):
        step(state, x)
    assert state.saturated.item() == 0


@pytest.mark.parametrize("exponent", [-100, -20, 0, 126])
def test_no_peak_of_any_mantissa_counts_as_saturated(exponent: int) -> None:
    """All of them; the scale is the quotient itself, or one float32 above where that alone would count."""
    bits = torch.arange(2**23, dtype=torch.int32) | (exponent + 127) << 23
    peak = bits.view(torch.float32)
    scale, plain = delayed_scale(peak), peak / torch.full_like(peak, 448.0)
    above = scale.view(torch.int32) - plain.view(torch.int32)
    inside = (plain > SCALE_MIN) & (plain < SCALE_MAX)
    assert (peak * inverse(scale) <= 448)[plain < SCALE_MAX].all()
    assert torch.equal((peak * inverse(plain) > 448)[inside], (above == 1)[inside])
    assert ((above == 0) | (above == 1))[inside].all()
    assert inside.any()


def test_beyond_the_largest_scale_values_are_clipped_and_count() -> None:
    state = DelayedScale.create()
    x = torch.tensor([3e38, 448.0 * SCALE_MAX])
    step(state, x)
    state.reset_counters()
    step(state, x)
    assert state.scale_used.item() == SCALE_MAX
    assert state.saturated.item() == 1


def test_exactly_448_is_no_saturation() -> None:
    state = DelayedScale.create()
    state.quantize(torch.tensor([448.0, -448.0]))
    assert state.saturated.item() == 0
    state.quantize(torch.tensor([float(np.nextafter(np.float32(448), np.float32(449)))]))
    assert state.saturated.item() == 1


def test_several_tensors_of_one_invocation_count_together() -> None:
    state = DelayedScale.create()
    for amax in (3.0, 500.0, 2.0):
        state.quantize(of(amax))
    assert state.amax_next.item() == 500
    state.reset_counters()
    assert (state.saturated.item(), state.nans.item()) == (0, 0)


def test_a_strided_tensor_is_read_as_it_shows() -> None:
    big = torch.full((4, 16), math.nan)
    big[:, ::2] = of(5.0)
    state = DelayedScale.create()
    codes, _ = state.quantize(big[:, ::2])
    assert codes.shape == (4, 8)
    assert state.nans.item() == 0
    assert state.amax_next.item() == 5


@pytest.mark.parametrize(
    ("argument", "given_"),
    [
        ("history", {"history": 0}),
        ("margin", {"margin": -1}),
        ("margin", {"margin": 17}),
        ("initial", {"initial": 0.0}),
        ("initial", {"initial": math.inf}),
        ("initial", {"initial": math.nan}),
        ("initial", {"initial": -1.0}),
        ("initial", {"initial": 1e-38}),
    ],
)
def test_create_refuses_by_name(argument: str, given_: dict) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}"):
        DelayedScale.create(**given_)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scale_used": torch.tensor([math.nan])}, "scale_used"),
        ({"scale_used": torch.tensor([0.0])}, "scale_used"),
        ({"scale_used": torch.tensor([1.0, 2.0])}, "scale_used"),
        ({"amax_next": torch.tensor([1.0]).double()}, "amax_next"),
        ({"cursor": torch.tensor([16])}, "cursor"),
        ({"history": torch.zeros(0)}, "history"),
        ({"scale_inv": torch.tensor([1.0])}, "state"),
    ],
)
def test_broken_states_are_refused(change: dict, named: str) -> None:
    state = DelayedScale.create()
    before = state.state_dict()
    with pytest.raises(ArgumentError, match=named):
        state.load_state_dict(state.state_dict() | change)
    assert all(torch.equal(before[n], getattr(state, n)) for n in before)


def test_states_may_be_views_of_one_stack() -> None:
    """Several sites side by side in one allocation, each rolled as its own."""
    stack = {n: t.repeat(3, 1) for n, t in DelayedScale.create(history=4).state_dict().items()}
    sites = [DelayedScale(**{n: t[i] for n, t in stack.items()}) for i in range(3)]
    single = DelayedScale.create(history=4)
    for x in (of(2.0), of(70.0)):
        step(sites[1], x)
        step(single, x)
    assert bit_equal(sites[1], single)
    assert bit_equal(sites[0], DelayedScale.create(history=4))
