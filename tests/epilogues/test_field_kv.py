"""Field failures of rotary embeddings and KV placement that show without a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from epicute.epilogues import Bias, Columns, HeadNorm, PlaceKV, RoPE, Store, compose
from epicute.epilogues import reference as ref
from epicute.epilogues.resolve import resolve
from epicute.errors import ArgumentError
from epicute.gemm.arguments import ArgumentLayout
from epicute.kv import slots_for
from tests.epilogues.model import assert_same, near, noise, wide

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
STYLES = ("half", "interleaved")


def frequencies(rotary: int, base: float = 1e4) -> torch.Tensor:
    return (base ** -(torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)).float()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dim", [128, 256])
def test_kv_01_channels_beyond_rotary_dim_pass_bit_for_bit(dim: int, style: str) -> None:
    """In q, in the returned k and in the cached k; frequencies end where NaN begins."""
    buffer = torch.full((64,), math.nan)
    buffer[:32] = frequencies(64)
    x, cells = noise(3, 2 * dim).to(BF16).float(), torch.zeros(1, 16, 1, dim).to(BF16)
    rope = RoPE(dim, 64, style)
    fused = compose(
        Columns(q=(dim, rope >> Store(BF16)), k=(dim, rope >> PlaceKV(dim) >> Store(BF16)))
    )
    out = fused.evaluate(
        x,
        positions=torch.tensor([0, 1, 2047]),
        inv_freq=buffer[:32],
        slots=torch.arange(3),
        k_cells=cells,
    )
    q, k = x.split(dim, dim=1)
    for name, found, given in (
        ("q", out["q_out"], q),
        ("k", out["k_out"], k),
        ("cached k", out["k_cells"][0, :3, 0], k),
    ):
        assert_same(found[:, 64:], given[:, 64:].to(BF16), name)
        assert found.float().isfinite().all(), name
    assert not torch.equal(out["q_out"][1:, :64], q[1:, :64].to(BF16))


@pytest.mark.parametrize("rows", [1, 7, 512])
@pytest.mark.parametrize("rotary", [64, 128])
def test_kv_02_all_heads_of_a_token_are_alike(rows: int, rotary: int) -> None:
    head, gain = noise(rows, 128), noise(128, seed=2)
    operands = {"positions": torch.arange(rows) * 5, "inv_freq": frequencies(rotary)}
    chain = HeadNorm(128) >> RoPE(128, rotary)
    fused = compose(Columns(q=(16 * 128, chain >> Store(F32)), k=(4 * 128, chain >> Store(F32))))
    out = fused.evaluate(head.repeat(1, 20), **operands, q_head_gain=gain, k_head_gain=gain)
    heads = torch.cat([out["q_out"], out["k_out"]], dim=1).reshape(rows, 20, 128)
    assert_same(heads, heads[:, :1].expand(rows, 20, 128))
    expected = ref.rope(ref.head_norm(head, gain, 128, 1e-6), *operands.values(), 128, rotary)
    near(heads[:, 0], expected, 1e-5 * expected.abs().amax())


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("style", "second"), [("half", None), ("interleaved", 1)])
def test_kv_03_the_pairing_is_the_one_asked_for(dim: int, style: str, second: int | None) -> None:
    x = torch.zeros(1, dim)
    x[0, 0] = 1.0
    out = (RoPE(dim, 0, style) >> Store(F32)).evaluate(
        x, positions=torch.tensor([1]), inv_freq=torch.ones(dim // 2)
    )["out"]
    expected = torch.zeros(1, dim)
    expected[0, 0], expected[0, dim // 2 if second is None else second] = math.cos(1), math.sin(1)
    near(out, expected, 1e-6)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("magnitude", [1.4852, 1.0, 0.1 * math.log(64) + 1, 0.1 * math.log(4) + 1])
def test_kv_05_the_magnitude_is_applied_once(style: str, magnitude: float) -> None:
    """YaRN's factor is the policy's final value: at position 0 the rotation is m times identity."""
    x = noise(4, 256)
    operands = {"positions": torch.zeros(4, dtype=torch.int64), "inv_freq": frequencies(64)}
    out = (RoPE(128, 64, style, magnitude) >> Store(F32)).evaluate(x, **operands)["out"]
    rotated = torch.arange(256) % 128 < 64
    near(out[:, rotated], wide(x)[:, rotated] * magnitude, 1e-6)
    assert_same(out[:, ~rotated], x[:, ~rotated])


def llama3_frequencies(dim: int, factor: float) -> tuple[torch.Tensor, list[int]]:
    """(Llama-3 scaled frequencies in float64, how many pairs are unscaled, blended, divided)."""
    plain = 5e5 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turns = 8192 * plain / (2 * math.pi)
    blend = ((turns - 1.0) / (4.0 - 1.0)).clamp(0.0, 1.0)
    counts = [int((blend == 1).sum()), int(((0 < blend) & (blend < 1)).sum())]
    scaled = blend * plain + (1 - blend) * plain / factor
    return scaled, [*counts, int((blend == 0).sum())]


@pytest.mark.parametrize(
    ("dim", "factor", "bands"), [(128, 8.0, [29, 6, 29]), (64, 32.0, [15, 3, 14])]
)
def test_kv_06_scaled_frequencies_are_used_as_given(
    dim: int, factor: float, bands: list[int]
) -> None:
    """The caller gives the frequencies; the whole table of cosines and sines follows them."""
    scaled, counts = llama3_frequencies(dim, factor)
    assert counts == bands
    positions = torch.tensor([0, 1, 100, 8191, 8192, 20000])
    ones = torch.cat([torch.ones(6, dim // 2), torch.zeros(6, dim // 2)], dim=1)
    out = (RoPE(dim) >> Store(F32)).evaluate(ones, positions=positions, inv_freq=scaled.float())
    angle = (positions[:, None].float() * scaled.float()).double()
    near(out["out"], torch.cat([angle.cos(), angle.sin()], dim=1), 2e-6)
    exact = positions[:, None] * scaled
    assert (angle - exact).abs().max() < 20000 * 2.0**-23


def test_kv_07_angles_and_frequencies_stay_in_float32() -> None:
    """Base 1e6, far positions: within a BF16 ulp, twice, and no frequency in half precision."""
    inv_freq, positions = frequencies(128, 1e6), torch.tensor([4095, 32767, 131071])
    before = inv_freq.clone()
    unit = torch.eye(128)[[0, 5, 63]]
    policy = RoPE(128) >> Store(BF16)
    expected = ref.rope(unit, positions, inv_freq, 128)
    for _ in range(2):
        out = policy.evaluate(unit, positions=positions, inv_freq=inv_freq)["out"]
        near(out, expected, 2.0**-8)
    assert torch.equal(inv_freq, before)
    with pytest.raises(ArgumentError, match="inv_freq: got torch.bfloat16"):
        policy.evaluate(unit, positions=positions, inv_freq=inv_freq.to(BF16))
    with pytest.raises(ArgumentError, match=r"dtypes\['inv_freq'\]"):
        ArgumentLayout.of(resolve(policy, 128), {"inv_freq": BF16})


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("rotary", [128, 64])
def test_kv_09_the_returned_key_is_the_cached_one(style: str, rotary: int) -> None:
    x, cells = noise(22, 4 * 128), torch.zeros(2, 16, 4, 128).to(BF16)
    positions, slots = torch.arange(22) + 300, torch.randperm(32)[:22]
    chain = RoPE(128, rotary, style) >> PlaceKV(128) >> Store(BF16)
    operands = {"positions": positions, "inv_freq": frequencies(rotary)}
    out = chain.evaluate(x, **operands, slots=slots, cells=cells)
    cached = out["cells"].reshape(32, 512)[slots]
    assert_same(out["out"], cached)
    expected = ref.rope(x, *operands.values(), 128, rotary, style)
    near(cached, expected, 2.0**-8 * expected.abs() + 1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_kv_10_negative_and_far_slots_write_nowhere(dtype: torch.dtype) -> None:
    cells = torch.full((8, 16, 1, 64), 7.0).to(dtype)
    slots = torch.full((128,), -1)
    slots[::2] = torch.randperm(128)[:64]
    slots[0], slots[2], slots[4] = 128, 2**40 + 17, -(2**40)
    operands = {"cell_scale": torch.ones(1)} if dtype == FP8 else {}
    x = torch.full((128, 64), 1000.0)
    out = compose(PlaceKV(64, dtype)).evaluate(x, slots=slots, cells=cells, **operands)
    live = slots[(slots >= 0) & (slots < 128)]
    touched = (out["cells"].double() != 7.0).any(3).reshape(128)
    assert set(touched.nonzero()[:, 0].tolist()) == set(live.tolist())
    if dtype == FP8:
        assert int(out["cells_saturated"]) == 64 * len(live), "skipped rows are not counted"


def test_kv_10_slots_are_64_bit() -> None:
    with pytest.raises(ArgumentError, match=r"slots: got torch.int32, expected .*torch.int64"):
        compose(PlaceKV(64)).evaluate(
            noise(2, 64),
            slots=torch.zeros(2, dtype=torch.int32),
            cells=torch.zeros(1, 16, 1, 64).to(BF16),
        )


def test_kv_11_as_many_slots_as_rows() -> None:
    cells = torch.zeros(4, 16, 1, 64).to(BF16)
    with pytest.raises(ArgumentError, match=r"slots: got shape \(40,\), expected .*\(64,\)"):
        compose(PlaceKV(64)).evaluate(noise(64, 64), slots=torch.arange(40), cells=cells)
    padded = torch.cat([torch.arange(40), torch.full((24,), -1)])
    out = compose(PlaceKV(64)).evaluate(noise(64, 64), slots=padded, cells=cells)["cells"]
    assert int((out != 0).any(3).sum()) == 40


def test_kv_12_every_layout_of_a_cache_holds_the_same() -> None:
    pages, size, heads, dim = 3, 16, 2, 64
    x, slots = noise(20, heads * dim), torch.randperm(48)[:20]
    layouts = {
        "NHD": torch.zeros(pages, size, heads, dim),
        "HND": torch.zeros(pages, heads, size, dim).transpose(1, 2),
        "joined": torch.zeros(pages, 2, size, heads, dim).unbind(1)[0],
        "packed": torch.zeros(pages, heads, size, 2 * dim).transpose(1, 2)[..., :dim],
    }
    found = {
        name: compose(PlaceKV(dim)).evaluate(x, slots=slots, cells=view.to(BF16))["cells"]
        for name, view in layouts.items()
    }
    for name, cells in found.items():
        assert_same(cells, found["NHD"], name)


def test_kv_13_one_call_and_one_row_per_call_place_the_same_bytes() -> None:
    x, slots = noise(37, 128, scale=300.0), torch.randperm(48)[:37]
    operands = {"cell_scale": torch.tensor([0.5, 3.0])}
    start = torch.full((3, 16, 2, 64), 7.0).to(FP8)
    policy = compose(PlaceKV(64, FP8))
    whole = policy.evaluate(x, slots=slots, cells=start, **operands)
    running = {"cells": start}
    for m in torch.randperm(37).tolist():
        one = slice(m, m + 1)
        running = policy.evaluate(x[one], slots=slots[one], **operands, **running)
    for name, out in whole.items():
        assert_same(running[name], out, name)


def test_kv_17_the_norm_comes_before_the_rotation() -> None:
    x, gain = noise(6, 3 * 128), 1 + torch.arange(128) / 128
    operands = {"positions": torch.full((6,), 5), "inv_freq": frequencies(128)}
    bias = noise(384, seed=9)
    for before in (compose(), compose(Bias())):
        given = {"bias": bias} if before.policies else {}
        raw = wide(x) + (wide(bias) if before.policies else 0.0)
        chain = before >> HeadNorm(128) >> RoPE(128) >> Store(F32)
        out = chain.evaluate(x, head_gain=gain, **operands, **given)["out"]
        expected = ref.rope(ref.head_norm(raw, gain, 128, 1e-6), *operands.values(), 128)
        near(out, expected, 1e-5)
        other = ref.head_norm(ref.rope(raw, *operands.values(), 128), gain, 128, 1e-6)
        assert (other - expected).norm() > 0.1 * expected.norm()


def test_kv_18_chunks_of_a_prompt_fill_the_cache_alike() -> None:
    """300 tokens in one call, by 37, as 299 + 1 and as 128 + 172: the same bytes."""
    k, table = noise(300, 64), torch.randperm(20)[None, :].int()
    chain = RoPE(64) >> PlaceKV(64)

    def fill(cuts: list[int]) -> torch.Tensor:
        cells = torch.zeros(20, 16, 1, 64).to(BF16)
        for begin, end in zip([0, *cuts], [*cuts, 300], strict=True):
            positions = torch.arange(begin, end)
            slots = slots_for(table, positions, torch.zeros_like(positions), 16)
            rows = {"positions": positions, "inv_freq": frequencies(64), "slots": slots}
            cells = chain.evaluate(k[begin:end], cells=cells, **rows)["cells"]
        return cells

    whole = fill([])
    assert int((whole != 0).any(3).sum()) == 300
    for cuts in (list(range(37, 300, 37)), [299], [128]):
        assert_same(fill(cuts), whole, str(cuts))
