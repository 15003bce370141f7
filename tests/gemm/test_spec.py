"""A kernel's key holds what decides its code and nothing else, and a kernel travels to other processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Columns,
    Dequantize,
    ResidualAdd,
    RowVector,
    Store,
    SwiGLU,
    policy,
)
from epicute.errors import ArgumentError, CompositionError, UnsupportedError
from epicute.gemm import GemmKernel, Schedule, explain, kernel_for, plan
from epicute.gemm.explain import TRADED, describe, report_text
from epicute.jit import Report, Target
from tests.gemm.compositions import DTYPES, SKELETONS, operations
from tests.gemm.planned import weight
from tests.gemm.policies import shifted, soft_cap

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
ROOT = Path(__file__).resolve().parents[2]


def kernel(**changes: Any) -> GemmKernel:
    options = {"composition": ResidualAdd() >> Store(BF16), "n": 256, "k": 128, **changes}
    return kernel_for(options.pop("composition"), **options)


CHANGES: list[dict[str, Any]] = [
    {"n": 512},
    {"k": 136},
    {"dtype": FP16},
    {"composition": ResidualAdd() >> Store(FP16)},
    {"composition": Store(BF16) >> Store(BF16, name="second")},
    {"composition": soft_cap(cap=30.0) >> Store(BF16)},
    {"composition": soft_cap(cap=31.0) >> Store(BF16)},
    {"dtypes": {"residual": FP32}},
    {"alignments": {"residual": 8}},
    {"schedule": Schedule(128, 128, 2, 4)},
    {"schedule": Schedule(128, 256, 1, 4)},
    {"schedule": Schedule(128, 256, 2, 3)},
    {"schedule": Schedule(256, 128, 2, 4)},
    {"schedule": Schedule(128, 128, 2, 4, slots=2)},
    {"dtype": FP8, "k": 512},
    {"dtype": FP8, "k": 512, "accumulate": "fast"},
]


def test_jc_03_every_choice_is_in_the_key() -> None:
    digests = {kernel(**change).key.digest for change in [{}, *CHANGES]}
    assert len(digests) == 1 + len(CHANGES)


def test_jc_04_the_same_request_is_the_same_kernel() -> None:
    assert kernel().key == kernel().key
    chosen = kernel().spec.schedule
    assert kernel(schedule=chosen).key == kernel().key
    assert kernel(expected_m=4096, schedule=chosen).key == kernel().key
    assert kernel(dtypes={"residual": BF16}, alignments={"out": 16}).key == kernel().key


@given(skeleton=st.sampled_from(sorted(SKELETONS)), dtype=st.sampled_from(sorted(DTYPES)))
def test_every_kernel_can_be_sent_to_a_compiling_process(skeleton: str, dtype: str) -> None:
    made = SKELETONS[skeleton].case(dtype, 200, 576).kernel()
    again = pickle.loads(pickle.dumps(made))
    assert again.key == made.key
    assert again.spec.problem == made.spec.problem


def test_operations_can_be_sent_too() -> None:
    for case in operations():
        assert pickle.loads(pickle.dumps(case.kernel())).key == case.kernel().key


def test_a_policy_of_a_function_comes_back_as_it_was() -> None:
    for made in (soft_cap(cap=30.0), soft_cap(cap=2.0, name="late"), shifted(name="a")):
        assert pickle.loads(pickle.dumps(made)) == made


def test_a_policy_inside_a_function_cannot_be_sent() -> None:
    @policy(bias=RowVector)
    def hidden(x, ctx):
        return x + ctx.bias

    with pytest.raises(
        pickle.PicklingError, match=r"hidden is not at tests.*as its decorator left"
    ):
        pickle.dumps(hidden())


def test_jc_01_keys_are_the_same_in_another_process() -> None:
    code = (
        "from tests.gemm.test_spec import CHANGES, kernel\n"
        "print(*(kernel(**c).key.digest for c in [{}, *CHANGES]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=None, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [kernel(**change).key.digest for change in [{}, *CHANGES]]


def test_k_is_padded_to_sixteen_bytes() -> None:
    pitches = {dtype: kernel(k=580, dtype=dtype).spec.pitch for dtype in (BF16, FP16)}
    assert pitches == {BF16: 584, FP16: 584}
    assert kernel_for(Store(BF16), n=64, k=584, dtype=FP8).spec.pitch == 592


def test_half_a_pair_is_refused() -> None:
    with pytest.raises((CompositionError, ValueError), match="even"):
        kernel(composition=SwiGLU() >> Store(BF16), n=255)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schedule": (128, 128)}, r"schedule: got \(128, 128\) \(tuple\), expected a Schedule"),
        ({"target": 90}, r"target: got 90 \(int\), expected a Target.*Fix: .*Target\('sm_90a'\)"),
        ({"target": "sm_80"}, "target: got 'sm_80a', expected one of sm_90a"),
        ({"dtype": "bf16"}, r"dtype: got 'bf16' \(str\).*Fix: write dtype=torch.bfloat16"),
        ({"dtype": "torch.float16"}, r"\(str\).*Fix: write dtype=torch.float16"),
        ({"dtype": "fp8"}, r"\(str\).*Fix: write dtype=torch.float8_e4m3fn"),
        ({"dtype": 16}, r"dtype: got 16 \(int\).*Fix: convert"),
        ({"n": "256"}, r"n: got '256' \(str\), expected an integer"),
        ({"k": True}, r"k: got True \(bool\), expected an integer"),
        ({"expected_m": 2.0}, r"expected_m: got 2.0 \(float\), expected a number of rows"),
        ({"expected_m": -1}, "expected_m: got -1, expected a number of rows"),
    ],
)
def test_a_value_of_another_type_is_named_with_it(change: dict[str, Any], said: str) -> None:
    with pytest.raises((ArgumentError, UnsupportedError), match=said) as caught:
        kernel(**change)
    assert "Fix: " in str(caught.value)


def test_plan_and_explain_say_the_same() -> None:
    for make in (
        lambda: plan(Store(BF16), weight(Store(BF16), 64, 64), schedule=(128, 128)),
        lambda: explain(Store(BF16), 64, 64, schedule=(128, 128)),
    ):
        with pytest.raises(ArgumentError, match=r"schedule: got \(128, 128\) \(tuple\)"):
            make()


@pytest.mark.parametrize("name", ["sm_90a", "SM90", "9.0"])
def test_a_target_by_name(name: str) -> None:
    assert kernel(target=name).target == Target("sm_90a")


def test_explain_names_its_options() -> None:
    with pytest.raises(
        ArgumentError, match=r"explain: got the option 'tile', .*Schedule"
    ) as caught:
        explain(Store(BF16), 256, 128, tile=3)
    for name in ("dtype", "target", "schedule", "alignments", "expected_m", "accumulate"):
        assert name in str(caught.value)


def test_the_report_of_a_gemm_says_that_registers_are_traded() -> None:
    report = Report(168, 0, 0, 1000, (), 1.5, "of the DSL")
    text = describe(kernel(dtype=FP8), report)
    assert "registers      168 at launch (24 and 240 once the warpgroups have traded)\n" in text
    assert "compiled in    1.50 s, ptxas of the DSL\n" in text
    assert "problem        N = 256, K = 128, float8_e4m3fn\n" in text
    assert report_text(replace(report, registers=None)).startswith("registers      unknown\n")


@pytest.mark.parametrize(
    ("origin", "place"), [("memory", "this process's memory"), ("disk", "the cache on disk")]
)
def test_the_report_says_that_code_came_from_a_cache(origin: str, place: str) -> None:
    text = report_text(Report(168, 0, 0, 1000, ("C1: said",), 1.5, "of the DSL"), origin)
    said = f"compiled in    1.50 s, ptxas of the DSL, before; this code came from {place}\n"
    assert said in text
    assert text.endswith("C1: said")


@pytest.mark.compile
def test_the_registers_are_those_of_the_kernel() -> None:
    from epicute.gemm.kernel import CONSUMER_REGISTERS, PRODUCER_REGISTERS

    assert (PRODUCER_REGISTERS, CONSUMER_REGISTERS) == TRADED


@pytest.mark.compile
def test_explain_twice_comes_from_memory() -> None:
    first, again = (explain(Store(BF16), 256, 128) for _ in range(2))
    assert "before; this code came from this process's memory" in again
    assert first.splitlines()[0] == again.splitlines()[0]


SCALED = Dequantize("row") >> Store(BF16)


@pytest.mark.parametrize(
    ("composition", "dtype"),
    [
        (SCALED, FP8),
        (Dequantize() >> Columns(a=(128, Store(BF16)), b=(128, Store(BF16))), FP8),
        (Columns(a=(128, SCALED), b=(128, SCALED)), FP8),
        (Columns(a=(128, SCALED), b=(128, Store(BF16))), BF16),
        (Store(BF16), BF16),
        (Dequantize("row", None) >> Store(BF16), BF16),
        (Bias() >> SCALED, BF16),
    ],
    ids=str,
)
def test_without_a_dtype_the_composition_decides(composition: Any, dtype: torch.dtype) -> None:
    """As ``epicute compile`` does: weight scales come with FP8 alone."""
    made = kernel_for(composition, n=256, k=128)
    assert made.spec.problem.dtype == dtype
    assert made.key == kernel_for(composition, n=256, k=128, dtype=dtype).key
