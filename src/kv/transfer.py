"""What the host tells the device while kernels are running: copies that wait for nothing."""

from __future__ import annotations

import torch

__all__ = ["to_device"]


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``x`` on ``device``. A host tensor goes to a GPU behind the queued work of the current stream.

    Pageable memory would be copied once the stream has drained, so it goes by way of pinned memory, which PyTorch keeps
    until the copy is done.
    """
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
