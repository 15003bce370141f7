"""A decoder layer's weights as its kernels read them, from a checkpoint with Hugging Face's names.

    self_attn.{q,k,v}_proj   γ of input_layernorm folded in,          one below the other → qkv
    self_attn.o_proj                                                                      → o
    mlp.{gate,up}_proj       γ of post_attention_layernorm folded in, one below the other → gate_up
    mlp.down_proj                                                                         → down

Every shard is folded and quantised by itself, so that no output feature takes over another's scale.

Codes of a checkpoint cannot take a gain in. With ``gains="operand"`` they stay as they are, and the gains stand beside
them for whoever writes what they multiply: γ of post_attention_layernorm for ``o``, γ of the next layer's
input_layernorm for ``down``, the first layer's for the embedding.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

import torch

from epicute.errors import ArgumentError, require
from epicute.models.block_spec import PROJECTIONS, BlockSpec
from epicute.models.folder import layer_prefix
from epicute.models.gains import fold_gain
from epicute.models.packed_layer import PackedLayer
from epicute.models.shapes import projections
from epicute.weights import Packed, Quantized, Weight
from epicute.weights.importers.fp8 import fp8_weight

__all__ = ["LayerWeights", "build_layers", "gains_of"]

PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Projections of the checkpoint that make up each fused one."""

NORMS = {"qkv": "input_layernorm.weight", "gate_up": "post_attention_layernorm.weight"}
"""The norm whose gain a projection reads its input with."""

QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")

FIX = "build the weights with LayerWeights.build"

DERIVED = ("self_attn.rotary_emb.inv_freq",)
"""Buffers of old checkpoints that follow from the configuration and are not read."""

FP8 = torch.float8_e4m3fn
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class LayerWeights(PackedLayer):
    """The four packed projections, and what stands beside them.

    Attributes:
        spec: what they were packed for.
        qkv, o, gate_up, down: gains folded in, in the row orders of ``spec.compositions``.
        bias: (q_width + 2 * kv_width,) float32; None without.
        q_gain, k_gain: (head_dim,) float32, the spec's offset added; None without QK-norm.
        x_gain, x1_gain: (hidden,) float32, offset added, of the norms that x and x₁ are read with: the FP8 codes of
            either must have it in them. None where gains are folded in.
        y_gain: the same of what leaves, the next layer's ``x_gain``; None behind the last.
    """

    spec: BlockSpec
    qkv: Packed
    o: Packed
    gate_up: Packed
    down: Packed
    bias: torch.Tensor | None = None
    q_gain: torch.Tensor | None = None
    k_gain: torch.Tensor | None = None
    x_gain: torch.Tensor | None = None
    x1_gain: torch.Tensor | None = None
    y_gain: torch.Tensor | None = None

    def __post_init__(self) -> None:
        spec, sizes = self.spec, projections(self.spec.shape)
        for name in PROJECTIONS:
            packed: Packed = getattr(self, name)
            require(
                packed.shape == sizes[name] and packed.format == spec.format,
                name,
                f"{packed.format} {packed.shape}",
                f"{spec.format} {sizes[name]}",
                "build the weights with LayerWeights.build",
            )
            order = spec.compositions[name].row_order(sizes[name][0])
            packed.require_order(order, f"the {name} projection of this spec")
        self._check_vector("bias", spec.bias, sizes["qkv"][0], FIX)
        for name in ("q_gain", "k_gain"):
            self._check_vector(name, spec.qk_norm, spec.shape.head_dim, FIX)
        operand = spec.gains == "operand"
        for name in ("x_gain", "x1_gain", "y_gain"):
            wanted = operand and not (name == "y_gain" and spec.last)
            self._check_vector(name, wanted, spec.shape.hidden, FIX)

    @staticmethod
    def build(
        state: Mapping[str, torch.Tensor],
        spec: BlockSpec,
        prefix: str = "",
        *,
        device: torch.device | str | None = None,
        tied: Container[str] = (),
        copy: bool = False,
        following: str | None = None,
    ) -> LayerWeights:
        """Fold, quantise and pack one layer of a checkpoint.

        Args:
            state: tensors by their Hugging Face names; read one at a time, never written to.
            spec: the layer, its formats and whether it has a bias or QK-norm.
            prefix: of the layer's names, as ``"model.layers.3."``.
            device: where to work and where the result is; by default where each tensor is.
            tied: full names of weights that serve elsewhere too.
            copy: fold gains into copies of tied and of FP8 weights; see ``fold_gain``.
            following: prefix of the layer that reads what leaves, with ``gains="operand"``; None behind the last.

        A weight may be FP8 already, with ``<name>_scale`` beside it: one per tensor or one per output feature. Where no
        gain is to be folded its codes are kept, and with ``gains="operand"`` none is.

        Raises:
            ArgumentError: names that are missing, that the layer does not know, or with another shape or dtype; weights
                ``fold_gain`` refuses; non-finite values.
        """
        operand = spec.gains == "operand"
        require(
            (following is not None) == (operand and not spec.last),
            "following",
            repr(following),
            "the next layer's prefix" if operand and not spec.last else "None",
            "say it where gains are operands, of any layer but the last",
        )
        reader = _Reader(state, spec, prefix, device, tied, copy)
        reader.check_names()
        sizes = projections(spec.shape)
        packed = {}
        for name in PROJECTIONS:
            order = spec.compositions[name].row_order(sizes[name][0])
            packed[name] = reader.projection(name).pack(order)
        gains = [reader.head_gain(name) for name in QK_NORMS] if spec.qk_norm else [None, None]
        return LayerWeights(
            spec,
            **packed,
            bias=reader.bias() if spec.bias else None,
            q_gain=gains[0],
            k_gain=gains[1],
            x_gain=reader.norm_gain(NORMS["qkv"]) if operand else None,
            x1_gain=reader.norm_gain(NORMS["gate_up"]) if operand else None,
            y_gain=None
            if following is None
            else replace(reader, prefix=following).norm_gain(NORMS["qkv"]),
        )


def build_layers(
    state: Mapping[str, torch.Tensor],
    spec: BlockSpec,
    layers: int,
    device: torch.device | str | None = None,
) -> list[LayerWeights]:
    """All layers of a checkpoint, the last one with ``spec.last``; arguments, errors as of ``LayerWeights.build``."""
    found = []
    for index in range(layers):
        last = spec.format == "fp8" and index == layers - 1  # else it would be the same layer
        following = layer_prefix(index + 1) if spec.gains == "operand" and not last else None
        found.append(
            LayerWeights.build(
                state,
                replace(spec, last=last),
                layer_prefix(index),
                device=device,
                following=following,
            )
        )
    return found


def gains_of(state: Mapping[str, torch.Tensor], format: str) -> str:
    """Where the norms' gains of a checkpoint go, of weights in ``format``: ``BlockSpec.gains``.

    Codes that the checkpoint has keep what they are, so that gains are operands. Names alone are looked at.
    """
    coded = format == "fp8" and any(name.endswith("_proj.weight_scale") for name in state)
    return "operand" if coded else "folded"


@dataclass(frozen=True)
class _Reader:
    """One layer of a checkpoint."""

    state: Mapping[str, torch.Tensor]
    spec: BlockSpec
    prefix: str
    device: torch.device | str | None
    tied: Container[str]
    copy: bool

    @property
    def rows(self) -> dict[str, int]:
        """Output features of every projection of the checkpoint."""
        shape = self.spec.shape
        qkv = dict(zip(PARTS["qkv"], (shape.q_width, shape.kv_width, shape.kv_width), strict=True))
        up = dict.fromkeys(PARTS["gate_up"], shape.intermediate)
        return {**qkv, **up, **dict.fromkeys((*PARTS["o"], *PARTS["down"]), shape.hidden)}

    def check_names(self) -> None:
        """Refuse a layer with a tensor too few or one too many."""
        found = {n[len(self.prefix) :] for n in self.state if n.startswith(self.prefix)}
        wanted = {f"{part}.weight" for part in self.rows} | set(NORMS.values())
        wanted |= {f"{part}.bias" for part in PARTS["qkv"]} if self.spec.bias else set()
        wanted |= set(QK_NORMS) if self.spec.qk_norm else set()
        missing = sorted(wanted - found)
        scales = {f"{part}.weight_scale" for part in self.rows}
        extra = sorted(found - wanted - scales - set(DERIVED))
        if missing or extra:
            parts = [f"no {', '.join(missing)}"] if missing else []
            parts += [f"{', '.join(extra)} too many"] if extra else []
            raise ArgumentError(
                f"state[{self.prefix + '…'!r}]: got {' and '.join(parts)}, expected "
                f"{', '.join(sorted(wanted))}. Fix: {_names_fix(missing, extra)}"
            )

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of that shape, on the device."""
        found = self.state[self.prefix + name]
        require(
            tuple(found.shape) == shape,
            f"{self.prefix}{name}.shape",
            tuple(found.shape),
            f"{shape} for {self.spec.shape}",
            "check the LayerShape against the checkpoint's configuration",
        )
        return found if self.device is None else found.to(self.device)

    def vector(self, name: str, length: int) -> torch.Tensor:
        """A finite float vector, in its own dtype."""
        found = self.tensor(name, (length,))
        require(
            found.dtype in FLOATS,
            f"{self.prefix}{name}.dtype",
            found.dtype,
            ", ".join(map(str, FLOATS)),
            "cast it",
        )
        require(
            bool(found.isfinite().all()),
            f"{self.prefix}{name}",
            "non-finite values",
            "finite values",
            "check the checkpoint",
        )
        return found

    def projection(self, name: str) -> Quantized:
        """A fused projection: its shards folded and quantised each by itself, then one below the other."""
        norm = NORMS.get(name) if self.spec.gains == "folded" else None
        gain = None if norm is None else self.vector(norm, self.spec.shape.hidden)
        shards = [
            self._shard(part, projections(self.spec.shape)[name][1], gain) for part in PARTS[name]
        ]
        return Quantized.concat(shards, f"{self.prefix}{name}")

    def _shard(self, part: str, width: int, gain: torch.Tensor | None) -> Quantized:
        weight = self._weight(part, width)
        if gain is not None:
            folded = fold_gain(weight, gain, offset=self.spec.gain_offset, copy=self.copy)
            assert not isinstance(folded, Packed)
            weight = folded
        if isinstance(weight, Weight):
            return weight.quantize(self.spec.format)
        require(
            weight.format == self.spec.format,
            weight.name,
            f"{weight.format} codes",
            f"values to round to {self.spec.format}",
            'build with BlockSpec(format="fp8"), or decode the checkpoint first',
        )
        return weight

    def _weight(self, part: str, width: int) -> Weight | Quantized:
        """As the checkpoint has it: values, or FP8 codes with their scale."""
        name, rows = f"{part}.weight", self.rows[part]
        full, scale = self.prefix + name, f"{part}.weight_scale"
        values = self.tensor(name, (rows, width))
        scaled = self.prefix + scale in self.state
        require(
            scaled == (values.dtype == FP8),
            full,
            f"{values.dtype} {'with' if scaled else 'without'} {scale}",
            "FP8 codes with a scale, or values without",
            "check how the checkpoint was quantised",
        )
        if not scaled:
            return Weight(values, full, full in self.tied)
        return fp8_weight(values, self.state[self.prefix + scale], full)

    def bias(self) -> torch.Tensor:
        """The biases of q, k and v one after the other, in float32."""
        found = [self.vector(f"{part}.bias", self.rows[part]) for part in PARTS["qkv"]]
        return torch.cat([x.to(torch.float32) for x in found])

    def head_gain(self, name: str) -> torch.Tensor:
        """A head norm's gain with the offset, in float32 and memory of its own."""
        return self._offset(self.vector(name, self.spec.shape.head_dim))

    def norm_gain(self, name: str) -> torch.Tensor:
        """The same of a norm over the hidden size."""
        return self._offset(self.vector(name, self.spec.shape.hidden))

    def _offset(self, gain: torch.Tensor) -> torch.Tensor:
        return gain.to(torch.float32, copy=True) + self.spec.gain_offset


def _names_fix(missing: list[str], extra: list[str]) -> str:
    """What most likely mends a layer with these names too few and too many."""
    if set(NORMS.values()) <= set(missing):
        return "check the prefix, as 'model.layers.0.'"
    named = {name.rsplit(".", 1)[0] for name in extra if name.endswith(".bias")}
    if named and named <= set(PARTS["qkv"]):
        return "BlockSpec(bias=True)"
    if set(extra) >= set(QK_NORMS):
        return "BlockSpec(qk_norm=True)"
    if any(name.endswith(".bias") for name in missing):
        return "BlockSpec(bias=False) where the model has none"
    if any(name in QK_NORMS for name in missing):
        return "BlockSpec(qk_norm=False) where the model has none"
    return "give a layer of a Llama-style model under Hugging Face's names"
