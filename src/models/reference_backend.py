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
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epicute.attention.reference import Options, attend, attend_batch
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
from epicute.kv import slots_for, split_slot
from epicute.kv.cache import KVCache
from epicute.models.block_state import BlockScales
from epicute.models.config import ModelConfig
from epicute.models.folder import EMBEDDING, HEAD, NORM
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

__all__ = ["FORMATS", "ReferenceBackend"]

RESIDENT = 4 << 30
"""Bytes that a model's matrices may take in float64 to be kept so, unless it is said whether they are."""

HEAD_ROWS = 16384
"""Rows of the head that are in float64 at a time."""


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
        self.config, self.weights, self.scaling = config, weights, scaling
        self.dtype = FORMATS[weights]
        table = config.vocabulary * config.shape.hidden
        size = 8 * (config.layers * config.shape.weights + table)
        self._resident = size <= RESIDENT if resident is None else resident
        given = int4 or {}
        check_given(given, weights, tensors, config.layers)
        self._layers = [
            read_layer(config, tensors, index, weights, given, self._resident)
            for index in range(config.layers)
        ]
        delayed = weights == "fp8" and scaling == "delayed"
        self.scales = [BlockScales.create() for _ in range(config.layers)] if delayed else []
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
        return self._written(self._embedded(ids), self.entry)

    def block(self, layer: int, x: _Stream, requests: Requests, cache: KVCache) -> _Stream:
        """One layer; writes the keys and values of the rows that have a slot into ``cache``."""
        return self._block(layer, x, requests, cache, step=False)

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
        rows = _place(cache, layer, heads["k"], heads["v"], requests.slots)
        q = store(heads["q"], self.dtype)
        if cache.int4 is None or (cache.spec.int4 == "mirror" and not step):
            attended = self._attend(q, layer, requests, cache)
        else:
            attended = self._attend_records(q, None if step else rows, layer, requests, cache)
        attended = torch.where(keep, attended, 0.0)
        linear = self._linear("o", held, self._activation(attended, sites[0], step))
        x1 = output_projection(linear, x.values, self.dtype)["h"]
        stream = self._written(torch.where(keep, x1, 0.0), sites[1], step)
        linear, sumsq = self._normed("gate_up", held, stream)
        z = gate_up_projection(linear, sumsq, config.eps)["z"]
        linear = self._linear("down", held, self._activation(z, sites[2], step))
        y = down_projection(linear, stream.values, self.dtype)["h"]
        return self._written(y, sites[3], step)

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
        if name not in held.gains:
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

    def _attend_records(
        self,
        q: Tensor,
        own: tuple[Tensor, Tensor] | None,
        layer: int,
        requests: Requests,
        cache: KVCache,
    ) -> Tensor:
        """(M, q_width) float64 over INT4 records; NaN in rows of no request.

        ``own``: keys and values (M, kv_heads, head_dim) that stand in for the records of the same tokens.
        """
        shape, format = self.config.shape, cache.int4.format  # type: ignore[union-attr]
        turn = torch.eye(shape.head_dim, dtype=torch.float64)
        if format.width:
            turn = hadamard(shape.head_dim, format.width)
        queries = q.unflatten(1, (-1, shape.head_dim)) @ turn
        found = torch.full_like(queries, torch.nan)
        for request, (rows, total) in enumerate(_spans(requests)):
            known = total if own is None else total - (rows.stop - rows.start)
            k, v = _records(cache, layer, requests, request, known)
            if own is not None:
                k = torch.cat([k, own[0][rows] @ turn])
                v = torch.cat([v, own[1][rows] @ turn])
            out, _ = attend(queries[rows], k, v, window=self.config.window)
            found[rows] = out @ turn
        return found.flatten(1)

    def _written(self, x: Tensor, site: DelayedScale | None, step: bool = False) -> _Stream:
        """The residual stream as stored; its codes are those of the stored values."""
        values = store(x, self.dtype)
        return self._coded(values, values, site, step)

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


def _spans(requests: Requests) -> Iterator[tuple[slice, int]]:
    """Each request's rows, and the keys that it has with them."""
    totals = requests.kv_lengths.tolist()
    if requests.starts is not None:
        ends = requests.starts.tolist()
        spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
    else:
        assert requests.lengths is not None
        width = requests.rows // requests.count
        spans = [slice(b * width, b * width + n) for b, n in enumerate(requests.lengths.tolist())]
    yield from zip(spans, totals, strict=True)


def _records(
    cache: KVCache, layer: int, requests: Requests, request: int, count: int
) -> tuple[Tensor, Tensor]:
    """(count, kv_heads, head_dim) float64 keys and values of a request's first tokens, from its INT4 records."""
    assert cache.int4 is not None
    require(
        requests.page_table is not None,
        "requests.page_table",
        None,
        "the pages of each request",
        "describe requests with the cache's page table",
    )
    assert requests.page_table is not None
    slots = slots_for(
        requests.page_table[request : request + 1],
        torch.arange(count),
        torch.zeros(count, dtype=torch.int64),
        cache.spec.page_size,
    )
    k, v = cache.int4.read(layer, slots)
    return k.to(torch.float64), v.to(torch.float64)


def _place(
    cache: KVCache, layer: int, k: Tensor, v: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Write keys and values of one layer wherever the cache keeps them; gives the rows (M, kv_heads, head_dim) float64
    that INT4 records are made of.
    """
    spec = cache.spec
    if spec.int4 != "only":
        for which, x in enumerate((k, v)):
            _place_main(cache, layer, which, x, slots)
    k, v = (store(x, spec.dtype).unflatten(1, (spec.kv_heads, spec.head_dim)) for x in (k, v))
    if cache.int4 is not None:
        cache.int4.write(layer, k.to(spec.dtype), v.to(spec.dtype), slots)
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
