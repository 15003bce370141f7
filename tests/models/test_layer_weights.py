"""A layer from a checkpoint: what is packed, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from epicute.errors import ArgumentError, UnsupportedError
from epicute.models import LayerShape
from epicute.models.block_spec import PROJECTIONS, BlockSpec
from epicute.models.layer_weights import PARTS, LayerWeights
from epicute.testing import assert_equal_bits, inputs_unchanged
from epicute.weights import Quantized
from tests.models.layers import FP8, TINY, state_of

PREFIX = "model.layers.3."
SPEC = BlockSpec(TINY, bias=True, qk_norm=True)
PLAIN = BlockSpec(TINY)


def built(spec: BlockSpec, **changes: torch.Tensor | None) -> LayerWeights:
    """From a checkpoint in which names were changed or, with None, left out."""
    state = state_of(spec, prefix=PREFIX)
    for name, value in changes.items():
        if value is None:
            del state[PREFIX + name]
        else:
            state[PREFIX + name] = value
    return LayerWeights.build(state, spec, PREFIX)


def fp8_state(gain: float = 1.0, **scales: float) -> dict[str, torch.Tensor]:
    """A layer of FP8 ones: each projection has one scale for its tensor, 1 where it is not given."""
    state = state_of(PLAIN)
    for name in [n for n in state if n.endswith("proj.weight")]:
        part = name.split(".")[1]
        state[name] = torch.ones(state[name].shape).to(FP8)
        state[f"{name}_scale"] = torch.tensor(scales.get(part, 1.0))
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        state[name] = torch.full_like(state[name], gain)
    return state


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_every_projection_holds_its_shards_with_the_gain(format: str, offset: float) -> None:
    spec = BlockSpec(TINY, format, cache=FP8, gain_offset=offset, bias=True, qk_norm=True)
    state = state_of(spec, prefix=PREFIX)
    with inputs_unchanged(**state):
        weights = LayerWeights.build(state, spec, PREFIX)
    for name in PROJECTIONS:
        rows = torch.cat([state[f"{PREFIX}{part}.weight"] for part in PARTS[name]]).double()
        norm = {"qkv": "input_layernorm", "gate_up": "post_attention_layernorm"}.get(name)
        if norm:
            rows = rows * (state[f"{PREFIX}{norm}.weight"].double() + offset)
        found = getattr(weights, name).unpack().dequantize().double()
        step = {"bf16": 2.0**-8, "fp16": 2.0**-10, "fp8": 2.0**-3}[format]
        assert ((found - rows).abs() <= step * rows.abs() + 1e-3 * rows.abs().amax(1, True)).all()
    names = [f"{PREFIX}self_attn.{n}_proj.bias" for n in "qkv"]
    assert_equal_bits(weights.bias, torch.cat([state[n].float() for n in names]))
    for name in "qk":
        gain = state[f"{PREFIX}self_attn.{name}_norm.weight"].float() + offset
        assert_equal_bits(getattr(weights, f"{name}_gain"), gain)


def test_each_output_feature_has_its_own_scale() -> None:
    """That of its folded row: amax / 448."""
    weights = built(PLAIN)
    state = state_of(PLAIN, prefix=PREFIX)
    rows = torch.cat([state[f"{PREFIX}{part}.weight"].float() for part in PARTS["qkv"]])
    rows = rows * state[f"{PREFIX}input_layernorm.weight"].float()
    assert_equal_bits(weights.qkv.scale, rows.abs().amax(1) / 448)


def test_ge_05_shards_keep_their_own_scales() -> None:
    """Codes of 1 in all of q, k and v, with scales 1, 0.01 and 100, as FP8 checkpoints have them."""
    state = fp8_state(q_proj=1.0, k_proj=0.01, v_proj=100.0, up_proj=2.14)
    weights = LayerWeights.build(state, PLAIN)
    q, k = TINY.q_width, TINY.kv_width
    scale = weights.qkv.scale
    assert scale.tolist() == pytest.approx([1.0] * q + [0.01] * k + [100.0] * k)
    wide = TINY.intermediate
    assert weights.gate_up.scale.tolist() == pytest.approx([1.0] * wide + [2.14] * wide)
    composition = PLAIN.compositions["gate_up"]
    x = torch.ones(4, TINY.hidden)
    found = composition.evaluate(
        x @ weights.gate_up.unpack().codes.float().T,
        scale=1 / TINY.hidden,
        weight_scale=weights.gate_up.scale,
        sumsq=torch.ones(4, PLAIN.partials) * TINY.hidden / PLAIN.partials,
        out_scale=2.0**-7,
    )
    wanted = torch.sigmoid(torch.tensor(1.0)) * 2.14
    decoded = found["out_fp8"].float() * 2.0**-7
    assert (decoded - wanted).abs().max() <= wanted / 16
    assert float(found["amax"]) == pytest.approx(float(wanted), rel=1e-4)


def test_ge_05_the_same_codes_stay_where_no_gain_is_folded() -> None:
    state = fp8_state(o_proj=0.5)
    weights = LayerWeights.build(state, PLAIN)
    codes = weights.o.unpack()
    assert isinstance(codes, Quantized)
    assert_equal_bits(codes.codes, state["self_attn.o_proj.weight"])
    assert (codes.scale == 0.5).all()


def test_an_fp8_weight_whose_gain_is_to_be_folded_is_refused_or_decoded() -> None:
    state = fp8_state(gain=2.0)
    with pytest.raises(ArgumentError, match="q_proj.weight: got fp8 codes, quantised before"):
        LayerWeights.build(state, PLAIN)
    weights = LayerWeights.build(state, PLAIN, copy=True)
    assert (weights.qkv.unpack().dequantize() == 2.0).all()
    with pytest.raises(ArgumentError, match="o_proj.weight: got fp8 codes"):
        LayerWeights.build(state, BlockSpec(TINY, "bf16"), copy=True)


@pytest.mark.parametrize("shape", [(), (1,), (TINY.hidden,), (TINY.hidden, 1)])
def test_scales_of_a_tensor_and_of_its_features_are_read(shape: tuple[int, ...]) -> None:
    state = fp8_state()
    state["self_attn.o_proj.weight_scale"] = torch.full(shape, 0.25, dtype=torch.bfloat16)
    assert (LayerWeights.build(state, PLAIN).o.scale == 0.25).all()


def test_scales_of_blocks_are_refused() -> None:
    state = fp8_state()
    state["self_attn.o_proj.weight_scale"] = torch.ones(1, 2)
    with pytest.raises(UnsupportedError, match="o_proj.weight_scale: got .1, 2.*decode"):
        LayerWeights.build(state, PLAIN)


def test_ge_07_a_model_without_bias_has_none() -> None:
    """No placeholder, no operand: nothing that could hold what was not set."""
    weights = LayerWeights.build(state_of(PLAIN), PLAIN)
    assert weights.bias is None
    assert "bias" not in PLAIN.compositions["qkv"].operands
    with pytest.raises(ArgumentError, match="bias: got .* expected None"):
        replace(weights, bias=torch.zeros(TINY.q_width + 2 * TINY.kv_width))


@pytest.mark.parametrize(
    ("spec", "name", "fix"),
    [
        (PLAIN, "self_attn.q_proj.weight", "Llama-style"),
        (PLAIN, "input_layernorm.weight", "Llama-style"),
        (SPEC, "self_attn.k_proj.bias", "bias=False"),
        (SPEC, "self_attn.q_norm.weight", "qk_norm=False"),
    ],
)
def test_a_missing_tensor_is_named(spec: BlockSpec, name: str, fix: str) -> None:
    with pytest.raises(ArgumentError, match=f"no {name}.*{fix}"):
        built(spec, **{name: None})


@pytest.mark.parametrize(
    "name",
    ["self_attn.o_proj.bias", "mlp.gate_proj.bias", "pre_feedforward_layernorm.weight", "x"],
)
def test_a_tensor_too_many_is_named(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name} too many"):
        built(PLAIN, **{name: torch.zeros(TINY.hidden)})


def test_the_fix_names_the_option() -> None:
    state = state_of(SPEC, prefix=PREFIX)
    with pytest.raises(ArgumentError, match="Fix: BlockSpec\\(bias=True\\)"):
        LayerWeights.build(state, BlockSpec(TINY, qk_norm=True), PREFIX)
    with pytest.raises(ArgumentError, match="Fix: BlockSpec\\(qk_norm=True\\)"):
        LayerWeights.build(state, BlockSpec(TINY, bias=True), PREFIX)
    with pytest.raises(ArgumentError, match="check the prefix"):
        LayerWeights.build(state, SPEC, "model.layers.4.")


def test_other_layers_and_derived_buffers_are_no_concern() -> None:
    state = state_of(PLAIN, prefix=PREFIX) | state_of(SPEC, prefix="model.layers.30.")
    state |= {"lm_head.weight": torch.zeros(3, 3)}
    state |= {PREFIX + "self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    LayerWeights.build(state, PLAIN, PREFIX)


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("mlp.down_proj.weight", torch.zeros(96, 161), "shape: got .96, 161"),
        ("self_attn.k_proj.weight", torch.zeros(128, 96), "shape: got .128, 96"),
        ("input_layernorm.weight", torch.zeros(95), "shape: got .95"),
        ("self_attn.q_proj.bias", torch.zeros(64), "shape: got .64"),
        ("self_attn.q_proj.bias", torch.zeros(128, dtype=torch.int32), "dtype: got torch.int32"),
        ("self_attn.v_proj.bias", torch.full((64,), torch.nan), "non-finite"),
        ("self_attn.q_norm.weight", torch.full((32,), torch.inf), "non-finite"),
        ("self_attn.o_proj.weight", torch.full((96, 128), torch.nan), "12288 non-finite"),
        ("self_attn.o_proj.weight", torch.zeros(96, 128, dtype=torch.float64), "dtype"),
        (
            "self_attn.o_proj.weight",
            torch.zeros(96, 128).to(FP8),
            "without self_attn.o_proj.weight_scale",
        ),
        ("self_attn.o_proj.weight_scale", torch.ones(1), "with self_attn.o_proj.weight_scale"),
    ],
)
def test_what_does_not_fit_is_named(name: str, value: torch.Tensor, wrong: str) -> None:
    part = name.removesuffix("_scale")
    with pytest.raises(ArgumentError, match=wrong) as caught:
        built(SPEC, **{name: value})
    assert PREFIX + part in str(caught.value)


def test_tied_weights_are_folded_into_copies_when_asked() -> None:
    state = state_of(PLAIN)
    tied = {"mlp.up_proj.weight", "self_attn.o_proj.weight"}
    with pytest.raises(ArgumentError, match="mlp.up_proj.weight: got a tied weight"):
        LayerWeights.build(state, PLAIN, tied=tied)
    with inputs_unchanged(**state):
        copied = LayerWeights.build(state, PLAIN, tied=tied, copy=True)
    plain = LayerWeights.build(state, PLAIN)
    for name in PROJECTIONS:
        assert_equal_bits(getattr(copied, name).codes, getattr(plain, name).codes, name)


def test_weights_of_another_spec_are_refused() -> None:
    weights = LayerWeights.build(state_of(PLAIN), PLAIN)
    interleaved = replace(PLAIN, rope=replace(PLAIN.rope, style="interleaved"))
    with pytest.raises(ArgumentError, match="order"):
        replace(weights, spec=interleaved)
    with pytest.raises(ArgumentError, match="qkv: got fp8"):
        replace(weights, spec=BlockSpec(TINY, "bf16"))
    with pytest.raises(ArgumentError, match="q_gain: got None"):
        replace(weights, spec=replace(PLAIN, qk_norm=True))
    other = LayerShape(96, 176, 4, 2, 32, "other")
    with pytest.raises(ArgumentError, match="gate_up: got"):
        replace(weights, spec=BlockSpec(other))


def test_moving_keeps_everything() -> None:
    weights = LayerWeights.build(state_of(SPEC), SPEC)
    moved = weights.to("meta")
    tensors: dict[str, Any] = {n: getattr(moved, n) for n in ("bias", "q_gain", "k_gain")}
    assert {t.device.type for t in tensors.values()} == {"meta"}
    assert {getattr(moved, n).device.type for n in PROJECTIONS} == {"meta"}
    assert moved.nbytes == weights.nbytes
