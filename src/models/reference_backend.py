"""Decoder layers in float64 on the CPU, through the references: what a machine without a GPU runs.

    weights   projections                            activations are rounded
    exact     as the checkpoint has them             nowhere
    bf16      gain folded in, rounded to BF16        where the kernels store them
    fp16      the same in FP16                       the same
    fp8       gain folded in, E4M3 codes and scales  the same, and to E4M3 in front of every projection

So ``exact`` is the model's own answer, and the others are the answer of the kernels that are planned for
``ModelConfig.block``, less the order of their additions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epicute.attention.reference import Options, attend_batch
from epicute.epilogues.reference import place_kv, store
from epicute.errors import require
from epicute.gemm.reference import (
    Linear,
    Rotary,
    down_projection,
    gate_up_projection,
    output_projection,
    partials,
    qkv_projection,
    rms_norm,
)
from epicute.kv import split_slot
from epicute.kv.cache import KVCache
from epicute.models.block_state import BlockScales
from epicute.models.config import ModelConfig
from epicute.models.folder import EMBEDDING, HEAD, NORM, layer_prefix
from epicute.models.requests import Requests
from epicute.quant import DelayedScale, quantize_rows, scale_for
from epicute.weights import Quantized, Weight

__all__ = ["FORMATS", "ReferenceBackend"]

FORMATS = {
    "exact": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Form of the weights -> dtype of the residual stream and of every activation that is not FP8."""

PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
NORMS = {"qkv": "input_layernorm.weight", "gate_up": "post_attention_layernorm.weight"}

HEAD_ROWS = 16384
"""Rows of the head that are in float64 at a time."""


@dataclass(frozen=True, eq=False)
class _Stream:
    """An activation: values (M, K) as stored, and their FP8 codes with the scale where a projection reads those."""

    values: Tensor
    codes: Tensor | None = None
    scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer's weights; where the form is exact ``gains`` has the norms', else they are folded in."""

    weights: Mapping[str, Sequence[Quantized | Tensor]]
    gains: Mapping[str, Tensor]
    bias: Tensor | None
    q_gain: Tensor | None
    k_gain: Tensor | None


class ReferenceBackend:
    """A ``Backend`` of ``epicute.models.llama`` for the CPU.

    With FP8 it holds the delayed scaling state of one request group. A site's first invocation chooses its scale from
    its own values, later ones from what was seen before.

    Attributes:
        dtype: of the residual stream.
        scales: FP8 with delayed scaling: the state of each layer's sites; else empty.
        entry: the state of what enters the first layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        weights: str = "bf16",
        scaling: str = "delayed",
    ) -> None:
        """Take a checkpoint's layers, folded and quantised.

        Args:
            config: the model.
            tensors: the checkpoint by its Hugging Face names, as ``Folder`` has it.
            weights: a form of ``FORMATS``.
            scaling: of FP8 activations, "delayed" per tensor or "row".

        Raises:
            ArgumentError: no such form or scaling; non-finite weights.
        """
        require(
            weights in FORMATS,
            "weights",
            repr(weights),
            f"one of {tuple(FORMATS)}",
            "name the form that the weights are to have",
        )
        require(
            scaling in ("delayed", "row"),
            "scaling",
            repr(scaling),
            "'delayed' or 'row'",
            "name the granularity of activation scales",
        )
        self.config, self.weights, self.scaling = config, weights, scaling
        self.dtype = FORMATS[weights]
        self._layers = [self._read(tensors, index) for index in range(config.layers)]
        delayed = weights == "fp8" and scaling == "delayed"
        self.scales = [BlockScales.create() for _ in range(config.layers)] if delayed else []
        self.entry = DelayedScale.create()
        self._calibrated: set[int] = set()
        self._inv_freq = config.inv_freq
        self._norm = tensors[NORM]
        self._embedding = self._kept(tensors[EMBEDDING])
        self._head = self._embedding if config.tied else self._kept(tensors[HEAD])

    def _read(self, tensors: Mapping[str, Tensor], index: int) -> _Layer:
        prefix, config = layer_prefix(index), self.config

        def vector(name: str, offset: float = 0.0) -> Tensor:
            return tensors[prefix + name].to(torch.float32) + offset

        norms = {name: vector(norm, config.gain_offset) for name, norm in NORMS.items()}
        parts: dict[str, list[Quantized | Tensor]] = {}
        for name, names in PARTS.items():
            shards = [tensors[f"{prefix}{part}.weight"] for part in names]
            if self.weights == "exact":
                parts[name] = list(shards)
                continue
            values = [Weight(x, part) for x, part in zip(shards, names, strict=True)]
            if name in norms:
                values = [w.fold_gain(norms[name]) for w in values]
            parts[name] = [w.quantize(self.weights) for w in values]
        qk = config.qk_norm
        biases = [vector(f"{part}.bias") for part in PARTS["qkv"]] if config.bias else None
        return _Layer(
            parts,
            norms if self.weights == "exact" else {},
            None if biases is None else torch.cat(biases),
            vector("self_attn.q_norm.weight", config.gain_offset) if qk else None,
            vector("self_attn.k_norm.weight", config.gain_offset) if qk else None,
        )

    # --- the seam ---

    @property
    def cache_dtype(self) -> torch.dtype:
        """That of the residual stream; float32 where it is exact. Any other is served too."""
        return torch.float32 if self.dtype == torch.float64 else self.dtype

    page_size = 64
    max_rows: int | None = None

    def embed(self, ids: Tensor) -> _Stream:
        """What the first block reads, of token ids (M,); starts an invocation."""
        for site in (self.entry, *(s for block in self.scales for s in block.sites)):
            site.roll()
        x = self._embedding[ids].to(torch.float64)
        if self.config.scaled_embedding:
            narrow = torch.float32 if self.weights == "exact" else self.dtype
            x = x * torch.tensor(self.config.shape.hidden**0.5).to(narrow).to(torch.float64)
        return self._written(x, self.entry)

    def block(self, layer: int, x: _Stream, requests: Requests, cache: KVCache) -> _Stream:
        """One layer; writes the keys and values of the rows that have a slot into ``cache``."""
        held, sites = self._layers[layer], self._sites(layer)
        config, shape = self.config, self.config.shape
        keep = (requests.slots >= 0)[:, None]
        linear, sumsq = self._normed("qkv", held, x)
        heads = qkv_projection(
            Linear(linear.x, linear.weight, linear.scale, linear.weight_scale, held.bias),
            (shape.q_width, shape.kv_width, shape.kv_width),
            self._rotary(requests.positions),
            sumsq,
            config.eps,
            held.q_gain,
            held.k_gain,
        )
        for which, name in enumerate("kv"):
            _place(cache, layer, which, heads[name], requests.slots)
        attended = self._attend(store(heads["q"], self.dtype), layer, requests, cache)
        activation = self._activation(torch.where(keep, attended, 0.0), sites[0])
        linear = self._linear("o", held, activation)
        x1 = output_projection(linear, x.values, self.dtype)["h"]
        stream = self._written(torch.where(keep, x1, 0.0), sites[1])
        linear, sumsq = self._normed("gate_up", held, stream)
        z = gate_up_projection(linear, sumsq, config.eps)["z"]
        linear = self._linear("down", held, self._activation(z, sites[2]))
        y = down_projection(linear, stream.values, self.dtype)["h"]
        return self._written(y, sites[3])

    def logits(self, x: _Stream, rows: Tensor) -> Tensor:
        """(R, vocabulary) float32 of the rows (R,) of what the last block gave: final norm and head."""
        gain = self._norm.to(torch.float32) + self.config.gain_offset
        y = store(rms_norm(x.values[rows], gain, self.config.eps), self.dtype)
        parts = self._head.split(HEAD_ROWS)
        return torch.cat([(y @ part.to(torch.float64).T).to(torch.float32) for part in parts], 1)

    # --- its parts ---

    def _sites(self, layer: int) -> Sequence[DelayedScale | None]:
        """The states of attention's output, x₁, z and y; none without delayed scaling."""
        return self.scales[layer].sites if self.scales else (None,) * 4

    def _kept(self, table: Tensor) -> Tensor:
        """Embedding or head in the dtype of the residual stream; as the checkpoint has it where that is exact."""
        return table if self.weights == "exact" else table.to(self.dtype)

    def _linear(self, name: str, held: _Layer, x: _Stream) -> Linear:
        parts = held.weights[name]
        weight = torch.cat([_codes(part).to(torch.float64) for part in parts])
        scales = [part.scale for part in parts if isinstance(part, Quantized)]
        given = [scale for scale in scales if scale is not None]
        return Linear(
            x.values if x.codes is None else x.codes.to(torch.float64),
            weight,
            x.scale,
            torch.cat(given) if given else None,
        )

    def _normed(self, name: str, held: _Layer, x: _Stream) -> tuple[Linear, Tensor | None]:
        """The product with a normalised activation, and the sums for its row factor where that stands behind it."""
        if name in held.gains:
            normed = rms_norm(x.values, held.gains[name], self.config.eps)
            return self._linear(name, held, _Stream(normed)), None
        return self._linear(name, held, x), partials(x.values)

    def _rotary(self, positions: Tensor) -> Rotary:
        rope = self.config.rope
        return Rotary(
            positions, self._inv_freq, rope.head_dim, rope.rotary_dim, magnitude=rope.magnitude
        )

    def _attend(self, q: Tensor, layer: int, requests: Requests, cache: KVCache) -> Tensor:
        """(M, q_width) float64; NaN in rows of no request."""
        packed = requests.starts is not None
        shape = (-1,) if packed else (requests.count, -1)
        heads = q.reshape(*shape, self.config.shape.heads, self.config.shape.head_dim)
        where = {"q_starts": requests.starts} if packed else {"q_lengths": requests.lengths}
        out, _ = attend_batch(
            Options(window=self.config.window, page=cache.spec.page_size, packed=packed),
            heads,
            **cache.attention(layer),
            **where,
            kv_lengths=requests.kv_lengths,
            page_table=requests.page_table,
        )
        return out.reshape(q.shape)

    def _written(self, x: Tensor, site: DelayedScale | None) -> _Stream:
        """The residual stream as stored; its codes are those of the stored values."""
        values = store(x, self.dtype)
        return self._coded(values, values, site)

    def _activation(self, x: Tensor, site: DelayedScale | None) -> _Stream:
        """An activation that one projection reads; delayed scaling codes it before it is rounded to 16 bits."""
        stored = store(x, self.dtype)
        return self._coded(stored, x if self.scales else stored, site)

    def _coded(self, values: Tensor, source: Tensor, site: DelayedScale | None) -> _Stream:
        if self.weights != "fp8":
            return _Stream(values)
        single = source.to(torch.float32)
        if site is None or not self.scales:
            return _Stream(values, *quantize_rows(single))
        if id(site) not in self._calibrated and single.numel():
            amax = torch.where(single.isfinite(), single.abs(), 0.0).amax()
            site.scale_used.copy_(scale_for(amax))
            self._calibrated.add(id(site))
        return _Stream(values, *site.quantize(single))


def _codes(part: Quantized | Tensor) -> Tensor:
    return part.codes if isinstance(part, Quantized) else part


def _place(cache: KVCache, layer: int, which: int, x: Tensor, slots: Tensor) -> None:
    """Write keys (0) or values (1) of one layer, through a copy of the pages that are touched."""
    pool = cache.values(layer) if which else cache.keys(layer)
    scale = cache.v_scale if which else cache.k_scale
    page_size = cache.spec.page_size
    kept = (slots >= 0) & (slots < pool.shape[0] * page_size)
    page, token = split_slot(slots[kept], page_size)
    pages, local = page.unique(return_inverse=True)
    if not pages.numel():
        return
    near = torch.full_like(slots, -1)
    near[kept] = local * page_size + token
    head_scale = None if scale is None else scale[layer]
    placed = place_kv(x, near, pool[pages], cache.spec.dtype, head_scale)
    pool[page, token] = placed.cells[local, token].to(pool.dtype)
    cache.saturated[layer, which] += placed.saturated
    cache.nans[layer, which] += placed.nans
