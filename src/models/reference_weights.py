"""A layer's weights in the forms that the CPU runs, and the matrices that its products read.

    weights   projections                            gains of the norms in front
    exact     as the checkpoint has them             an operand of the norm
    bf16      rounded to BF16                        folded in before
    fp16      rounded to FP16                        folded in before
    fp8       E4M3 codes, a scale per feature        folded in before; an operand where codes are the checkpoint's
    int4      codes with a scale per group of 128    an operand: the activation is multiplied, and rounded to 16 bits

INT4 codes are those of the checkpoint rounded to nearest, or ones that were chosen before, by GPTQ for example. Their
values are exact in FP32, so that they are what a kernel multiplies by, to the bit; the padding of K that kernels read
is no part of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epicute.errors import require
from epicute.models.config import ModelConfig
from epicute.models.folder import layer_prefix, tensors_of
from epicute.models.layer_weights import gains_of
from epicute.quant.gptq import GptqResult
from epicute.quant.int4 import Int4Codes
from epicute.weights import Quantized, QuantizedInt4, Weight
from epicute.weights.importers.fp8 import fp8_weight

__all__ = ["FORMATS", "PARTS", "Given", "ReferenceLayer", "check_given", "read_layer"]

FORMATS = {
    "exact": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "int4": torch.bfloat16,
}
"""Form of the weights -> dtype of the residual stream and of every activation that is not FP8."""

PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Projections of the checkpoint that make up each fused one."""

NORMS = {"qkv": "input_layernorm.weight", "gate_up": "post_attention_layernorm.weight"}

Given = Mapping[str, GptqResult | Int4Codes | QuantizedInt4]
"""INT4 codes by the names that the checkpoint has for their weights."""


@dataclass(frozen=True, eq=False)
class ReferenceLayer:
    """A layer's weights.

    Attributes:
        weights: the parts of each fused projection, one above the other.
        gains: (hidden,) float32 of the norms in front of ``qkv`` and ``gate_up``, offset added; empty where they are
            folded in.
        bias: (q_width + 2 * kv_width,) float32, or None.
        q_gain, k_gain: (head_dim,) float32, or None.
        resident: whether matrices, once made, are kept.
    """

    weights: Mapping[str, Sequence[Quantized | Tensor]]
    gains: Mapping[str, Tensor]
    bias: Tensor | None
    q_gain: Tensor | None
    k_gain: Tensor | None
    resident: bool = False
    _matrices: dict[str, Tensor] = field(default_factory=dict)

    def matrix(self, name: str) -> Tensor:
        """(N, K) float64 of the fused projection ``name``: FP8 codes without their scales, else values."""
        if name in self._matrices:
            return self._matrices[name]
        found = torch.cat([_values(part) for part in self.weights[name]])
        if self.resident:
            self._matrices[name] = found
        return found

    def scale(self, name: str) -> Tensor | None:
        """(N,) float32 scales of FP8 codes; None in other forms."""
        parts = [p for p in self.weights[name] if isinstance(p, Quantized) and p.format == "fp8"]
        found = [part.scale.expand(len(part.codes)) for part in parts if part.scale is not None]
        return torch.cat(found) if found else None


def _values(part: Quantized | Tensor) -> Tensor:
    if isinstance(part, QuantizedInt4):
        part = part.dequantize()
    return (part.codes if isinstance(part, Quantized) else part).to(torch.float64)


def read_layer(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    index: int,
    form: str,
    given: Given,
    resident: bool,
) -> ReferenceLayer:
    """Layer ``index`` of a checkpoint in a form of ``FORMATS``; INT4 codes that are ``given`` are taken over.

    Raises:
        ArgumentError: non-finite weights.
    """
    prefix = layer_prefix(index)

    def vector(name: str, offset: float = 0.0) -> Tensor:
        return tensors[prefix + name].to(torch.float32) + offset

    norms = {name: vector(norm, config.gain_offset) for name, norm in NORMS.items()}
    folded = form in ("bf16", "fp16", "fp8") and gains_of(tensors, form) == "folded"
    parts: dict[str, list[Quantized | Tensor]] = {}
    for name, names in PARTS.items():
        parts[name] = []
        for part in names:
            full = f"{prefix}{part}.weight"
            if form == "exact":
                parts[name].append(tensors[full])
            elif full in given:
                parts[name].append(_taken(given[full], full))
            elif form == "fp8" and f"{full}_scale" in tensors:
                parts[name].append(fp8_weight(tensors[full], tensors[f"{full}_scale"], full))
            else:
                weight = Weight(tensors[full], full)
                if folded and name in norms:
                    weight = weight.fold_gain(norms[name])
                parts[name].append(weight.quantize(form))
    qk = config.qk_norm
    biases = [vector(f"{part}.bias") for part in PARTS["qkv"]] if config.bias else None
    return ReferenceLayer(
        parts,
        {} if folded else norms,
        None if biases is None else torch.cat(biases),
        vector("self_attn.q_norm.weight", config.gain_offset) if qk else None,
        vector("self_attn.k_norm.weight", config.gain_offset) if qk else None,
        resident,
    )


def _taken(given: GptqResult | Int4Codes | QuantizedInt4, name: str) -> QuantizedInt4:
    if isinstance(given, QuantizedInt4):
        return given
    codes = given.codes if isinstance(given, GptqResult) else given
    return QuantizedInt4.of(codes, name, gain_operand=True)


def check_given(given: Given, form: str, config: ModelConfig) -> None:
    """Refuse codes for another form, of no projection of the model, or of another shape.

    Raises:
        ArgumentError: naming them.
    """
    require(
        not given or form == "int4",
        "int4",
        f"codes of {len(given)} weights beside weights={form!r}",
        "codes for weights='int4' alone",
        "pass weights='int4', or leave them out",
    )
    known = {
        f"{layer_prefix(i)}{part}.weight"
        for i in range(config.layers)
        for names in PARTS.values()
        for part in names
    }
    unknown = sorted(set(given) - known)
    require(
        not unknown,
        "int4",
        unknown[:3],
        "names of projections, as 'model.layers.0.mlp.up_proj.weight'",
        "name codes as the checkpoint names their weights",
    )
    wanted = tensors_of(config)
    for name, one in given.items():
        found = _taken(one, name)
        shapes = tuple(found.codes.shape), wanted[name]
        require(
            shapes[0] == shapes[1],
            f"int4[{name!r}]",
            shapes[0],
            f"{shapes[1]}, as the model has it",
            "pass the codes of this weight",
        )
