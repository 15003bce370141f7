"""Targets: what is served, and what is said about the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from epicute.errors import UnsupportedError
from epicute.jit import DEFAULT_TARGET, Target
from epicute.jit import target as target_module


@pytest.mark.parametrize("text", ["sm_90a", "SM_90a", "sm90", "90a", "9.0", " sm_90 "])
def test_parse(text: str) -> None:
    assert Target.parse(text) == Target("sm_90a")
    assert Target.parse("10.0") == Target("sm_100a")


@pytest.mark.parametrize("text", ["sm_80", "sm_120a", "10.3", "hopper", ""])
def test_an_unserved_architecture_is_refused_by_name(text: str) -> None:
    with pytest.raises(UnsupportedError, match=r"sm_90a, sm_100a"):
        Target.parse(text)


def test_limits() -> None:
    assert Target("sm_90a").smem_per_block == 232_448
    assert Target("sm_90a").registers == 65_536
    assert str(Target("sm_90a")) == "sm_90a"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Target("sm_90a").arch = "sm_100a"  # type: ignore[misc]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretend that the machine has GPUs of the given capabilities; the first is current."""

    def pretend(*capabilities: tuple[int, int]) -> None:
        def name(index: int) -> str:
            return f"GPU {index}"

        def capability(index: int) -> Any:
            return capabilities[index]

        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)

    target_module._of_device.cache_clear()
    yield pretend
    target_module._of_device.cache_clear()


def test_without_a_gpu_the_default_is_stated_and_is_hopper(gpu: Callable[..., None]) -> None:
    gpu()
    assert Target.detect() == DEFAULT_TARGET == Target("sm_90a")


def test_the_device_decides(gpu: Callable[..., None]) -> None:
    gpu((10, 0), (9, 0))
    assert Target.detect() == Target("sm_100a")
    assert Target.detect(1) == Target("sm_90a")
    Target("sm_90a").require_device(1)
    with pytest.raises(UnsupportedError, match="H100"):
        Target("sm_90a").require_device()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 3), (12, 0)])
def test_an_unserved_gpu_is_named_with_its_capability(
    capability: tuple[int, int], gpu: Callable[..., None]
) -> None:
    gpu(capability)
    with pytest.raises(UnsupportedError) as caught:
        Target.detect()
    assert "GPU 0" in str(caught.value)
    assert f"{capability[0]}.{capability[1]}" in str(caught.value)
