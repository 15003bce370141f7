"""Decoder layers in float64 on the CPU, through the references: what a machine without a GPU runs.

    weights   prefill: activations are rounded              one token a request (``decode``)
    exact     nowhere                                       nowhere
    bf16      where the kernels store them                  the same
    fp16      the same in FP16                              the same
    fp8       the same, and to E4M3 before a projection     to 16 bits alone
    int4      to 16 bits                                    the same

So ``exact`` is the model's own answer, and the others are the answer of the kernels that are planned for
``ModelConfig.block``, or of the few-row kernels, less the order of their additions. The forms themselves are those of
``models.reference_weights``.

INT4 records are read as attention kernels do: dequantised, in the rotated space, to which queries are turned and from
which outputs are turned back. ``decode`` reads nothing else, its own row included. A prefill whose records are all
there is has the rows of its own call as they were before, and earlier ones from the records; beside a main copy it
reads that.

An FP8 mirror is made of the rows of its main copy, and read by ``decode`` alone.

QK4PV8 records are written first and then read, by prefill and ``decode`` alike, and multiplied as their kernels do
(``models.reference_attention``); so is an FP8 cache in a prefill with ``attention="fp8/fp8"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epicute.attention.reference import attend
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
from epicute.models.folder import EMBEDDING, HEAD, NORM
from epicute.models.reference_attention import attend_mixed, multiplied_queries
from epicute.models.reference_records import (
    read_cells,
    read_int4,
    read_mirror,
    read_qk4pv8,
    slots_of,
    spans,
    table_of,
    write_qk4pv8,
)
from epicute.models.reference_weights import (
    FORMATS,
    Given,
    ReferenceLayer,
    check_given,
    read_layer,
)
from epicute.models.requests import Requests
from epicute.quant import DelayedScale, quantize_rows
from epicute.quant.calibration import calibrate
from epicute.quant.hadamard import hadamard
from epicute.quant.smoothing import Calibration

__all__ = ["FORMATS", "ReferenceBackend"]

RESIDENT = 4 << 30
"""Bytes that a model's matrices may take in float64 to be kept so, unless it is said whether they are."""

HEAD_ROWS = 16384
"""Rows of the head that are in float64 at a time."""

LONG = 1024
"""Tokens of a prompt from which on its logits are not held in memory, where there is another way."""

ATTENTION = ("bf16/bf16", "fp8/fp8")
"""Precision in which a prefill multiplies the rows of an FP8 cache: keys / probabilities and values."""


@dataclass(frozen=True, eq=False)
class _Stream:
    """An activation: values (M, K) as stored, and their FP8 codes with the scale where a projection reads those."""

    values: Tensor
    codes: Tensor | None = None
    scale: Tensor | None = None


class ReferenceBackend:
    """A ``Backend`` of ``epicute.models.llama`` for the CPU.

    With FP8 it holds the delayed scaling state of one request group. A site's first invocation chooses its scale from
    its own values, later ones from what was seen before.

    Attributes:
        dtype: of the residual stream.
        scales: FP8 with delayed scaling: the state of each layer's sites; else empty.
        entry: the state of what enters the first layer.
        observed: where given, what sees queries and keys of all tokens, as they are stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        weights: str = "bf16",
        scaling: str = "delayed",
        *,
        int4: Given | None = None,
        resident: bool | None = None,
        attention: str = "bf16/bf16",
        as_decoded: bool = False,
    ) -> None:
        """Take a checkpoint's layers, folded and quantised.

        Args:
            config: the model.
            tensors: the checkpoint by its Hugging Face names, as ``Folder`` has it.
            weights: a form of ``FORMATS``.
            scaling: of FP8 activations, "delayed" per tensor or "row".
            int4: INT4 codes of some weights, or all, by the checkpoint's names, chosen for the weights as the
                checkpoint has them (no gain folded in); the others are rounded to nearest, in symmetric groups of 128.
            resident: keep all matrices in float64, so that a step of few rows does not convert them again; None: where
                they take no more than 4 GiB.

        Raises:
            ArgumentError: no such form or scaling; non-finite weights; codes that belong to no weight.
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
        require(
            attention in ATTENTION,
            "attention",
            repr(attention),
            f"one of {ATTENTION}",
            "name how the rows of an FP8 cache are multiplied",
        )
        self.config, self.weights, self.scaling = config, weights, scaling
        self.attention, self.as_decoded = attention, as_decoded
        self.observed: Calibration | None = None
        self.dtype = FORMATS[weights]
        table = config.vocabulary * config.shape.hidden
        size = 8 * (config.layers * config.shape.weights + table)
        self._resident = size <= RESIDENT if resident is None else resident
        given = int4 or {}
        check_given(given, weights, config)
        self._layers = [
            read_layer(config, tensors, index, weights, given, self._resident)
            for index in range(config.layers)
        ]
        delayed = weights == "fp8" and scaling == "delayed"
        lasts = [index == config.layers - 1 for index in range(config.layers)]
        self.scales = [BlockScales.create(last=last) for last in lasts] if delayed else []
        self.entry = DelayedScale.create()
        self._calibrated: set[int] = set()
        self._inv_freq = config.inv_freq
        self._norm = tensors[NORM]
        self._embedding = self._kept(tensors[EMBEDDING])
        self._head = self._embedding if config.tied else self._kept(tensors[HEAD])
        self._head_parts: list[Tensor] = []

    # --- the seam ---

    @property
    def cache_dtype(self) -> torch.dtype:
        """That of the residual stream; float32 where it is exact. Any other is served too."""
        return torch.float32 if self.dtype == torch.float64 else self.dtype

    def check_cache(self, cache: KVCache) -> None:
        """Refuse none: every dtype and page size is served."""

    page_size = 64
    max_rows: int | None = None
    decodes = True

    def embed(self, ids: Tensor) -> _Stream:
        """What the first block reads, of token ids (M,); starts an invocation."""
        for site in (self.entry, *(s for block in self.scales for s in block.sites)):
            site.roll()
        return self._written(self._embedded(ids), self.entry, gain=self._layers[0].gains.get("qkv"))

    def block(self, layer: int, x: _Stream, requests: Requests, cache: KVCache) -> _Stream:
        """One layer; writes the keys and values of the rows that have a slot into ``cache``."""
        return self._block(layer, x, requests, cache, step=self.as_decoded)

    def decode(self, ids: Tensor, cache: KVCache) -> Tensor:
        """One token of each request, between ``cache.reserve_step`` and ``cache.end_step``, which it calls."""
        cache.begin_step(ids >= 0)
        live = cache.step_slots >= 0
        requests = Requests(
            positions=cache.step_positions.clamp_min(0),
            slots=cache.step_slots,
            kv_lengths=cache.step_lengths,
            starts=torch.arange(len(ids) + 1, dtype=torch.int32),
            page_table=cache.page_table,
        )
        embedded = torch.where(live[:, None], self._embedded(ids.clamp_min(0)), 0.0)
        x = _Stream(store(embedded, self.dtype))
        for layer in range(self.config.layers):
            x = self._block(layer, x, requests, cache, step=True)
        logits = self.logits(x, torch.arange(len(ids)))
        cache.end_step()
        return logits

    def prepare(self, cache: KVCache, batch_invariant: bool | None = None) -> None:
        """Nothing: a first step is like any."""

    def likeliest(self, logits: Tensor, cache: KVCache) -> Tensor:
        """(requests,) int64, the largest of each row; the first of equals."""
        return logits.argmax(dim=1)

    def logits(self, x: _Stream, rows: Tensor) -> Tensor:
        """(R, vocabulary) float32 of the rows (R,) of what the last block gave: final norm and head."""
        gain = self._norm.to(torch.float32) + self.config.gain_offset
        y = store(rms_norm(x.values[rows], gain, self.config.eps), self.dtype)
        return torch.cat([(y @ part.T).to(torch.float32) for part in self._wide_head()], 1)

    # --- its parts ---

    def _embedded(self, ids: Tensor) -> Tensor:
        """(M, hidden) float64 embedding rows, before they are stored."""
        x = self._embedding[ids].to(torch.float64)
        if not self.config.scaled_embedding:
            return x
        narrow = torch.float32 if self.weights == "exact" else self.dtype
        return x * torch.tensor(self.config.shape.hidden**0.5).to(narrow).to(torch.float64)

    def _wide_head(self) -> Iterable[Tensor]:
        """The head in float64, some rows at a time."""
        parts = (part.to(torch.float64) for part in self._head.split(HEAD_ROWS))
        if not self._resident:
            return parts
        self._head_parts = self._head_parts or list(parts)
        return self._head_parts

    def _block(
        self, layer: int, x: _Stream, requests: Requests, cache: KVCache, step: bool
    ) -> _Stream:
        """One layer: of a prefill, or of a ``step`` of one token a request, which multiplies 16-bit activations."""
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
        q = store(heads["q"], self.dtype).unflatten(1, (-1, shape.head_dim))
        rows = _place(cache, layer, heads["k"], heads["v"], requests.slots)
        if self.observed is not None:
            single = q.to(torch.float32), rows[0].to(torch.float32)
            self.observed.observe(layer, single[0], single[1], keep[:, 0])
        if cache.qk4pv8 is not None:
            write_qk4pv8(cache, layer, q, *rows, requests)
        attended = self._attended(q, rows, layer, requests, cache, step).flatten(1)
        attended = torch.where(keep, attended, 0.0)
        linear = self._linear("o", held, self._activation(attended, sites[0], step))
        x1 = output_projection(linear, x.values, self.dtype)["h"]
        x1 = torch.where(keep, x1, 0.0)
        stream = self._written(x1, sites[1], step, held.gains.get("gate_up"))
        linear, sumsq = self._normed("gate_up", held, stream)
        z = gate_up_projection(linear, sumsq, config.eps)["z"]
        linear = self._linear("down", held, self._activation(z, sites[2], step))
        y = down_projection(linear, stream.values, self.dtype)["h"]
        if layer == self.config.layers - 1:  # the final norm reads what is stored
            return _Stream(store(y, self.dtype))
        return self._written(y, sites[3], step, self._layers[layer + 1].gains.get("qkv"))

    def _sites(self, layer: int) -> Sequence[DelayedScale | None]:
        """The states of attention's output, x₁, z and y; none without delayed scaling."""
        return self.scales[layer].sites if self.scales else (None,) * 4

    def _kept(self, table: Tensor) -> Tensor:
        """Embedding or head in the dtype of the residual stream; as the checkpoint has it where that is exact."""
        return table if self.weights == "exact" else table.to(self.dtype)

    def _linear(self, name: str, held: ReferenceLayer, x: _Stream) -> Linear:
        values = x.values if x.codes is None else x.codes.to(torch.float64)
        return Linear(values, held.matrix(name), x.scale, held.scale(name))

    def _normed(self, name: str, held: ReferenceLayer, x: _Stream) -> tuple[Linear, Tensor | None]:
        """The product with a normalised activation, and the sums for its row factor where that stands behind it."""
        if name not in held.gains or x.codes is not None:  # codes have it in them
            return self._linear(name, held, x), partials(x.values)
        if self.weights == "exact":
            normed = rms_norm(x.values, held.gains[name], self.config.eps)
            return self._linear(name, held, _Stream(normed)), None
        scaled = store(x.values * held.gains[name].to(torch.float64), self.dtype)
        return self._linear(name, held, _Stream(scaled)), partials(x.values)

    def _rotary(self, positions: Tensor) -> Rotary:
        rope = self.config.rope
        return Rotary(
            positions, self._inv_freq, rope.head_dim, rope.rotary_dim, magnitude=rope.magnitude
        )

    def _attended(
        self,
        q: Tensor,
        rows: tuple[Tensor, Tensor],
        layer: int,
        requests: Requests,
        cache: KVCache,
        step: bool,
    ) -> Tensor:
        """(M, heads, head_dim) float64 of queries like it; NaN in rows of no request.

        ``rows``: keys and values (M, kv_heads, head_dim) of the same tokens, before they were written.
        """
        found = torch.full_like(q, torch.nan)
        for request, (mine, total) in enumerate(spans(requests)):
            slots, some = slots_of(cache, requests, request, total), q[mine]
            if cache.qk4pv8 is not None:
                owner = int(cache.owners(table_of(requests))[request])
                found[mine] = self._over_qk4pv8(some, layer, cache, slots, owner, step)
            elif cache.int4 is not None and (step or cache.spec.int4 == "only"):
                own = None if step else (rows[0][mine], rows[1][mine])
                found[mine] = self._over_int4(some, own, layer, cache, slots)
            elif cache.fp8 is not None and step:
                found[mine] = self._plain(some, *read_mirror(cache, layer, slots))
            else:
                found[mine] = self._over_main(some, layer, cache, slots, step)
        return found

    def _over_main(
        self, q: Tensor, layer: int, cache: KVCache, slots: Tensor, step: bool
    ) -> Tensor:
        """One request's queries over the main copy at ``slots``."""
        k, v = read_cells(cache, layer, slots)
        if cache.k_scale is None or step or self.attention == "bf16/bf16":
            return self._plain(q, k, v)
        dim, window = self.config.shape.head_dim, self.config.window
        q = multiplied_queries(q.to(torch.float32), wide=False)
        return attend_mixed(q, k, v, scale=dim**-0.5, window=window)

    def _over_int4(
        self,
        q: Tensor,
        own: tuple[Tensor, Tensor] | None,
        layer: int,
        cache: KVCache,
        slots: Tensor,
    ) -> Tensor:
        """One request's queries over INT4 records; ``own``: what stands in for the records of the last tokens."""
        dim, format = self.config.shape.head_dim, cache.int4.format  # type: ignore[union-attr]
        turn = hadamard(dim, format.width) if format.width else torch.eye(dim, dtype=torch.float64)
        k, v = read_int4(cache, layer, slots if own is None else slots[: len(slots) - len(q)])
        if own is not None:
            k, v = torch.cat([k, own[0] @ turn]), torch.cat([v, own[1] @ turn])
        return self._plain(q @ turn, k, v) @ turn

    def _over_qk4pv8(
        self, q: Tensor, layer: int, cache: KVCache, slots: Tensor, owner: int, step: bool
    ) -> Tensor:
        """One request's queries over QK4PV8 records; keys are multiplied exactly in a step."""
        q, k, v, delta = read_qk4pv8(cache, layer, q, slots, owner, exact=step)
        dim, window = self.config.shape.head_dim, self.config.window
        return attend_mixed(q, k, v, delta, scale=dim**-0.5, window=window)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(Sq, heads, D) float64 attention of one request."""
        whole = LONG <= len(k) == len(q) and self.config.window is None
        if whole and bool(k.isfinite().all() and v.isfinite().all()):
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            return out[0].transpose(0, 1)
        return attend(q, k, v, window=self.config.window)[0]

    def _written(
        self, x: Tensor, site: DelayedScale | None, step: bool = False, gain: Tensor | None = None
    ) -> _Stream:
        """The residual stream as stored; its codes are those of the stored values, times the gain that their reader's
        weights do not have in them.
        """
        values = store(x, self.dtype)
        read = values if gain is None else values.to(torch.float32) * gain
        return self._coded(values, read, site, step)

    def _activation(self, x: Tensor, site: DelayedScale | None, step: bool) -> _Stream:
        """An activation that one projection reads; delayed scaling codes it before it is rounded to 16 bits."""
        stored = store(x, self.dtype)
        return self._coded(stored, x if self.scales else stored, site, step)

    def _coded(
        self, values: Tensor, source: Tensor, site: DelayedScale | None, step: bool
    ) -> _Stream:
        if self.weights != "fp8" or step:
            return _Stream(values)
        single = source.to(torch.float32)
        if site is None or not self.scales:
            return _Stream(values, *quantize_rows(single))
        if id(site) not in self._calibrated and single.numel():
            calibrate((site,), lambda: site.quantize(single), site.roll, most=1)
            if site.history.any():  # some row was a token
                self._calibrated.add(id(site))
        return _Stream(values, *site.quantize(single))


def _place(
    cache: KVCache, layer: int, k: Tensor, v: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Write keys and values of one layer where the cache keeps them, QK4PV8 records apart; gives the rows (M, kv_heads,
    head_dim) float64 that records are made of.
    """
    spec = cache.spec
    if not spec.recorded:
        for which, x in enumerate((k, v)):
            _place_main(cache, layer, which, x, slots)
    k, v = (store(x, spec.dtype).unflatten(1, (spec.kv_heads, spec.head_dim)) for x in (k, v))
    if cache.int4 is not None:
        cache.int4.write(layer, k.to(spec.dtype), v.to(spec.dtype), slots)
    if cache.fp8 is not None:
        cache.fp8.write(layer, k.to(spec.dtype), v.to(spec.dtype), slots)
    return k, v


def _place_main(cache: KVCache, layer: int, which: int, x: Tensor, slots: Tensor) -> None:
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
