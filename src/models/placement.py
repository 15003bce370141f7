"""Where a model lives: a device as a caller names it, made definite."""

from __future__ import annotations

import torch

from epicute.errors import ArgumentError, UnsupportedError, require

__all__ = ["resolve_device"]


def resolve_device(given: torch.device | str | None) -> torch.device:
    """The CPU or one CUDA device with its index.

    Args:
        given: a device or its name. None: the current GPU where there is one, else the CPU. "cuda" is the GPU that is
            current now, and stays that one when another becomes current.

    Raises:
        ArgumentError: not the name of a device; a GPU beyond those that are there.
        UnsupportedError: another kind of device; a GPU where there is none.
    """
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"device: got {given!r}, expected 'cpu', 'cuda' or 'cuda:0'. Fix: name a device as torch.device does"
        ) from error
    require(
        device.type in ("cpu", "cuda"),
        "device",
        device,
        "a CUDA device or the CPU",
        "pass device='cpu'",
        UnsupportedError,
    )
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require(
        count > 0,
        "device",
        device,
        "'cpu', as PyTorch sees no GPU here",
        "check the driver and CUDA_VISIBLE_DEVICES, or pass device='cpu'",
        UnsupportedError,
    )
    index = torch.cuda.current_device() if device.index is None else device.index
    require(
        index < count,
        "device",
        device,
        f"'cuda:0' to 'cuda:{count - 1}'",
        "name a GPU that is there",
    )
    return torch.device("cuda", index)
