"""The card's sensors: the right card's, each by itself, and never an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import power
from benchmarks.power import Reading, silent

UUID = "c0ffee00-1234-5678-9abc-def012345678"


def refuse(*given: Any) -> Any:
    raise PermissionError("insufficient permissions")


class Nvml(SimpleNamespace):
    """pynvml of a machine with four cards; ``asked`` are the handles' names in order."""

    NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT, NVML_SUCCESS = 1, 186, 0

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.instant, self.status = 691234, 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return self._handle(uuid)

    def nvmlDeviceGetHandleByPciBusId(self, place: str) -> str:
        return self._handle(place)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self._handle(str(index))

    def _handle(self, name: str) -> str:
        self.asked.append(name)
        return name

    def nvmlDeviceGetClockInfo(self, card: str, kind: int) -> int:
        assert (card, kind) == (self.asked[-1], 1)
        return 1395

    def nvmlDeviceGetFieldValues(self, card: str, fields: list[int]) -> list[Any]:
        assert (card, fields) == (self.asked[-1], [186])
        value = SimpleNamespace(uiVal=self.instant)
        return [SimpleNamespace(nvmlReturn=self.status, value=value)]

    def nvmlDeviceGetPowerUsage(self, card: str) -> int:
        return 500000


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch tells of its current device, the second that it sees."""
    told = SimpleNamespace(uuid=UUID, pci_domain_id=0, pci_bus_id=0xAB, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: told}.__getitem__)
    return told


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, properties: SimpleNamespace) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_clock_and_power_of_the_card_of_that_uuid(nvml: Nvml) -> None:
    assert power.reader()() == Reading(1395.0, 691.234)
    assert nvml.asked == [f"GPU-{UUID}"]


def test_a_card_without_that_uuid_is_found_by_its_place(nvml: Nvml) -> None:
    nvml.nvmlDeviceGetHandleByUUID = refuse
    assert power.reader()() == Reading(1395.0, 691.234)
    assert nvml.asked == ["00000000:ab:01.0"]


@pytest.mark.parametrize(("shown", "index"), [("", "1"), ("2,3", "3"), (None, "1")])
def test_an_index_counts_the_cards_that_cuda_is_shown(
    shown: str | None,
    index: str,
    nvml: Nvml,
    properties: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in vars(properties).copy():
        delattr(properties, name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    power.reader()
    assert nvml.asked == [index]


@pytest.mark.parametrize(
    "older",
    [
        lambda nvml: setattr(nvml, "status", 3),
        lambda nvml: setattr(nvml, "instant", 0),
        lambda nvml: setattr(nvml, "nvmlDeviceGetFieldValues", refuse),
    ],
)
def test_without_instant_power_the_mean_is_taken(older: Callable[[Nvml], None], nvml: Nvml) -> None:
    older(nvml)
    assert power.reader()().watts == 500.0


def test_a_sensor_that_is_refused_leaves_the_other(nvml: Nvml) -> None:
    nvml.nvmlDeviceGetClockInfo = refuse
    assert power.reader()() == Reading(None, 691.234)
    del nvml.nvmlDeviceGetClockInfo
    nvml.nvmlDeviceGetPowerUsage = nvml.nvmlDeviceGetFieldValues = refuse
    assert power.reader()() == Reading(1395.0, None)


@pytest.mark.parametrize("missing", ["library", "initialisation", "card", "device"])
def test_what_is_missing_is_said_and_never_raised(
    missing: str, nvml: Nvml, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing == "library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    if missing == "initialisation":
        nvml.nvmlInit = refuse
    if missing == "card":
        nvml.nvmlDeviceGetHandleByUUID = nvml.nvmlDeviceGetHandleByPciBusId = refuse
    if missing == "device":
        monkeypatch.setattr(torch.cuda, "current_device", refuse)
    read = power.reader()
    assert read is silent
    assert read() == Reading()
    assert "not recorded" in capsys.readouterr().out
