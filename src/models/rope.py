"""Rotary frequencies: plain, linear, Llama-3 and YaRN, of whole heads or of their first channels.

Everything is computed in float64 and rounded once, to the float32 that the RoPE policy reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from epicute.epilogues import RoPE
from epicute.errors import ArgumentError, UnsupportedError, require

__all__ = ["KINDS", "Rope"]

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """How a model's heads rotate.

    Attributes:
        head_dim: channels of a head.
        rotary_dim: channels that rotate, from the first; halves of them are paired.
        theta: base of the frequencies.
        kind: "default", "linear", "llama3" or "yarn".
        factor: how much longer the context became; 1 for "default".
        original: context before that, in tokens.
        low, high: "llama3": wavelengths over original / low are scaled by the factor, those under original / high are
            kept, those between are blended.
        beta_fast, beta_slow: "yarn": channels that turn more often than beta_fast in the original context are kept,
            those that turn less often than beta_slow are scaled.
        truncate: "yarn": whether the ramp's ends are rounded outwards to whole channels.
        magnitude: factor on cosine and sine, a final value; 1 but for "yarn".
    """

    head_dim: int
    rotary_dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        require(
            self.kind in KINDS,
            "rope_type",
            repr(self.kind),
            f"one of {KINDS}",
            "use a checkpoint with one of these; frequencies that change with the length of a request are not served",
            UnsupportedError,
        )
        require(
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            "partial_rotary_factor",
            f"{self.rotary_dim} of {self.head_dim} channels",
            f"an even number of channels up to {self.head_dim}",
            "check the configuration",
        )
        for name, value, right in (
            ("rope_theta", self.theta, 1 < self.theta < math.inf),
            ("factor", self.factor, 1 <= self.factor < math.inf),
            ("attention_factor", self.magnitude, 0 < self.magnitude < math.inf),
            ("high_freq_factor", self.high, self.kind != "llama3" or 0 < self.low < self.high),
            (
                "original_max_position_embeddings",
                self.original,
                self.kind not in ("llama3", "yarn") or self.original > 0,
            ),
        ):
            expected = "theta over 1, factor from 1, low below high, positive lengths"
            require(right, f"rope_parameters[{name!r}]", value, expected, "check the configuration")

    @staticmethod
    def parse(parameters: Mapping[str, Any], head_dim: int, context: int) -> Rope:
        """From ``rope_parameters`` of a Hugging Face configuration, or its older ``rope_scaling`` with ``rope_theta``.

        Args:
            parameters: ``rope_theta``, ``rope_type`` (or ``type``), ``factor`` and so on.
            head_dim: channels of a head.
            context: ``max_position_embeddings``.

        Raises:
            UnsupportedError: another kind of scaling.
            ArgumentError: a value is missing or out of range.
        """
        kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
        share = parameters.get("partial_rotary_factor")
        rotary = head_dim if share is None else int(head_dim * share)
        theta = float(_given(parameters, "rope_theta", 10000.0))
        if kind not in KINDS or kind == "default":
            return Rope(head_dim, rotary, theta, kind)
        original = int(_given(parameters, "original_max_position_embeddings", context))
        scaled = parameters.get("factor")
        if scaled is None and kind == "yarn":
            scaled = context / original
        require(
            scaled is not None,
            "rope_parameters['factor']",
            scaled,
            f"how much longer {kind} makes the context",
            "check the configuration",
        )
        factor = float(scaled)  # type: ignore[arg-type]
        if kind == "linear":
            return Rope(head_dim, rotary, theta, kind, factor)
        if kind == "llama3":
            low, high = (_needed(parameters, f"{end}_freq_factor") for end in ("low", "high"))
            return Rope(head_dim, rotary, theta, kind, factor, original, low, high)
        return Rope(
            head_dim,
            rotary,
            theta,
            kind,
            factor,
            original,
            beta_fast=float(parameters.get("beta_fast") or 32),
            beta_slow=float(parameters.get("beta_slow") or 1),
            truncate=bool(_given(parameters, "truncate", True)),
            magnitude=_magnitude(parameters, factor),
        )

    @property
    def inv_freq(self) -> torch.Tensor:
        """(rotary_dim / 2,) float32."""
        channel = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64)
        plain = self.theta ** (-channel / self.rotary_dim)
        if self.kind in ("default", "linear"):
            return (plain / self.factor).to(torch.float32)
        kept = self._kept(plain) if self.kind == "llama3" else self._ramp()
        return (plain * kept + plain / self.factor * (1 - kept)).to(torch.float32)

    def _kept(self, plain: torch.Tensor) -> torch.Tensor:
        """Share of each frequency that Llama-3 leaves as it was."""
        turns = self.original * plain / (2 * math.pi)
        return ((turns - self.low) / (self.high - self.low)).clamp(0, 1)

    def _ramp(self) -> torch.Tensor:
        """Share of each frequency that YaRN leaves as it was: 1 at the fast end, 0 at the slow one."""

        def channel(turns: float) -> float:
            whole = math.log(self.original / (turns * 2 * math.pi))
            return self.rotary_dim * whole / (2 * math.log(self.theta))

        first, last = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.rotary_dim - 1)
        if first == last:
            last += 0.001
        pair = torch.arange(self.rotary_dim // 2, dtype=torch.float64)
        return 1 - ((pair - first) / (last - first)).clamp(0, 1)

    @property
    def policy(self) -> RoPE:
        """The policy that rotates so. Raises ArgumentError for sizes that it does not serve."""
        return RoPE(self.head_dim, self.rotary_dim, magnitude=self.magnitude)


def _given(parameters: Mapping[str, Any], name: str, default: Any) -> Any:
    value = parameters.get(name)
    return default if value is None else value


def _needed(parameters: Mapping[str, Any], name: str) -> float:
    value = parameters.get(name)
    if value is None:
        raise ArgumentError(
            f"rope_parameters[{name!r}]: got None, expected a number. Fix: check the configuration"
        )
    return float(value)


def _magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    """YaRN's final factor on cosine and sine: the one given, or what the paper derives from ``factor``."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def derived(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if above and below:
        return derived(float(above)) / derived(float(below))
    return derived(1.0)
