"""The GPU architecture a kernel is compiled for.

A target is always stated, never taken from the DSL, whose own default without a GPU is another
architecture. The ``a`` variants are architecture-specific: code for ``sm_90a`` runs on compute
capability 9.0 and nowhere else.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from epicute.errors import UnsupportedError, require

__all__ = ["DEFAULT_TARGET", "Target"]

CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
"""Architectures served, and the one compute capability on which each runs."""

GPUS = {"sm_90a": "H100, H200, H20, GH200", "sm_100a": "B200, GB200"}


@dataclass(frozen=True)
class Target:
    """An architecture and its limits.

    Attributes:
        arch: ``"sm_90a"`` (Hopper) or ``"sm_100a"`` (Blackwell, data centre).
    """

    arch: str

    def __post_init__(self) -> None:
        require(
            self.arch in CAPABILITIES,
            "target",
            repr(self.arch),
            f"one of {', '.join(CAPABILITIES)}",
            "name a served architecture; Target.parse also reads forms like 'sm90' and '9.0'",
            UnsupportedError,
        )

    @staticmethod
    def parse(text: str) -> Target:
        """The target that ``text`` names: ``sm_90a``, ``SM90``, ``90a``, ``9.0``. Raises
        UnsupportedError."""
        found = re.fullmatch(r"(?:sm_?)?(\d+)(?:\.(\d))?a?", text.strip().lower())
        if found is None:
            return Target(text)
        major, minor = found.groups()
        return Target(f"sm_{major}{minor or ''}a")

    @staticmethod
    def detect(device: int | None = None) -> Target:
        """The target of a CUDA device, by default the current one; ``sm_90a`` where there is no
        GPU.

        Raises UnsupportedError, naming device and capability, for a GPU that no kernel here serves.
        """
        import torch

        if not torch.cuda.is_available():
            return DEFAULT_TARGET
        return _of_device(torch.cuda.current_device() if device is None else device)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability on which this target's code runs."""
        return CAPABILITIES[self.arch]

    @property
    def smem_per_block(self) -> int:
        """Shared memory one block may use, in bytes."""
        return 227 * 1024

    @property
    def registers(self) -> int:
        """32-bit registers of one SM, shared by the blocks that run on it."""
        return 64 * 1024

    @property
    def registers_per_thread(self) -> int:
        """Most registers a thread can address."""
        return 255

    def require_device(self, device: int | None = None) -> None:
        """Raise UnsupportedError unless code for this target runs on the device (default: the
        current one)."""
        found = Target.detect(device)
        require(
            found == self,
            "device",
            f"a GPU of {found.arch}",
            f"one of {self.arch} ({GPUS[self.arch]}), for which the kernel was compiled",
            f"compile for Target('{found.arch}')",
            UnsupportedError,
        )

    def __str__(self) -> str:
        return self.arch


DEFAULT_TARGET = Target("sm_90a")


@functools.cache
def _of_device(index: int) -> Target:
    import torch

    capability = torch.cuda.get_device_capability(index)
    for arch, served in CAPABILITIES.items():
        if capability == served:
            return Target(arch)
    raise UnsupportedError(
        f"device: cuda:{index} ({torch.cuda.get_device_name(index)}) has compute capability "
        f"{capability[0]}.{capability[1]}, expected 9.0 ({GPUS['sm_90a']}) or 10.0 "
        f"({GPUS['sm_100a']}). "
        "Fix: run on such a GPU; compiling, references and the CPU evaluation work anywhere"
    )
