"""A device as a caller names it, made definite; the GPUs are pretended."""

from __future__ import annotations

import pytest
import torch

from epicute.errors import ArgumentError, UnsupportedError
from epicute.models.placement import resolve_device


def pretend(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


def test_jc_12_cuda_is_the_gpu_that_is_current_and_stays_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, 4, current=2)
    for given in ("cuda", torch.device("cuda"), None):
        assert resolve_device(given) == torch.device("cuda", 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_device("cpu") == resolve_device(torch.device("cpu", 0)) == torch.device("cpu")
    with pytest.raises(ArgumentError, match=r"^device: got cuda:4, expected 'cuda:0' to 'cuda:3'"):
        resolve_device("cuda:4")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0)
    assert resolve_device(None) == torch.device("cpu")
    for given in ("cuda", "cuda:1"):
        with pytest.raises(
            UnsupportedError, match=f"^device: got {given}, expected 'cpu'.*device="
        ):
            resolve_device(given)


@pytest.mark.parametrize("given", ["gpu", "cuda:x", "", 1.5])
def test_what_names_no_device(given: object) -> None:
    with pytest.raises(ArgumentError, match="^device: got .*'cuda:0'"):
        resolve_device(given)  # type: ignore[arg-type]


def test_what_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    with pytest.raises(UnsupportedError, match="^device: got meta"):
        resolve_device("meta")
