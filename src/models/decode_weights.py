"""A layer's weights as the decode step streams them: four projections in fragment order, and what stands beside them.

BF16, FP16 and FP8 weights are those of a prefill, packed anew. INT4 weights are the checkpoint's values rounded to
nearest, or codes that were chosen before, by GPTQ or by others; none of them has a norm's gain in it, so that gains are
operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from epicute.decode import pack_few_rows
from epicute.errors import ArgumentError, require
from epicute.models.block_spec import PROJECTIONS, BlockSpec
from epicute.models.decode_block_spec import DecodeBlockSpec
from epicute.models.decode_cache import CacheForm
from epicute.models.layer_weights import NORMS, PARTS, QK_NORMS, LayerWeights
from epicute.models.packed_layer import PackedLayer
from epicute.models.shapes import projections
from epicute.quant.gptq import GptqResult
from epicute.quant.int4 import Int4Codes
from epicute.weights import FragmentPacked, Quantized, QuantizedInt4, Weight

__all__ = ["DecodeWeights", "Given"]

Given = Mapping[str, GptqResult | Int4Codes | QuantizedInt4]
"""INT4 codes by the names that the checkpoint has for their weights."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

FIX = "build the weights with DecodeWeights.of or DecodeWeights.int4"


@dataclass(frozen=True, eq=False)
class DecodeWeights(PackedLayer):
    """The four projections, and what stands beside them. Make it with ``of`` or ``int4``.

    Attributes:
        spec: what they were packed for.
        qkv, o, gate_up, down: in the row orders of ``spec.compositions``.
        bias: (q_width + 2 * kv_width,) float32; None without.
        q_gain, k_gain: (head_dim,) float32, the spec's offset added; None without QK-norm.
        x_gain, x1_gain: (hidden,) float32, offset added, of the norms that x and x₁ are read with; None where they are
            in the weights.
    """

    spec: DecodeBlockSpec
    qkv: FragmentPacked
    o: FragmentPacked
    gate_up: FragmentPacked
    down: FragmentPacked
    bias: torch.Tensor | None = None
    q_gain: torch.Tensor | None = None
    k_gain: torch.Tensor | None = None
    x_gain: torch.Tensor | None = None
    x1_gain: torch.Tensor | None = None

    def __post_init__(self) -> None:
        spec, block = self.spec, self.spec.block
        sizes = projections(block.shape)
        for name in PROJECTIONS:
            packed: FragmentPacked = getattr(self, name)
            require(
                packed.shape == sizes[name] and packed.format == spec.weights,
                name,
                f"{packed.format} {packed.shape}",
                f"{spec.weights} {sizes[name]}",
                "build the weights with DecodeWeights.of or DecodeWeights.int4",
            )
            order = spec.compositions[name].row_order(sizes[name][0])
            packed.require_order(order, f"the {name} projection of this spec")
            require(
                not packed.gain_operand or spec.norm_gain or name not in NORMS,
                name,
                "codes that have not taken up the norm's gain",
                "gains as operands: norm_gain=True",
                "describe the step with DecodeBlockSpec.of(…, norm_gain=True)",
            )
        hidden, width = block.shape.hidden, block.shape.head_dim
        for name, wanted, length in (
            ("bias", block.bias, sizes["qkv"][0]),
            ("q_gain", block.qk_norm, width),
            ("k_gain", block.qk_norm, width),
            ("x_gain", spec.norm_gain, hidden),
            ("x1_gain", spec.norm_gain, hidden),
        ):
            self._check_vector(name, wanted, length, FIX)

    def reading(self, cache: CacheForm) -> DecodeWeights:
        """The same weights beside another cache.

        Raises:
            ArgumentError: a cache beside which rows stand in another order.
        """
        mine = self.spec
        spec = DecodeBlockSpec.of(mine.block, cache, mine.weights, mine.norm_gain)
        return replace(self, spec=spec)

    @staticmethod
    def of(layer: LayerWeights, cache: CacheForm | None = None) -> DecodeWeights:
        """A prefill's weights, bit for bit, in the order in which a step streams them. Waits for the device.

        Args:
            layer: in BF16, FP16 or FP8.
            cache: what the step reads; by default what the prefill writes, in pages of 64 tokens.
        """
        block = layer.spec
        if cache is None:
            plain = {torch.float8_e4m3fn: "fp8", torch.float16: "fp16"}
            cache = CacheForm(plain.get(block.cache, "bf16"))
        spec = DecodeBlockSpec.of(block, cache)
        packed: dict[str, Any] = {
            name: pack_few_rows(getattr(layer, name).unpack(), spec.compositions[name])
            for name in PROJECTIONS
        }
        return DecodeWeights(
            spec,
            **packed,
            bias=layer.bias,
            q_gain=layer.q_gain,
            k_gain=layer.k_gain,
            x_gain=layer.x_gain if spec.norm_gain else None,
            x1_gain=layer.x1_gain if spec.norm_gain else None,
        )

    @staticmethod
    def int4(
        state: Mapping[str, torch.Tensor],
        block: BlockSpec,
        cache: CacheForm | None = None,
        prefix: str = "",
        *,
        given: Given | None = None,
        device: torch.device | str | None = None,
    ) -> DecodeWeights:
        """A layer of a checkpoint on INT4 grids, gains as operands. Waits for the device.

        Args:
            state: tensors by their Hugging Face names; read one at a time, never written to.
            block: the layer; of its format the dtype of activations counts.
            cache: what the step reads; by default 16 bits in pages of 64 tokens.
            prefix: of the layer's names, as ``"model.layers.3."``.
            given: codes of some weights, or all, by their full names, as an importer or GPTQ gives them; those of q, k
                and v, and of gate and up, must have the same group. Other weights are rounded to nearest in symmetric
                groups of 128.
            device: where to work and where the result is; by default where each tensor is.

        Raises:
            ArgumentError: names that are missing, tensors of another shape or dtype, non-finite values; codes of
                another shape, or of different groups within a projection.
        """
        reader = _Reader(state, block, prefix, given or {}, device)
        form = CacheForm("fp16" if block.format == "fp16" else "bf16") if cache is None else cache
        spec = DecodeBlockSpec.of(block, form, "int4", True)
        packed: dict[str, Any] = {
            name: pack_few_rows(reader.projection(name), spec.compositions[name])
            for name in PROJECTIONS
        }
        vectors = {"x_gain": NORMS["qkv"], "x1_gain": NORMS["gate_up"]}
        found: dict[str, Any] = {
            name: reader.gain(norm, block.shape.hidden) for name, norm in vectors.items()
        }
        if block.qk_norm:
            for name, norm in zip(("q_gain", "k_gain"), QK_NORMS, strict=True):
                found[name] = reader.gain(norm, block.shape.head_dim)
        if block.bias:
            found["bias"] = reader.bias()
        return DecodeWeights(spec, **packed, **found)


@dataclass(frozen=True)
class _Reader:
    """One layer of a checkpoint that becomes INT4."""

    state: Mapping[str, torch.Tensor]
    block: BlockSpec
    prefix: str
    given: Given
    device: torch.device | str | None

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A finite tensor of floats of that shape, on the device."""
        full = self.prefix + name
        if full not in self.state:
            raise ArgumentError(
                f"state: got no {full}, expected a layer of a Llama-style model under Hugging Face's names. "
                "Fix: check the prefix, as 'model.layers.0.'"
            )
        found = self.state[full]
        require(
            tuple(found.shape) == shape and found.dtype in FLOATS,
            full,
            f"{tuple(found.shape)} {found.dtype}",
            f"{shape} of {', '.join(map(str, FLOATS))}",
            "check the LayerShape against the checkpoint; decode quantised weights, or pass their codes as given",
        )
        found = found if self.device is None else found.to(self.device)
        require(
            bool(found.isfinite().all()), full, "non-finite values", "finite ones", "check the file"
        )
        return found

    def gain(self, name: str, length: int) -> torch.Tensor:
        """(length,) float32 with the spec's offset, in memory of its own."""
        return self.tensor(name, (length,)).to(torch.float32, copy=True) + self.block.gain_offset

    def bias(self) -> torch.Tensor:
        """The biases of q, k and v one after the other, in float32."""
        widths = self._rows("qkv")
        parts = zip(PARTS["qkv"], widths, strict=True)
        return torch.cat([self.tensor(f"{part}.bias", (n,)).float() for part, n in parts])

    def projection(self, name: str) -> Quantized:
        """A fused projection: its parts one below the other."""
        depth = projections(self.block.shape)[name][1]
        parts = zip(PARTS[name], self._rows(name), strict=True)
        found = [self._part(f"{part}.weight", (rows, depth)) for part, rows in parts]
        return QuantizedInt4.concat(found, f"{self.prefix}{name}")

    def _rows(self, name: str) -> tuple[int, ...]:
        shape = self.block.shape
        if name == "qkv":
            return (shape.q_width, shape.kv_width, shape.kv_width)
        return (shape.intermediate,) * 2 if name == "gate_up" else (shape.hidden,)

    def _part(self, name: str, shape: tuple[int, int]) -> QuantizedInt4:
        full = self.prefix + name
        if full not in self.given:
            found = Weight(self.tensor(name, shape), full).quantize("int4")
            assert isinstance(found, QuantizedInt4)
            return replace(found, gain_operand=True)
        given = self.given[full]
        if not isinstance(given, QuantizedInt4):
            given = QuantizedInt4.of(given.codes if isinstance(given, GptqResult) else given, full)
        require(
            tuple(given.codes.shape) == shape,
            f"given[{full!r}]",
            tuple(given.codes.shape),
            f"{shape}, as the layer has it",
            "pass the codes of this weight",
        )
        # Whether or not their maker knew of a gain, the checkpoint's own is multiplied in beside them.
        found = replace(given, gain_operand=True)
        if self.device is None:
            return found
        zero = None if found.zero is None else found.zero.to(self.device)
        codes, scale = found.codes.to(self.device), found.scales.to(self.device)
        return replace(found, codes=codes, scale=scale, zero=zero)
