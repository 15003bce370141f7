"""Whole models on the CPU, from the PTX of their kernels: prefill, captured steps and what they leave in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.models import test_gpu_decode_model as on_gpu
from tests.models.folders import random_model, save
from tests.models.one_thread import single as single
from tests.models.test_decode_model import WIDE
from tests.ptx.device import emulated_device

pytestmark = pytest.mark.gates

SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
PAIRS = (
    ("bf16", "bf16"),
    ("bf16", "qk4pv8"),
    ("fp8", "fp8"),
    ("int4", "int4"),
    ("int4", "int4 mirror"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(LlamaConfig(**(WIDE | SIZES)))
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("weights", "cache"), PAIRS)
def test_steps_are_those_of_the_reference_backend(weights: str, cache: str, folder: Path) -> None:
    with emulated_device(multiprocessors=2):
        on_gpu.test_steps_are_those_of_the_reference_backend(weights, cache, folder)


def test_a_step_waits_for_nothing(folder: Path) -> None:
    with emulated_device(multiprocessors=2):
        on_gpu.test_a_step_waits_for_nothing(folder)
