"""A kernel's key holds what decides its code and nothing else, and a kernel travels to other processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import ResidualAdd, RowVector, Store, SwiGLU, policy
from epicute.errors import CompositionError
from epicute.gemm import GemmKernel, Schedule, kernel_for
from tests.gemm.compositions import DTYPES, SKELETONS, operations
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
