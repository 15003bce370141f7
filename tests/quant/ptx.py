"""The interpreter of ``tests.ptx`` under its first name."""

from __future__ import annotations

from tests.ptx import Emulated, Memory, Program, ptx_of

__all__ = ["Emulated", "Memory", "Program", "ptx_of"]
