"""What a layer's compositions are, and which specs are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epicute.epilogues import EmitFP8, RoPE, Store, SwiGLU, compose
from epicute.errors import ArgumentError
from epicute.models import SHAPES, projections
from epicute.models.block_spec import PROJECTIONS, BlockSpec, KeepRows
from epicute.testing import assert_equal_bits
from tests.models.layers import FP8, TINY

HEADS = "Columns(q: {0}RoPE >> Store, k: {0}RoPE >> PlaceKV, v: PlaceKV)"


def titles(spec: BlockSpec) -> dict[str, str]:
    return {name: found.title for name, found in spec.compositions.items()}


def test_the_compositions_of_a_delayed_fp8_layer() -> None:
    assert titles(BlockSpec(TINY)) == {
        "qkv": "Dequantize >> RowScale >> " + HEADS.format(""),
        "o": "Dequantize >> ResidualAdd >> KeepRows >> SumSquares >> Store >> EmitFP8",
        "gate_up": "Dequantize >> RowScale >> SwiGLU >> EmitFP8",
        "down": "Dequantize >> ResidualAdd >> SumSquares >> Store >> EmitFP8",
    }


def test_the_compositions_of_the_sixteen_bit_twin() -> None:
    assert titles(BlockSpec(TINY, "bf16", bias=True, qk_norm=True)) == {
        "qkv": "RowScale >> Bias >> " + HEADS.format("HeadNorm >> "),
        "o": "ResidualAdd >> KeepRows >> SumSquares >> Store",
        "gate_up": "RowScale >> SwiGLU >> Store",
        "down": "ResidualAdd >> SumSquares >> Store",
    }


def test_row_wise_scales_are_read_and_not_written() -> None:
    spec = BlockSpec(TINY, scaling="row")
    for name, found in spec.compositions.items():
        assert found.policies[0].activation == "row"
        assert "EmitFP8" not in found.title, name


@pytest.mark.parametrize("shape", SHAPES)
def test_every_published_layer_has_its_kernels(shape: str) -> None:
    for format in ("fp8", "bf16"):
        spec = BlockSpec(SHAPES[shape], format)
        kernels = spec.kernels(2048, "sm_90a")
        assert tuple(kernels) == PROJECTIONS
        for name, (n, k) in projections(SHAPES[shape]).items():
            problem = kernels[name].spec.problem
            assert (problem.columns, problem.depth) == (n, k)
            assert problem.dtype == spec.operand


def test_the_residual_is_read_as_it_is_stored() -> None:
    for format, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        spec = BlockSpec(TINY, format, cache=FP8)
        for name in ("o", "down"):
            layout = spec.kernels(target="sm_90a")[name].spec.layout
            assert layout["residual"].dtype == layout["out"].dtype == dtype


@pytest.mark.parametrize("packed", [False, True])
def test_attention_reads_what_the_projections_write(packed: bool) -> None:
    spec = BlockSpec(TINY, cache=FP8, window=7, softcap=30.0, softmax_scale=0.25)
    found = spec.attention(packed, 32)
    assert (found.heads, found.kv_heads, found.head_dim) == (4, 2, 32)
    assert (found.dtype, found.kv_dtype, found.out_dtype) == (torch.bfloat16, FP8, FP8)
    assert (found.window, found.softcap, found.scale) == (7, 30.0, 0.25)
    assert (found.page, found.packed, found.causal, found.sinks) == (32, packed, True, False)
    assert BlockSpec(TINY, scaling="row").attention().out_dtype == torch.bfloat16


def test_rows_without_a_slot_become_zero_whatever_they_hold() -> None:
    fused = KeepRows() >> Store(torch.float32) >> EmitFP8()
    x = torch.tensor([[1.5, -2.0], [torch.nan, torch.inf], [3.0, torch.nan], [-0.0, 7.0]])
    slots = torch.tensor([0, -1, 2**40 + 17, -(2**40)])
    found = fused.evaluate(x, slots=slots, out_scale=1.0)
    wanted = torch.tensor([[1.5, -2.0], [0.0, 0.0], [3.0, torch.nan], [0.0, 0.0]])
    assert_equal_bits(found["out"], wanted)
    assert (float(found["amax"]), int(found["nans"]), int(found["saturated"])) == (3.0, 1, 0)


def test_the_mlp_maps_rows_of_zeros_to_zeros() -> None:
    """So that one mask in a layer is enough."""
    spec = BlockSpec(TINY, "bf16")
    zeros = torch.zeros(3, 2 * TINY.intermediate)
    found = spec.compositions["gate_up"].evaluate(zeros, sumsq=torch.zeros(3, spec.partials))
    assert (found["out"] == 0).all()


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"format": "int4"}, "BlockSpec.format"),
        ({"scaling": "block"}, "BlockSpec.scaling"),
        ({"cache": torch.float16}, "BlockSpec.cache"),
        ({"format": "fp16"}, "BlockSpec.cache"),
        ({"eps": 0.0}, "BlockSpec.eps"),
        ({"rope": RoPE(64)}, "BlockSpec.rope"),
        ({"rope": RoPE(32, name="q")}, "BlockSpec.rope"),
        ({"activation": SwiGLU(name="mlp")}, "BlockSpec.activation"),
    ],
)
def test_what_no_layer_has_is_refused(change: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        BlockSpec(TINY, **change)


def test_the_default_rotation_is_of_whole_heads() -> None:
    spec = BlockSpec(TINY)
    assert spec.rope == RoPE(32)
    assert spec == BlockSpec(TINY, rope=RoPE(32, 32))
    assert spec.rotary_dim == 32
    assert BlockSpec(TINY, rope=RoPE(32, 16)).rotary_dim == 16
    assert compose(*spec.compositions["gate_up"].policies) == spec.compositions["gate_up"]
