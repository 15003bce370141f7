"""The time below which no kernel on the card can run: arithmetic over its peak, or bytes over its
bandwidth.

Both rates are the H200 datasheet's, dense, at boost clocks. A board under its power limit reaches
about three quarters of the arithmetic peak on random data, and a read-only stream 4.4 TB/s, so a
fraction of the floor is a distance from the datasheet, not from what the card was seen to do.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BANDWIDTH",
    "BYTES",
    "FLOP_PER_CLOCK",
    "PEAK",
    "SENTENCE",
    "SMS",
    "Floor",
    "Gemm",
    "nominal_mhz",
    "peak_at",
]

PEAK = {"bf16": 989.5e12, "fp8": 1979e12}
"""Dense tensor-core rate in FLOP/s by the type of both operands."""

SMS = 132
"""Streaming multiprocessors of the card."""

FLOP_PER_CLOCK = {"bf16": 4096, "fp8": 8192}
"""Dense FLOP per clock of one SM's tensor cores by the type of both operands."""

BANDWIDTH = 4.8e12
"""Device memory bandwidth in bytes/s."""

BYTES = {"bf16": 2, "fp8": 1, "f32": 4}
"""Bytes of one element."""

SENTENCE = (
    "the larger of 2MNK over the dense tensor peak (BF16 989.5 TFLOP/s, FP8 1979 TFLOP/s, nominal "
    "at boost clocks) and of the bytes that must move (each input read once, each output written "
    "once) over 4.8 TB/s"
)


def peak_at(weights: str, mhz: float) -> float:
    """The dense peak in FLOP/s at an SM clock."""
    return SMS * FLOP_PER_CLOCK[weights] * mhz * 1e6


def nominal_mhz(weights: str) -> float:
    """The SM clock to which ``PEAK`` belongs."""
    return PEAK[weights] / peak_at(weights, 1.0)


@dataclass(frozen=True)
class Floor:
    """The two times in µs, and the larger of them."""

    flop_us: float
    byte_us: float

    @property
    def us(self) -> float:
        """The floor in µs."""
        return max(self.flop_us, self.byte_us)


@dataclass(frozen=True)
class Gemm:
    """D = epilogue(A·Bᵀ), A (M, K), B (N, K), both of type ``weights``."""

    M: int
    N: int
    K: int
    weights: str

    @property
    def flops(self) -> int:
        """Operations of the product; an epilogue's are not counted."""
        return 2 * self.M * self.N * self.K

    @property
    def input_bytes(self) -> int:
        """Bytes of both operands."""
        return (self.M + self.N) * self.K * BYTES[self.weights]

    def floor(self, epilogue_bytes: int) -> Floor:
        """Floor with ``epilogue_bytes`` read and written by the epilogue, outputs included."""
        moved = self.input_bytes + epilogue_bytes
        return Floor(self.flops / PEAK[self.weights] * 1e6, moved / BANDWIDTH * 1e6)
