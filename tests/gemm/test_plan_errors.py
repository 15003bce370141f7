"""Every refusal of ``plan`` and ``Plan.bind`` names the operand, what came and what was expected, before any launch."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import epicute
from epicute.epilogues import (
    Bias,
    Columns,
    Dequantize,
    PlaceKV,
    ResidualAdd,
    Store,
    SwiGLU,
    compose,
)
from epicute.epilogues.resolve import resolve
from epicute.errors import ArgumentError, CompileError, UnsupportedError
from epicute.gemm import Plan
from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.readers import reader
from epicute.weights import Weight
from tests.gemm.planned import OUT, QKV, K, Launch, M, N, fake_plan, weight

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


class Elsewhere(torch.Tensor):
    """A tensor of device 1."""

    def get_device(self) -> int:
        return 1


@pytest.fixture
def out() -> Launch:
    return Launch(OUT, FP8, "fp8")


@pytest.fixture
def qkv() -> Launch:
    return Launch(QKV)


# --- x ---


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(M, K, dtype=FP16), r"torch.float16.*expected \(M, 64\) torch.bfloat16"),
        (torch.zeros(M, K + 1, dtype=BF16), r"\(5, 65\).*expected \(M, 64\)"),
        (torch.zeros(1, M, K, dtype=BF16), r"\(1, 5, 64\)"),
        (torch.zeros(K, dtype=BF16), r"\(64,\)"),
        (torch.zeros(M, 2 * K, dtype=BF16)[:, ::2], r"strides \(128, 2\).*adjacent elements"),
        (torch.zeros(K, M, dtype=BF16).T, r"strides \(1, 5\).*adjacent elements"),
        (torch.zeros(M, K + 4, dtype=BF16)[:, :K], r"strides \(68, 1\).*multiples of 16 bytes"),
        (torch.zeros(M, K + 8, dtype=BF16)[:, 4 : K + 4], r"multiples of 16 bytes"),
        (torch.zeros(1, K, dtype=BF16).expand(M, K), r"strides \(0, 1\)"),
    ],
)
def test_ge_16_x_is_refused_by_name(x: torch.Tensor, said: str) -> None:
    launch = Launch(Store(BF16))
    launch.x = x
    launch.refused("x", said)


def test_more_rows_than_tiles_can_count_are_refused() -> None:
    launch = Launch(Store(BF16))
    launch.x = torch.empty(1, K, dtype=BF16).expand(2**31, K)
    launch.refused("x", "at most 2147418112 rows")


def test_x_on_the_cpu_is_refused() -> None:
    launch = Launch(Store(BF16))
    launch.plan._clusters.clear()
    said = "a tensor on cpu, expected a CUDA tensor.*without one, epicute.linear does the same on the CPU"
    launch.refused("x", said)


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(Store(BF16))
    launch.plan._clusters.clear()
    ada = SimpleNamespace(name="Ada", major=8, minor=9, multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: ada)
    fake = SimpleNamespace(device=SimpleNamespace(type="cuda", index=0), get_device=lambda: 0)
    with pytest.raises(UnsupportedError, match=r"x.device: got Ada.*8.9, expected a GPU for sm_90"):
        launch.plan.bind(fake, launch.packed, {})


# --- the weight ---


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (weight(OUT, N, 2 * K, "fp8"), r"\(192, 128\) torch.float8_e4m3fn, expected \(192, 64\)"),
        (weight(OUT, 2 * N, K, "fp8"), r"\(384, 64\)"),
        (weight(OUT, N, K, "bf16"), r"torch.bfloat16, expected \(192, 64\) torch.float8_e4m3fn"),
    ],
)
def test_another_weight_is_refused(out: Launch, packed: Any, said: str) -> None:
    out.packed = packed
    out.refused("packed", said)


def test_a_weight_in_another_order_is_refused(out: Launch) -> None:
    out.packed = weight(SwiGLU() >> Store(BF16), N, K, "fp8")
    with pytest.raises(ArgumentError, match="order.*the plan's composition"):
        out.bind()
    assert out.calls == []


def test_jc_12_a_weight_elsewhere_is_refused(out: Launch) -> None:
    object.__setattr__(out.packed, "codes", out.packed.codes.as_subclass(Elsewhere))
    out.refused("packed.codes", r"x's device, cpu. Fix: packed.to\(x.device\)")


@pytest.mark.parametrize("given", [None, [[0.0]], np.zeros((M, K)), Store(BF16)])
def test_what_is_no_tensor_is_refused_as_x(out: Launch, given: Any) -> None:
    out.x = given
    out.refused("x", "expected a tensor")


def test_run_says_so_where_x_and_the_weight_are_swapped(out: Launch) -> None:
    out.x, out.packed = out.packed, out.x
    out.refused("x", r"x: got Packed, expected a tensor. Fix: call run\(x, packed, \*\*operands\)$")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, r"got None.*Fix: read it with Packed.load\(path\)"),
        (np.zeros((N, K)), "got ndarray"),
        (Store(BF16), r"got Store, .*Fix: call run\(x, packed, "),
        (
            torch.zeros(N, K),
            r"Fix: Weight\(w\).quantize\(…\).pack\(composition.row_order\(192\)\)$",
        ),
    ],
)
def test_what_is_no_packed_weight_is_refused(out: Launch, given: Any, said: str) -> None:
    out.packed = given
    out.refused("packed", said)


# --- operands ---


@pytest.mark.parametrize("name", ["residual", "out_scale", "amax", "out"])
def test_a_missing_operand_is_refused_with_the_list(out: Launch, name: str) -> None:
    del out.operands[name]
    with pytest.raises(ArgumentError, match=rf"operands: got missing {name}") as error:
        out.bind()
    assert ". Fix: " in str(error.value)


def test_an_unknown_operand_is_refused_with_the_list(out: Launch) -> None:
    out.operands["bias"] = torch.zeros(N)
    with pytest.raises(ArgumentError, match=r"unknown bias, expected scale: Scalar.*residual: Mat"):
        out.bind()
    del out.operands["residual"]
    with pytest.raises(ArgumentError, match=r"missing residual and unknown bias"):
        out.bind()


@pytest.mark.parametrize("given", [0.5, None, [1.0], "scale"])
@pytest.mark.parametrize("name", ["scale", "residual", "weight_scale"])
def test_ge_07_what_is_no_tensor_is_refused_by_name(out: Launch, name: str, given: Any) -> None:
    out.operands[name] = given
    got = "None" if given is None else type(given).__name__
    out.refused(name, f"{got}, expected a tensor on")


def shaped(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("scale", shaped(2), r"\(2,\).*expected \(1,\) torch.float32"),
        ("scale", shaped(1, dtype=BF16), r"torch.bfloat16.*expected \(1,\) torch.float32"),
        ("weight_scale", shaped(N - 1), r"\(191,\).*expected \(192,\)"),
        ("weight_scale", shaped(N, 1), r"\(192, 1\).*expected \(192,\)"),
        ("weight_scale", shaped(2 * N)[::2], r"strides \(2,\).*expected adjacent elements"),
        ("weight_scale", shaped(1).expand(N), r"strides \(0,\).*expected adjacent elements"),
        ("residual", shaped(M, N), r"torch.float32.*plan with dtypes=\{'residual': torch.float32"),
        ("residual", shaped(M - 1, N, dtype=BF16), r"\(4, 192\).*expected \(5, 192\)"),
        ("residual", shaped(N, M, dtype=BF16).T, r"strides \(1, 5\).*adjacent elements in rows"),
        ("residual", shaped(1, N, dtype=BF16).expand(M, N), r"strides \(0, 1\)"),
        ("residual", shaped(M, N + 4, dtype=BF16)[:, :N], r"rows at multiples of 16 bytes"),
        ("residual", shaped(M, N + 8, dtype=BF16)[:, 4 : N + 4], r"alignments=\{'residual': 2\}"),
        ("out", shaped(M, N, dtype=FP16), r"torch.float16.*expected \(5, 192\) torch.bfloat16"),
        ("out", shaped(M, 2 * N, dtype=BF16)[:, ::2], r"strides \(384, 2\)"),
        ("out", shaped(M, N + 4, dtype=BF16)[:, :N], r"strides \(196, 1\).*multiples of 16 bytes"),
        ("out_fp8", shaped(M, N, dtype=torch.float8_e5m2), r"float8_e5m2.*expected \(5, 192\)"),
        ("sumsq_out", shaped(M, 2), r"\(5, 2\).*expected \(5, 3\)"),
        ("amax", shaped(1, dtype=BF16), r"torch.bfloat16.*expected \(1,\) torch.float32"),
        ("saturated", shaped(1, dtype=torch.int32), r"torch.int32.*expected \(1,\) torch.int64"),
        ("nans", shaped(0, dtype=torch.int64), r"\(0,\).*expected \(1,\) torch.int64"),
    ],
)
def test_operands_are_refused_by_name(
    out: Launch, name: str, given: torch.Tensor, said: str
) -> None:
    out.operands[name] = given
    out.refused(name, said)


def cache(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("k_cells", cache(3, 16, 2, 64), r"\(3, 16, 2, 64\).*expected \(pages, page_size, 1, 64\)"),
        ("k_cells", cache(3, 16, 64), r"\(3, 16, 64\)"),
        ("k_cells", cache(3, 16, 1, 64, dtype=FP8), r"torch.float8_e4m3fn.*torch.bfloat16"),
        ("v_cells", cache(3, 16, 1, 128)[..., ::2], r"adjacent channels. Fix: keep head_dim inn"),
        ("v_cells", cache(3, 16, 1, 68)[..., :64], r"cells at multiples of 16 bytes"),
        ("v_cells", cache(3, 16, 1, 72)[..., 4:68], r"alignments=\{'v_cells': 2\}"),
        ("slots", torch.zeros(M, dtype=torch.int32), r"torch.int32.*expected \(5,\) torch.int64"),
        ("slots", torch.zeros(M - 1, dtype=torch.int64), r"\(4,\).*expected \(5,\)"),
        ("positions", torch.zeros(M, dtype=torch.int32), r"dtypes=\{'positions': torch.int32\}"),
        ("positions", torch.zeros(M, dtype=torch.int16), r"torch.int16"),
        ("inv_freq", torch.zeros(64), r"\(64,\).*expected \(32,\)"),
        ("sumsq", torch.zeros(M, 2), r"\(5, 2\).*expected \(5, 1\)"),
    ],
)
def test_kv_11_cells_and_row_operands_are_refused_by_name(
    qkv: Launch, name: str, given: torch.Tensor, said: str
) -> None:
    qkv.operands[name] = given
    qkv.refused(name, said)


def test_jc_12_an_operand_elsewhere_is_refused(out: Launch) -> None:
    out.operands["residual"] = out.operands["residual"].as_subclass(Elsewhere)
    out.refused("residual", r"x's device, cpu. Fix: residual.to\(x.device\)")


@pytest.mark.parametrize("name", ["out", "residual"])
def test_an_output_inside_x_is_refused(name: str) -> None:
    launch = Launch(ResidualAdd() >> Store(BF16))
    buffer = torch.zeros(4096, dtype=BF16)
    launch.x = buffer.as_strided((M, K), (256, 1))
    launch.operands[name] = buffer.as_strided((M, N), (256, 1), 32)
    if name == "out":
        launch.refused("out", "apart from x")
    else:
        assert launch.bind() is not None  # reading x twice harms nobody


# --- plan() itself ---


def no_compiler(*arguments: Any, **options: Any) -> None:
    raise CompileError("the compiler ran")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reaching the compiler fails the test."""
    for module in ("plan", "fitting"):
        found = importlib.import_module(f"epicute.gemm.{module}")
        monkeypatch.setattr(found, "compile", no_compiler)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("composition", "format", "options", "said"),
    [
        (Store(BF16), "bf16", {"x_dtype": FP8}, "x_dtype: got torch.float8_e4m3fn, expected torch"),
        (Store(BF16), "fp8", {}, r"composition: got no weight_scale for w.*Dequantize"),
        (Bias(), "bf16", {}, "which no tap or sink reads"),
        (Store(BF16), "bf16", {"dtypes": {"out": FP32}}, r"dtypes\['out'\]"),
        (Store(BF16), "bf16", {"alignments": {"x": 4}}, "alignments: got operand 'x'"),
        (Store(BF16), "bf16", {"schedule": epicute.Schedule(64)}, "Schedule.tile_m: got 64"),
        (Store(BF16), "bf16", {"target": epicute.Target("sm_100a")}, "target: got sm_100a"),
    ],
)
def test_plan_refuses_before_it_compiles(
    composition: Any, format: str, options: dict[str, Any], said: str
) -> None:
    packed = weight(Store(BF16), N, K, format)
    with pytest.raises(epicute.EpicuteError, match=said):
        epicute.plan(composition, packed, **options)


VALUES = Weight(torch.ones(N, K), "w")
PACKED = weight(Store(BF16), N, K)
CALL = r"Fix: call plan\(composition, packed\)$"


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("composition", "packed", "said"),
    [
        (
            PACKED,
            Store(BF16),
            f"composition: got Packed, expected a policy or a composition. {CALL}",
        ),
        (PACKED, PACKED, f"composition: got Packed, .*{CALL}"),
        (torch.zeros(M, K), PACKED, rf"composition: got \(5, 64\) torch.float32, .*{CALL}"),
        (VALUES, PACKED, f"composition: got Weight, .*{CALL}"),
        (None, PACKED, "composition: got None, .*Fix: pass a policy, or several as a >> b$"),
        ("Store", PACKED, "composition: got str, "),
        (Store, PACKED, r"composition: got type, .*Fix: call it: Store\(…\)$"),
        (Store(BF16), Bias() >> Store(BF16), f"packed: got Composition, .*{CALL}"),
        (
            Store(BF16),
            VALUES,
            r"packed: got Weight, expected a Packed weight. "
            r"Fix: add .quantize\(…\).pack\(composition.row_order\(192\)\)$",
        ),
        (
            Store(BF16),
            VALUES.quantize("bf16"),
            r"packed: got Quantized, .*Fix: add .pack\(composition.row_order\(192\)\)$",
        ),
        (
            Store(BF16),
            torch.ones(N, K),
            r"packed: got \(192, 64\) torch.float32, .*"
            r"Fix: Weight\(w\).quantize\(…\).pack\(composition.row_order\(192\)\)$",
        ),
        (Store(BF16), torch.ones(N), r"pack\(composition.row_order\(n\)\)$"),
        (Store(BF16), None, r"packed: got None, .*Packed.load\(path\)"),
        (Store(BF16), [[1.0]], "packed: got list, "),
    ],
)
def test_plan_refuses_another_object_in_one_line(composition: Any, packed: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as found:
        epicute.plan(composition, packed)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 200


@pytest.mark.usefixtures("uncompiled")
def test_plan_takes_columns() -> None:
    chain = Columns(a=(N // 2, Store(BF16)), b=(N // 2, Store(FP32)))
    with pytest.raises(CompileError, match="the compiler ran"):
        epicute.plan(chain, weight(chain, N, K))


@pytest.mark.usefixtures("uncompiled")
def test_plan_refuses_a_weight_packed_for_another_composition() -> None:
    packed = weight(Store(BF16), N, K)
    with pytest.raises(ArgumentError, match="order.*the composition"):
        epicute.plan(SwiGLU() >> Store(BF16), packed)


@pytest.mark.usefixtures("uncompiled")
def test_plan_reaches_the_compiler_with_what_is_right() -> None:
    with pytest.raises(CompileError, match="the compiler ran"):
        epicute.plan(Store(BF16), weight(Store(BF16), N, K))


def test_a_plan_prints_what_it_is() -> None:
    text = str(fake_plan(OUT, N, K, FP8))
    for part in ("ResidualAdd", "N = 192, K = 64", "128x192", "sm_90a", "registers"):
        assert re.search(re.escape(part), text), part
    assert isinstance(fake_plan(compose(Store(BF16)), N, K, BF16), Plan)


def test_expanded_cells_are_refused() -> None:
    """Two tokens in one place would race."""
    composition = PlaceKV(64) >> Store(torch.bfloat16)
    spec = ArgumentLayout.of(resolve(composition, 64))["cells"]
    cells = torch.zeros(4, 1, 1, 64, dtype=torch.bfloat16).expand(4, 16, 1, 64)
    with pytest.raises(ArgumentError, match="cells: got .*expected cells apart from each other"):
        reader(spec)(cells, 3, [])


def test_an_output_that_runs_into_x_is_refused() -> None:
    """It begins before x and ends in it."""
    launch = Launch(compose(Store(BF16)))
    memory = torch.zeros(M * N + M * K, dtype=BF16)
    launch.operands["out"] = memory[: M * N].view(M, N)
    launch.x = memory[M * N : M * N + M * K].view(M, K)
    launch.bind()
    start = (M * N // 2) // 8 * 8
    launch.x = memory[start : start + M * K].view(M, K)
    launch.refused("out", "apart from x")


@pytest.mark.parametrize("first", ["out", "x"])
def test_an_output_beside_x_is_taken(first: str) -> None:
    """Both are columns of one buffer, and share none; one column more and they do."""
    launch = Launch(compose(Store(BF16)))
    widths = {"out": N, "x": K}
    second = "x" if first == "out" else "out"
    start = -(-widths[first] // 8) * 8
    buffer = torch.zeros(M, start + widths[second] + 16, dtype=BF16)
    columns = {first: buffer[:, : widths[first]], second: buffer[:, start:][:, : widths[second]]}
    launch.x, launch.operands["out"] = columns["x"], columns["out"]
    assert launch.bind() is not None
    columns[second] = buffer[:, start - 8 :][:, : widths[second]]
    launch.x, launch.operands["out"] = columns["x"], columns["out"]
    launch.refused("out", "apart from x")


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 6))
def test_outputs_are_refused_exactly_where_they_share_bytes_with_x(
    x_at: int, out_at: int, rows: int
) -> None:
    launch = Launch(compose(Store(BF16)))
    pitch = 512
    memory = torch.zeros(40 * 8 * 40 + rows * pitch + 512, dtype=BF16)
    launch.x = memory.as_strided((rows, K), (pitch, 1), x_at * 8 * 8)
    launch.operands["out"] = memory.as_strided((rows, N), (pitch, 1), out_at * 8 * 8)
    bytes_of = {
        name: {first + r * pitch + c for r in range(rows) for c in range(width)}
        for name, first, width in (("x", x_at * 64, K), ("out", out_at * 64, N))
    }
    if bytes_of["x"] & bytes_of["out"]:
        launch.refused("out", "apart from x")
    else:
        assert launch.bind() is not None


def residual_and_output(step: int, shift: int, dtype: torch.dtype = BF16) -> Launch:
    """A launch whose residual and output are ``shift`` columns apart in one buffer of rows of ``step``."""
    launch = Launch(ResidualAdd() >> Store(BF16))
    buffer = torch.zeros(M * step + shift + N, dtype=BF16)
    launch.operands["residual"] = buffer.as_strided((M, N), (step, 1))
    launch.operands["out"] = buffer.as_strided((M, N), (step, 1), shift)
    return launch


@pytest.mark.parametrize(("shift", "refused"), [(0, False), (8, True), (N - 8, True), (N, False)])
def test_the_residual_may_be_the_output_or_lie_apart_from_it(shift: int, refused: bool) -> None:
    """One tile would read what another has written."""
    launch = residual_and_output(2 * N, shift)
    if refused:
        launch.refused("out", "apart from residual")
    else:
        assert launch.bind() is not None


def test_rows_of_another_length_share_too() -> None:
    launch = residual_and_output(2 * N, 0)
    launch.operands["out"] = launch.operands["residual"].as_strided((M, N), (N, 1))
    launch.refused("out", "apart from residual")


def test_two_outputs_in_one_place_are_refused() -> None:
    launch = Launch(Store(BF16, name="h") >> Store(BF16))
    first, second = launch.operands
    launch.operands[second] = launch.operands[first]
    with pytest.raises(ArgumentError, match=r"got .*expected memory apart from .*Fix: allocate"):
        launch.bind()


def test_a_weight_without_scales_is_told_of_dequantize() -> None:
    launch = Launch(OUT)
    del launch.operands["weight_scale"]
    launch.refused("weight_scale", "got nothing, and w has no scales, as its format is bf16.*drop")


@pytest.mark.parametrize(
    ("x", "fix"),
    [
        (torch.zeros(M, K + 1, dtype=BF16), "the weight reads 64 features"),
        (torch.zeros(M, K, dtype=FP16), "quantise x"),
        (torch.zeros(1, M, K, dtype=BF16), r"flatten it: x.reshape\(-1, 64\)"),
    ],
)
def test_the_fix_for_x_is_of_what_is_wrong_with_it(x: torch.Tensor, fix: str) -> None:
    launch = Launch(Store(BF16))
    launch.x = x
    launch.refused("x", f"Fix: {fix}")


def test_one_scale_for_all_rows_is_told_of_the_tensor_scale() -> None:
    launch = Launch(Dequantize("row") >> Store(BF16), FP8, "fp8")
    launch.operands["scale"] = torch.ones(1)
    launch.refused("scale", r"write Dequantize\('tensor'\)")


def test_a_cache_with_heads_before_tokens_is_told_of_the_view(qkv: Launch) -> None:
    qkv.operands["k_cells"] = torch.zeros(3, 1, 16, 64, dtype=BF16)
    qkv.refused("k_cells", r"pass k_cells=cache.transpose\(1, 2\)")
