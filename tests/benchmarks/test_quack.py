"""quack as a peer: asked for by name, told apart where it is missing, and added behind everything of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import gemm, peers
from benchmarks.data import Layer
from benchmarks.harness import Session
from benchmarks.timing import Timer

MakeLayer = Callable[[str], Layer]


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for the package; its calls."""
    calls: list[dict[str, Any]] = []

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **more: Any) -> torch.Tensor:
        calls.append({"a": a, "b": b, "out": out, **more})
        return torch.mm(a, b, out=out)

    package, interface = ModuleType("quack"), ModuleType("quack.gemm_interface")
    interface.gemm = multiply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", package)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    return calls


def test_it_multiplies_into_its_own_output(layer: MakeLayer, quack: list[dict[str, Any]]) -> None:
    small = layer("o")
    run = peers.quack_gemm(small)
    found = run(1)["out"]
    assert torch.equal(found, small.x[1] @ small.weight[1].t())
    (call,) = quack
    assert call["tuned"] is True
    assert call["out"].data_ptr() == found.data_ptr()
    assert call["out"].data_ptr() != run(0)["out"].data_ptr()


def test_where_it_is_missing_the_row_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, layer: MakeLayer
) -> None:
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", None)
    with pytest.raises(
        RuntimeError, match=f"pip install --no-deps {peers.QUACK}, or leave --quack"
    ):
        peers.quack_gemm(layer("o"))


@pytest.mark.usefixtures("cpu_plan")
@pytest.mark.parametrize("there", [True, False])
def test_it_is_added_last(
    there: bool,
    monkeypatch: pytest.MonkeyPatch,
    layer: MakeLayer,
    timer: Timer,
    quack: list[dict[str, Any]],
) -> None:
    if not there:
        monkeypatch.setitem(sys.modules, "quack.gemm_interface", None)
    small = layer("o")
    small.options = gemm.Options((), device="cpu", quack=True)
    session, added = Session(timer, rounds=1), []
    add = session.add
    monkeypatch.setattr(
        session, "add", lambda name, *rest: (added.append(name), add(name, *rest))[1]
    )
    monkeypatch.setattr(peers, "scaled_mm", lambda layer, fast: peers.cublas(layer))
    rows = gemm.measure(small, session)
    assert added[-1] == "quack-gemm"
    (bf16,) = (row for row in rows if row.case["weights"] == "bf16")
    assert ("quack-gemm" in bf16.peers_us) == there
    assert ("quack-gemm" in bf16.failed) != there
    assert bf16.ours_us is not None
