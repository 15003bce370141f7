"""What mixed-precision specs and schedules accept, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epicute import Target
from epicute.attention import AttentionSpec, kernel_for
from epicute.attention.mixed import (
    MIXED_ARGUMENTS,
    MIXED_LEGALITY,
    MixedSchedule,
    MixedSpec,
    choose_mixed,
    mixed_kernel_for,
    mixed_unsupported,
)
from epicute.attention.schedule import SMEM
from epicute.errors import ArgumentError, UnsupportedError
from tests.attention.mixed_cases import SPECS

TARGET = Target("sm_90a")


def test_bf16_is_the_plain_kernel() -> None:
    spec = MixedSpec(32, 8, 128, precision="bf16/bf16", window=300, page=16)
    found = mixed_kernel_for(spec, target=TARGET)
    plain = AttentionSpec(32, 8, 128, window=300, page=16)
    assert found == kernel_for(plain, target=TARGET)
    assert found.key.digest == kernel_for(plain, target=TARGET).key.digest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("precision", "int4/int4"),
        ("qk", "exact8"),
        ("pv", "three_level"),
        ("p_scale", 240),
        ("terms", 4),
        ("placement", "later"),
        ("window", 0),
        ("softcap", -1.0),
        ("kv_heads", 5),
    ],
)
def test_what_makes_no_sense(field: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"{field}: got"):
        MixedSpec(**{"heads": 32, "kv_heads": 8, "head_dim": 128, "page": 128} | {field: value})


@pytest.mark.parametrize(
    ("spec", "argument"),
    [
        (MixedSpec(32, 8, 96, page=128), "head_dim"),
        (MixedSpec(32, 8, 72, precision="fp8/fp8"), "head_dim"),
        (MixedSpec(32, 8, 128), "page"),
        (MixedSpec(32, 8, 128, page=16), "page"),
        (MixedSpec(32, 8, 128, precision="fp8/fp8", page=256), "page"),
        (MixedSpec(32, 8, 128, precision="fp8/fp8", terms=1), "terms"),
        (MixedSpec(32, 8, 128, page=128, dtype=torch.float8_e4m3fn), "dtype"),
        (MixedSpec(32, 8, 128, page=128, out_dtype=torch.float16), "out_dtype"),
        (MixedSpec(32, 8, 128, page=128, causal=False, window=5), "window"),
    ],
)
def test_qk_10_what_no_kernel_serves(spec: MixedSpec, argument: str) -> None:
    reason = mixed_unsupported(spec)
    assert reason is not None
    assert reason.startswith(f"{argument}: got")
    with pytest.raises(UnsupportedError, match=argument):
        mixed_kernel_for(spec, target=TARGET)


def test_another_target() -> None:
    with pytest.raises(UnsupportedError, match="sm_90a"):
        mixed_kernel_for(SPECS["fp8"], target=Target("sm_100a"))


def test_every_rule_has_a_reason() -> None:
    assert all(rule.reason and rule.expected for rule in MIXED_LEGALITY)


@pytest.mark.parametrize("name", SPECS)
def test_schedules_fit(name: str) -> None:
    spec = SPECS[name]
    schedule = choose_mixed(spec)
    schedule.check(spec)
    assert schedule.shared_memory(spec) <= SMEM
    assert schedule.cluster == (2 if spec.group % 2 == 0 else 1)
    few, some, many = schedule.registers
    assert 128 * (few + some + 2 * many) <= 65536


def test_schedules_that_do_not_fit() -> None:
    spec = SPECS["exact16"]
    with pytest.raises(ArgumentError, match="shared memory"):
        mixed_kernel_for(spec, target=TARGET, schedule=MixedSchedule(stages=4, v_stages=4))
    with pytest.raises(ArgumentError, match="cluster"):
        mixed_kernel_for(
            SPECS["exact16, heads of 64"], target=TARGET, schedule=MixedSchedule(cluster=2)
        )
    with pytest.raises(ArgumentError, match="registers"):
        MixedSchedule(registers=(40, 80, 216))
    with pytest.raises(ArgumentError, match="stages"):
        MixedSchedule(stages=1)


def test_keys_differ_with_every_field() -> None:
    spec = SPECS["exact16"]
    changes = [
        {"precision": "fp8/fp8", "terms": 0},
        {"qk": "fast8"},
        {"pv": "direct"},
        {"p_scale": 256},
        {"terms": 1},
        {"placement": "mma"},
        {"page": 64},
        {"causal": False},
        {"lse": False},
        {"packed": False},
    ]
    kernels = [mixed_kernel_for(replace(spec, **c), target=TARGET) for c in [{}, *changes]]
    assert len({k.key.digest for k in kernels}) == len(kernels)


def test_arguments_have_one_place_each() -> None:
    assert len(set(MIXED_ARGUMENTS)) == len(MIXED_ARGUMENTS)


def test_what_is_printed() -> None:
    text = str(SPECS["exact16, mma"])
    for part in ("nvfp4/fp8", "exact16", "two_level", "P 448", "2 terms of ΔS, mma", "page 32"):
        assert part in text
    assert "3 stages of K" in str(choose_mixed(SPECS["fp8"]))
