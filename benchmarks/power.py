"""What the card's sensors say while a candidate runs: SM clock and power, by NVML.

A sensor that cannot be read, for want of the library (``nvidia-ml-py``), of the permission or of the
sensor itself, says nothing. It is never an error.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Reader", "Reading", "reader", "silent"]


@dataclass(frozen=True)
class Reading:
    """The sensors at one moment; None where one said nothing."""

    clock_mhz: float | None = None
    watts: float | None = None


Reader = Callable[[], Reading]


def silent() -> Reading:
    """A reader without sensors."""
    return Reading()


def reader() -> Reader:
    """Reads the sensors of torch's current device; ``silent`` where NVML does not know it."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        card = _card(nvml, torch.cuda.current_device())
    except Exception as error:  # whatever is missing, a benchmark runs without it
        print(f"clock and power are not recorded: {type(error).__name__}: {error}")
        return silent

    def read() -> Reading:
        return Reading(_said(_clock, nvml, card), _said(_power, nvml, card))

    return read


def _said(sensor: Callable[[Any, Any], float], nvml: Any, card: Any) -> float | None:
    """What a sensor says, if anything."""
    with suppress(Exception):
        found = float(sensor(nvml, card))
        return found if found > 0 else None
    return None


def _clock(nvml: Any, card: Any) -> float:
    """MHz."""
    return nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)


def _power(nvml: Any, card: Any) -> float:
    """Watts of this moment where the driver tells them, else what nvmlDeviceGetPowerUsage says.

    On recent cards that is the mean of a second, in which several candidates ran.
    """
    with suppress(Exception):
        (field,) = nvml.nvmlDeviceGetFieldValues(card, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn == nvml.NVML_SUCCESS and field.value.uiVal > 0:
            return field.value.uiVal / 1000
    return nvml.nvmlDeviceGetPowerUsage(card) / 1000


def _card(nvml: Any, index: int) -> Any:
    """NVML's handle of torch's device: NVML counts all cards, CUDA those it is shown.

    By UUID or PCI address; by index where torch tells neither.
    """
    told: Any = torch.cuda.get_device_properties(index)
    if hasattr(told, "uuid"):
        with suppress(Exception):  # a MIG instance has another UUID than its card
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{told.uuid}")
    if hasattr(told, "pci_bus_id"):
        place = f"{told.pci_domain_id:08x}:{told.pci_bus_id:02x}:{told.pci_device_id:02x}.0"
        return nvml.nvmlDeviceGetHandleByPciBusId(place)
    return nvml.nvmlDeviceGetHandleByIndex(_visible(index))


def _visible(index: int) -> int:
    """The index among all cards of a device that CUDA_VISIBLE_DEVICES shows as ``index``."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return int(shown[index]) if shown != [""] else index
