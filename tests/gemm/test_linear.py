"""``linear`` on CPU tensors: the evaluation, allocation of outputs, and a plan cache that holds no weight."""

from __future__ import annotations

import gc
import importlib
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from epicute.epilogues import (
    Bias,
    Columns,
    Dequantize,
    EmitFP8,
    PlaceKV,
    ResidualAdd,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
    compose,
)
from epicute.errors import ArgumentError, EpicuteError
from epicute.gemm import kernel_for, linear, plan
from epicute.testing import assert_equal_bits, inputs_unchanged
from epicute.weights import Quantized, Weight
from tests.gemm.planned import weight

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
N, K, M = 192, 64, 5
OUT = Dequantize() >> ResidualAdd() >> SumSquares() >> Store(BF16) >> EmitFP8()


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(7)).float()


def test_the_cpu_gives_what_evaluate_gives() -> None:
    packed = weight(OUT, N, K, "fp8")
    x = integers(M, K).to(FP8)
    read = {
        "scale": torch.tensor([0.37]),
        "residual": torch.randn(M, N).to(BF16),
        "out_scale": torch.tensor([0.05]),
    }
    starts = {
        "amax": torch.tensor([1.0]),
        "saturated": torch.tensor([3]),
        "nans": torch.tensor([0]),
    }
    acc = x.float() @ packed.unpack().codes.float().T
    wanted = OUT.evaluate(acc, weight_scale=packed.scale, **read, **starts)
    with inputs_unchanged(x=x, codes=packed.codes, **read):
        found = linear(x, packed, OUT, **read, **starts)
    assert isinstance(found, dict)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_equal_bits(found[name], value, name)


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8"])
def test_one_output_comes_alone(format: str) -> None:
    chain = Dequantize(None) >> Store(torch.float32) if format == "fp8" else Store(torch.float32)
    packed = weight(chain, N, K, format)
    x = integers(M, K).to(packed.dtype)
    found = linear(x, packed, chain)
    assert isinstance(found, torch.Tensor)
    wanted = x.double() @ packed.unpack().dequantize().double().T
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3), (2, 1, 3), (0,), (2, 0, 3)])
def test_ge_11_leading_axes_come_back(leading: tuple[int, ...]) -> None:
    chain = SwiGLU() >> Store(BF16)
    packed = weight(chain, N, K)
    x = integers(*leading, K).to(BF16)
    found = linear(x, packed, chain)
    assert found.shape == (*leading, N // 2)
    flat = linear(x.reshape(-1, K), packed, chain)
    assert_equal_bits(found.reshape(flat.shape), flat)


def test_strided_x_is_what_it_shows() -> None:
    packed = weight(Store(BF16), N, K)
    big = integers(2 * M, 3 * K).to(BF16)
    for x in (big[::2, K : 2 * K], big[:, ::3], big.T[:K].T):
        assert_equal_bits(linear(x, packed, Store(BF16)), linear(x.clone(), packed, Store(BF16)))


def test_numbers_are_scalars() -> None:
    chain = Dequantize() >> Store(BF16)
    packed = weight(chain, N, K, "fp8")
    x = integers(M, K).to(FP8)
    by_number = linear(x, packed, chain, scale=0.37)
    assert_equal_bits(by_number, linear(x, packed, chain, scale=torch.tensor([0.37])))
    assert_equal_bits(linear(x, packed, chain, scale=2), linear(x, packed, chain, scale=2.0))


def test_a_bare_policy_will_do() -> None:
    packed = weight(Store(BF16), N, K)
    x = integers(M, K).to(BF16)
    assert_equal_bits(linear(x, packed, Store(BF16)), linear(x, packed, compose(Store(BF16))))


def test_ge_05_shards_keep_their_scales() -> None:
    """x = 1 and codes = 1 over K = 512 with scales 1, 0.01 and 100: exactly 512, 5.12 and 51200 in BF16."""
    ones = torch.ones(16, 512).to(FP8)
    shards = [Quantized("fp8", ones, torch.tensor([s])) for s in (1.0, 0.01, 100.0)]
    chain = Dequantize() >> Store(BF16)
    packed = Quantized.concat(shards).pack(chain.row_order(48))
    found = linear(torch.ones(4, 512).to(FP8), packed, chain, scale=1.0)
    wanted = torch.tensor([512.0, 5.12, 51200.0]).to(BF16).repeat_interleave(16).expand(4, 48)
    assert torch.equal(found, wanted)


def test_a_missing_operand_is_refused() -> None:
    packed = weight(Bias() >> Store(BF16), N, K)
    with pytest.raises(ArgumentError, match="missing bias"):
        linear(integers(M, K).to(BF16), packed, Bias() >> Store(BF16))


def test_a_cache_to_write_to_is_the_callers() -> None:
    chain = compose(PlaceKV(64))
    packed = weight(chain, N, K)
    slots = torch.arange(M)
    with pytest.raises(ArgumentError, match=r"cells.*Fix: pass cells="):
        linear(integers(M, K).to(BF16), packed, chain, slots=slots)


# --- the plans behind it ---


class PlanStub:
    """Remembers runs, computes nothing."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def plan(self, composition: Any, packed: Any, **options: Any) -> PlanStub:
        self.made.append(options)
        return self


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> PlanStub:
    module = importlib.import_module("epicute.gemm.linear")
    made = PlanStub()
    monkeypatch.setattr(module, "plan", made.plan)
    module._plan_for.cache_clear()
    yield made
    module._plan_for.cache_clear()


def plan_for(
    packed: Any,
    chain: Any,
    dtypes: Any = (),
    alignments: Any = (),
    accumulate: str | None = None,
) -> Any:
    module = importlib.import_module("epicute.gemm.linear")
    weight = module._Weight(packed)
    return module._plan_for(compose(chain), weight, dtypes, alignments, accumulate)


def test_jc_04_one_plan_for_weights_of_one_shape(stub: PlanStub) -> None:
    chain = Bias() >> Store(BF16)
    for _ in range(3):
        plan_for(weight(chain, N, K), chain)
    assert len(stub.made) == 1


def test_jc_03_what_decides_the_kernel_makes_a_plan_of_its_own(stub: PlanStub) -> None:
    chain = Bias() >> Store(BF16)
    plan_for(weight(chain, N, K), chain)
    plan_for(weight(chain, 2 * N, K), chain)
    plan_for(weight(chain, N, 2 * K), chain)
    plan_for(weight(chain, N, K, "fp16"), chain)
    plan_for(weight(chain, N, K), Bias() >> Store(torch.float32))
    plan_for(weight(chain, N, K), chain, (("bias", BF16),))
    plan_for(weight(chain, N, K), chain, (), (("out", 8),))
    plan_for(weight(chain, N, K), chain, accumulate="fast")
    assert len(stub.made) == 8
    assert stub.made[5]["dtypes"] == {"bias": BF16}
    assert stub.made[6]["alignments"] == {"out": 8}


def test_the_cache_does_not_keep_the_weight_alive(stub: PlanStub) -> None:
    chain = compose(Store(BF16))
    packed = weight(chain, N, K)
    seen = weakref.ref(packed.codes)
    plan_for(packed, chain)
    plan_for(packed, chain)
    del packed
    gc.collect()
    assert seen() is None


def test_alignment_is_what_address_and_strides_share() -> None:
    alignment = importlib.import_module("epicute.gemm.linear")._alignment
    big = torch.zeros(8, 128, dtype=BF16)
    assert alignment(big) == 16
    assert alignment(big[:, 4:100]) == 8
    assert alignment(big[:, 1:100]) == 2
    assert alignment(torch.zeros(8, 100, dtype=BF16)) == 8
    assert alignment(torch.zeros(4, 16, 3, 80, dtype=FP8)) == 16
    assert alignment(torch.zeros(4, 16, 3, 81, dtype=FP8)[..., :80]) == 1


@pytest.mark.parametrize("given", [torch.zeros(M, 2 * K), torch.zeros(M, K, dtype=torch.float16)])
def test_what_a_gpu_would_refuse_the_cpu_refuses(given: torch.Tensor) -> None:
    packed = weight(Store(BF16), N, K)
    with pytest.raises(EpicuteError, match="x: got"):
        linear(given, packed, Store(BF16))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, K + 1)])
def test_x_without_rows_of_k_is_refused_by_its_shape(shape: tuple[int, ...]) -> None:
    packed = weight(Store(BF16), N, K)
    with pytest.raises(ArgumentError, match=rf"x: got {re.escape(str(shape))} torch.bfloat16"):
        linear(torch.zeros(shape, dtype=BF16), packed, Store(BF16))


def test_scales_that_the_composition_would_drop_are_refused_as_plan_does() -> None:
    packed = weight(Store(BF16), N, K, "fp8")
    x = integers(M, K).to(FP8)
    said = "got no weight_scale for w, whose codes have scales, expected Dequantize.. first"
    for chain in (Store(BF16), compose(Store(BF16))):
        with pytest.raises(ArgumentError, match=f"epilogue: {said}"):
            linear(x, packed, chain)
        with pytest.raises(ArgumentError, match=f"composition: {said}"):
            plan(chain, packed)


@pytest.mark.parametrize(
    ("format", "accumulate", "said"),
    [
        ("fp8", "slow", "accumulate: got 'slow', expected 'fast', 'precise' or None"),
        ("bf16", "slow", "accumulate: got 'slow'"),
        ("fp8", True, "accumulate: got True"),
        ("bf16", "precise", "accumulate: got 'precise', expected 'fast' for torch.bfloat16"),
    ],
)
def test_accumulate_is_refused_as_kernel_for_does(format: str, accumulate: Any, said: str) -> None:
    chain = (Dequantize(None) if format == "fp8" else Bias()) >> Store(BF16)
    packed = weight(chain, N, K, format)
    operands = {} if format == "fp8" else {"bias": torch.zeros(N)}
    x = integers(M, K).to(packed.dtype)
    with pytest.raises(ArgumentError, match=said):
        kernel_for(chain, n=N, k=K, dtype=packed.dtype, accumulate=accumulate)
    with pytest.raises(ArgumentError, match=said):
        linear(x, packed, chain, accumulate=accumulate, **operands)
    allowed = ["fast", "precise"] if format == "fp8" else ["fast"]
    for right in allowed:
        assert_equal_bits(
            linear(x, packed, chain, accumulate=right, **operands),
            linear(x, packed, chain, **operands),
        )


WRONG = [None, "0.01", True, [0.5], np.ones(1, np.float32), 1j]


@pytest.mark.parametrize("given", WRONG, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("scale", "scale=0.5, or a float32 tensor of one"),
        ("out_scale", "out_scale=0.5, or a float32 tensor of one"),
        ("weight_scale", "make a tensor of it"),
        ("residual", "make a tensor of it"),
        ("out", "call without out to have it allocated"),
        ("amax", "call without amax to have it allocated"),
    ],
)
def test_what_is_neither_tensor_nor_number_is_refused_by_name(
    name: str, fix: str, given: Any
) -> None:
    packed = weight(OUT, N, K, "fp8")
    operands = {"scale": 0.37, "out_scale": 0.05, "residual": torch.zeros(M, N).to(BF16)}
    got = "None" if given is None else type(given).__name__
    with pytest.raises(ArgumentError, match=f"^{name}: got {got}, expected a tensor.*Fix: {fix}$"):
        linear(integers(M, K).to(FP8), packed, OUT, **{**operands, name: given})


def test_a_cache_that_is_none_is_refused_by_name() -> None:
    chain = compose(PlaceKV(64))
    x = integers(M, K).to(BF16)
    with pytest.raises(ArgumentError, match="^cells: got None, .*Fix: make a tensor of it$"):
        linear(x, weight(chain, N, K), chain, slots=torch.arange(M), cells=None)


def test_an_unknown_operand_is_refused_with_the_list() -> None:
    packed = weight(Bias() >> Store(BF16), N, K)
    said = "operands: got unknown scale, expected bias: RowVector"
    with pytest.raises(ArgumentError, match=said):
        linear(integers(M, K).to(BF16), packed, Bias() >> Store(BF16), bias=0.0, scale=None)


X = torch.zeros(M, K, dtype=BF16)
VALUES = Weight(torch.ones(N, K), "w")
PACKED = weight(Store(BF16), N, K)
CALL = r"Fix: call linear\(x, packed, epilogue\)$"


@pytest.mark.parametrize(
    ("x", "packed", "epilogue", "said"),
    [
        (PACKED, X, Store(BF16), f"^x: got Packed, expected a tensor. {CALL}"),
        (VALUES, PACKED, Store(BF16), f"^x: got Weight, .*{CALL}"),
        (Store(BF16), X, PACKED, f"^x: got Store, .*{CALL}"),
        (X.tolist(), PACKED, Store(BF16), "^x: got list, expected a tensor. Fix: make a tensor"),
        (None, PACKED, Store(BF16), "^x: got None, "),
        (X, Store(BF16), PACKED, f"^packed: got Store, expected a Packed weight. {CALL}"),
        (
            X,
            torch.ones(N, K),
            Store(BF16),
            r"^packed: got \(192, 64\) torch.float32, .*"
            r"Fix: Weight\(w\).quantize\(…\).pack\(epilogue.row_order\(192\)\)$",
        ),
        (X, VALUES, Store(BF16), r"Fix: add .quantize\(…\).pack\(epilogue.row_order\(192\)\)$"),
        (X, VALUES.quantize("fp8"), Store(BF16), r"Fix: add .pack\(epilogue.row_order\(192\)\)$"),
        (X, None, Store(BF16), "^packed: got None, "),
        (X, PACKED, None, "^epilogue: got None, expected a policy or a composition. Fix: pass a"),
        (X, PACKED, PACKED, f"^epilogue: got Packed, .*{CALL}"),
        (X, PACKED, Store, r"^epilogue: got type, .*Fix: call it: Store\(…\)$"),
    ],
)
def test_another_object_is_refused_in_one_line(
    x: Any, packed: Any, epilogue: Any, said: str
) -> None:
    with pytest.raises(ArgumentError, match=said) as found:
        linear(x, packed, epilogue)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 200


def test_columns_alone_will_do() -> None:
    chain = Columns(a=(N // 2, Store(BF16)), b=(N // 2, Store(torch.float32)))
    found = linear(X, weight(chain, N, K), chain)
    assert isinstance(found, dict)
    assert found.keys() == {"a_out", "b_out"}


def test_another_order_is_refused_on_the_cpu_too() -> None:
    packed = weight(SwiGLU() >> Store(BF16), N, K)
    with pytest.raises(ArgumentError, match="order"):
        linear(integers(M, K).to(BF16), packed, Store(BF16))


def test_given_outputs_are_written_on_the_cpu_too() -> None:
    packed = weight(EmitFP8(), N, K)
    x = integers(M, K).to(BF16)
    out, amax = torch.zeros(M, N).to(FP8), torch.zeros(1)
    found = linear(x, packed, EmitFP8(), out_scale=1.0, out_fp8=out, amax=amax)
    assert found["out_fp8"] is out
    assert found["amax"] is amax
    assert float(amax) > 0


def test_a_weight_given_transposed_is_what_it_shows() -> None:
    values = integers(K, N)
    packed = Weight(values.T).quantize("bf16").pack(compose(Store(BF16)).row_order(N))
    x = integers(M, K).to(BF16)
    assert torch.equal(linear(x, packed, Store(torch.float32)), x.float() @ values)


@pytest.mark.parametrize("bad", [0.0, -1, float("nan"), float("inf")])
def test_a_number_that_is_no_scale_is_refused(bad: float) -> None:
    chain = Dequantize() >> EmitFP8()
    packed = weight(chain, N, K, "fp8")
    x = integers(M, K).to(FP8)
    for name in ("out_scale", "scale"):
        given = {"scale": 1.0, "out_scale": 1.0, name: bad}
        with pytest.raises(ArgumentError, match=rf"^{name}: got {bad}, expected a finite number"):
            linear(x, packed, chain, **given)


def test_one_number_for_all_rows_is_told_of_the_tensor_scale() -> None:
    chain = Dequantize("row") >> Store(BF16)
    packed = weight(chain, N, K, "fp8")
    said = r"scale: got the number 1.0, expected ColumnVector.* of shape \(5,\).*Dequantize\('tensor'\)"
    with pytest.raises(ArgumentError, match=said):
        linear(integers(M, K).to(FP8), packed, chain, scale=1.0)
    with pytest.raises(ArgumentError, match=r"weight_scale: got the number 2, expected RowVector"):
        linear(integers(M, K).to(FP8), packed, chain, scale=torch.ones(M), weight_scale=2)


def test_a_weight_without_scales_is_told_of_dequantize() -> None:
    chain = Dequantize("row") >> Store(BF16)
    packed = weight(chain, N, K)
    x = integers(M, K).to(BF16)
    said = (
        r"weight_scale: got nothing, and .* has no scales, as its format is bf16.*drop Dequantize"
    )
    with pytest.raises(ArgumentError, match=said):
        linear(x, packed, chain, scale=torch.ones(M))
    given = {"scale": torch.ones(M), "weight_scale": torch.ones(N)}
    assert linear(x, packed, chain, **given).shape == (M, N), "scales of one's own will do"


def test_the_fix_for_x_is_of_what_is_wrong_with_it() -> None:
    chain = compose(Store(BF16))
    packed = weight(chain, N, K)
    with pytest.raises(ArgumentError, match=r"Fix: the weight reads 64 features"):
        linear(integers(M, K - 1).to(BF16), packed, chain)
    with pytest.raises(ArgumentError, match=r"Fix: quantise x"):
        linear(integers(M, K), packed, chain)


@pytest.mark.parametrize("width", [K - 1, K + 8, 2 * K])
def test_a_row_factor_of_another_width_is_refused(width: int) -> None:
    """The partial sums are of the row that is multiplied, which has K columns; no padding counts."""
    chain = RowScale(width) >> Columns(a=(N, Store(BF16)))
    packed = weight(chain, N, K)
    said = rf"RowScale.width: got {width}, expected 64, the K of .*RowScale\(width=64, …\)"
    with pytest.raises(ArgumentError, match=said):
        linear(integers(M, K).to(BF16), packed, chain, sumsq=torch.ones(M, -(-width // 64)))
    with pytest.raises(ArgumentError, match=said):
        plan(chain, packed)


def test_a_row_factor_is_of_k_and_not_of_the_padded_rows() -> None:
    chain = RowScale(60) >> Store(BF16)
    packed = weight(chain, N, 60)
    assert packed.pitch == 64
    assert linear(integers(M, 60).to(BF16), packed, chain, sumsq=torch.ones(M, 1)).shape == (M, N)


@pytest.mark.parametrize(
    ("shape", "fix"),
    [
        ((4, 3, 16, 64), r"pass cells=cache.transpose\(1, 2\)"),
        ((4, 16, 2, 64), "HND: cache.transpose"),
        ((4, 16, 3, 32), "HND: cache.transpose"),
        ((4, 16, 192), "HND: cache.transpose"),
    ],
)
def test_kv_11_a_cache_of_another_layout_is_refused_by_name(
    shape: tuple[int, ...], fix: str
) -> None:
    chain = compose(PlaceKV(64))
    packed = weight(chain, N, K)
    given = {"cells": torch.zeros(shape, dtype=BF16), "slots": torch.arange(M)}
    said = rf"cells: got shape .*expected Cells.* of shape \(pages, page_size, 3, 64\).*{fix}"
    with pytest.raises(ArgumentError, match=said):
        linear(integers(M, K).to(BF16), packed, chain, **given)
    with pytest.raises(ArgumentError, match=said):
        chain.evaluate(integers(M, N), **given)
