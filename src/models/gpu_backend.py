"""A model's layers on a GPU: the ``Backend`` of ``epicute.models.llama`` over the fused kernels.

    ids ─► embedding ─► PrefillBlock × layers ─► final norm of the wanted rows ─► head        prefill
    ids ─► DecodeModel: embedding ─► DecodeBlock × layers ─► final norm ─► head               one token of each request

All layers share one set of kernels, one workspace and two streams, which they write in turn. Delayed FP8 scales are of
one request group; those of a first invocation are calibrated on it, layer by layer. A step of one token multiplies
16-bit activations, and neither sees nor changes them.

INT4 weights are there once and serve both. Others are packed a second time for steps, when the first of these comes.

Prefills of caches with an FP8 mirror have a projection of q, k and v of their own, which writes both copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from epicute.epilogues import Store, compose
from epicute.errors import UnsupportedError, require
from epicute.kv.cache import KVCache
from epicute.models.block_state import BlockScales, LayerCache, Stream, matrix, model_sites
from epicute.models.config import ModelConfig
from epicute.models.decode_mixed import MixedPrefill
from epicute.models.decode_model import DecodeEnds, DecodeModel
from epicute.models.decode_prefill import expanded_layers, expanding
from epicute.models.decode_records import Int4Prefill
from epicute.models.decode_weights import DecodeWeights, Given
from epicute.models.embedding import plan_embedding
from epicute.models.final_norm import plan_final_norm
from epicute.models.folder import EMBEDDING, HEAD, NORM, layer_prefix
from epicute.models.kernels import GPU, Kernels, Projection
from epicute.models.layer_weights import build_layers, gains_of
from epicute.models.mirrored import MirroredCache, mirroring
from epicute.models.placement import resolve_device
from epicute.models.prefill import PrefillBlock
from epicute.models.reference_weights import check_given
from epicute.models.requests import Requests
from epicute.quant.calibration import calibrate
from epicute.quant.group import DelayedGroup
from epicute.weights import Weight

__all__ = ["GpuBackend"]

FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class GpuBackend:
    """Weights, kernels and memory of a model on one GPU.

    Attributes:
        spec: of every layer.
        blocks: the layers.
        group: delayed scaling's states of all sites, of one request group; None without.
        scales: the same layer by layer; empty without.
        strays: (1,) int64, ids outside of the embedding so far.
        stray_rows: (1,) int64, rows outside of the last stream that logits were asked of so far.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        device: torch.device | str,
        weights: str = "bf16",
        scaling: str = "delayed",
        cache: torch.dtype | None = None,
        page_size: int = 64,
        max_rows: int = 8192,
        int4: Given | None = None,
        kernels: Kernels = GPU,
    ) -> None:
        """Fold, quantise and pack every layer, and plan the kernels that all of them share.

        Args:
            config: the model.
            tensors: the checkpoint by its Hugging Face names.
            device: where everything goes.
            weights: "bf16", "fp16", "fp8" or "int4".
            scaling: of FP8 activations, "delayed" or "row".
            cache: dtype of the KV caches, the residual stream's by default, or float8_e4m3fn.
            page_size: tokens per page of the KV caches.
            max_rows: most tokens that run at once; memory for that many is allocated here.
            int4: INT4 codes of some weights, or all, as of ``ReferenceBackend``.
            kernels: where to get a block's kernels from.

        Raises:
            UnsupportedError: "exact", which is the CPU's; what there are no kernels for.
            ArgumentError: see ``BlockSpec`` and ``LayerWeights.build``. CompileError.
        """
        require(
            weights != "exact",
            "weights",
            repr(weights),
            "'bf16', 'fp16', 'fp8' or 'int4' on a GPU",
            "pass device='cpu' for a forward pass without rounding",
            UnsupportedError,
        )
        dtype = torch.float16 if weights == "fp16" else torch.bfloat16
        self.config, self.device = config, resolve_device(device)
        check_given(int4 or {}, weights, config)
        coded = weights == "int4"
        gains = "folded" if coded else gains_of(tensors, weights)
        self.spec = config.block("bf16" if coded else weights, cache or dtype, scaling, gains)
        self.page_size = page_size
        self._max_rows, self._kernels = max_rows, kernels
        self._coded = [
            DecodeWeights.int4(
                tensors, self.spec, prefix=layer_prefix(i), given=int4, device=self.device
            )
            for i in range(config.layers)
            if coded
        ]
        packed: Any = expanded_layers(self._coded, self.spec)
        if coded:
            kernels = expanding(kernels, packed, max_rows)
        else:
            packed = build_layers(tensors, self.spec, config.layers, self.device)
        inv_freq = config.inv_freq.to(self.device)
        self.blocks = PrefillBlock.chain(
            packed, inv_freq, max_rows=max_rows, page=page_size, kernels=kernels
        )
        self.group: DelayedGroup | None = None
        self.scales: list[BlockScales] = []
        if self.spec.delayed:
            self.group = DelayedGroup.create(model_sites(config.layers), self.device)
            self.scales = [BlockScales.of(self.group, i) for i in range(config.layers)]
        self.strays, self.stray_rows, self._uncounted = torch.zeros(
            3, 1, dtype=torch.int64, device=self.device
        )
        self._streams = [Stream.allocate(self.spec, max_rows, self.device) for _ in range(2)]
        self._caches: WeakKeyDictionary[KVCache, list[LayerCache]] = WeakKeyDictionary()
        self._both: Projection | None = None  # of q, k and v into caches with a mirror
        self._entry_fits = self.group is None
        self._uncalibrated = set(range(len(self.scales)))
        self._plan_ends(tensors, kernels)
        self._records: WeakKeyDictionary[KVCache, Int4Prefill | MixedPrefill] = WeakKeyDictionary()
        self._steps = DecodeModel(self._streamed, inv_freq, self._step_ends, kernels=self._kernels)

    def _streamed(self) -> list[DecodeWeights]:
        """All layers as a step streams them."""
        return self._coded or [DecodeWeights.of(block.weights) for block in self.blocks]

    def _step_ends(self) -> DecodeEnds:
        """What a step has before and behind its layers."""
        spec = self.spec
        head = DecodeEnds.pack_head(self._head.unpack())
        return DecodeEnds(self._table, self._gain, spec.eps, spec.gain_offset, head, self.strays)

    def _plan_ends(self, tensors: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        """Embedding, final norm and head."""
        config, spec, hidden = self.config, self.spec, self.config.shape.hidden
        table = tensors[EMBEDDING].to(self.device, spec.dtype)
        head = table if config.tied else tensors[HEAD].to(self.device, spec.dtype)
        if config.scaled_embedding:
            table = table * torch.tensor(hidden**0.5).to(self.device, spec.dtype)
        self._table = table.contiguous()
        gain = self.blocks[0].weights.x_gain  # None where it is in the weights
        self._entry_gain = {} if gain is None else {"gain": gain}
        self._embed = plan_embedding(
            hidden,
            spec.dtype,
            fp8=spec.delayed,
            gain=spec.delayed and gain is not None,
            device=self.device,
        )
        self._rows = None
        if spec.rowwise:
            self._rows = kernels.rows(hidden, spec.dtype, self.device, gain is not None)
        self._gain = tensors[NORM].to(self.device, torch.float32, copy=True)
        self._norm = plan_final_norm(
            hidden,
            spec.dtype,
            gain_dtype=torch.float32,
            eps=spec.eps,
            offset=spec.gain_offset,
            device=self.device,
        )
        store = compose(Store(torch.float32))
        order = store.row_order(config.vocabulary)
        self._head = Weight(head, HEAD).quantize(FORMATS[spec.dtype]).pack(order)
        # Few rows, as only the last token of each request is wanted.
        self._project = self._kernels.projection(store, self._head, {"expected_m": 64})

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the caches that the kernels were planned for."""
        return self.spec.cache

    @property
    def max_rows(self) -> int | None:
        """Rows that memory was allocated for."""
        return self._max_rows

    def check_cache(self, cache: KVCache) -> None:
        """Refuse, before anything is changed, a cache that the kernels were not planned for.

        Raises:
            ArgumentError: another dtype or page size.
        """
        require(
            (cache.spec.dtype, cache.spec.page_size) == (self.spec.cache, self.page_size),
            "cache",
            f"{cache.spec.dtype} in pages of {cache.spec.page_size}",
            f"{self.spec.cache} in pages of {self.page_size}, as the kernels were planned",
            "allocate it with model.new_cache(…), dtype and page_size left out",
        )

    decodes = True

    def prepare(self, cache: KVCache, batch_invariant: bool | None = None) -> None:
        """Plan and capture a step of this cache, see ``DecodeModel.prepare``."""
        self._steps.prepare(cache, batch_invariant)

    def decode(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """A step of one token a request: one graph's replay, but for the first of a cache; see ``Backend.decode``.

        Raises:
            UnsupportedError: more requests than a step serves, or a form that there are no kernels for. CompileError.
        """
        return self._steps.decode(ids, cache)

    def likeliest(self, logits: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """(requests,) int64, the likeliest tokens of the last step of this cache, which ``logits`` are of."""
        return self._steps.likeliest(cache)

    def embed(self, ids: torch.Tensor) -> Stream:
        """The stream that enters the first layer, of token ids (M,) int64."""
        x = self._streams[0].first(ids.numel())
        if self.group is None:
            self._embed.run(ids, self._table, x.values, x.sumsq, self.strays)
            if self._rows is not None:
                self._rows.run(x.values, x.codes, x.scale, **self._entry_gain)
            return x
        site = self.group["0.x"]
        written = (ids, self._table, x.values, x.sumsq)
        self.group.roll()
        if not self._entry_fits:
            calibrate(
                (site,),
                lambda: self._embed.run(
                    *written, self._uncounted, x.codes, site, **self._entry_gain
                ),
                site.roll,
                most=1,
            )
            self._entry_fits = bool(site.history.any())  # not if no row was a token
        self._embed.run(*written, self.strays, x.codes, site, **self._entry_gain)
        return replace(x, scale=site.scale_used)

    def block(self, layer: int, x: Stream, requests: Requests, cache: KVCache) -> Stream:
        """One layer, on the current stream; places keys and values in ``cache``."""
        block = self.blocks[layer]
        scales = self.scales[layer] if self.scales else None
        records = self._of_records(cache)
        if records is None:
            cells = self._cells(cache)[layer]
        else:
            requests, cells = records.layer(cache, layer, requests)
            if isinstance(records, MixedPrefill):
                block = replace(block, attention=records)
        if cache.fp8 is not None:
            if self._both is None:
                self._both = mirroring(self.blocks[0], self._max_rows)
            block = replace(block, projections={**block.projections, "qkv": self._both})
        out = self._streams[1 - layer % 2].first(x.rows)
        if scales is not None and layer in self._uncalibrated:
            with _uncounted(cache):
                block.calibrate(x, requests, cells, out, scales)
            if bool(scales.z.history.any()):  # some row was a token
                self._uncalibrated.discard(layer)
        # ``embed`` has rolled all states at once.
        found = block.run(x, requests, cells, out, scales, roll=False)
        if isinstance(records, Int4Prefill):
            records.store(cache, layer)
        return found

    def _of_records(self, cache: KVCache) -> Int4Prefill | MixedPrefill | None:
        """What prefills of a cache with records do beside the layers; None without records."""
        if cache.int4 is None and cache.qk4pv8 is None:
            return None
        found = self._records.get(cache)
        if found is None:
            self.check_cache(cache)
            if cache.int4 is not None:
                found = Int4Prefill(cache, self.spec, self._kernels)
            else:
                found = MixedPrefill(cache, self.spec, self._kernels, self._max_rows)
            self._records[cache] = found
        return found

    def logits(self, x: Stream, rows: torch.Tensor) -> torch.Tensor:
        """(R, vocabulary) float32 of the rows (R,) int64 of the last stream."""
        y = matrix(rows.numel(), self.config.shape.hidden, self.spec.dtype, self.device)
        out = matrix(rows.numel(), self.config.vocabulary, torch.float32, self.device)
        if rows.numel():
            self._norm.run(
                x.values, self._gain, y, sumsq=x.sumsq, rows=rows, strays=self.stray_rows
            )
            self._project.run(y, self._head, out=out)
        return out

    def _cells(self, cache: KVCache) -> list[LayerCache]:
        """The cache as the layers take it, described once."""
        if cache not in self._caches:
            self.check_cache(cache)
            found: list[LayerCache] = [
                LayerCache.of_model(cache, i)
                if cache.fp8 is None
                else MirroredCache.both_of_model(cache, i, step=False)
                for i in range(self.config.layers)
            ]
            self._caches[cache] = found
        return self._caches[cache]


@contextmanager
def _uncounted(cache: KVCache) -> Iterator[None]:
    """Within, what QK4PV8 records lose is not counted."""
    counters = () if cache.qk4pv8 is None else cache.qk4pv8.counters
    pairs = [(x, x.clone()) for one in counters for x in vars(one).values()]
    yield
    for x, before in pairs:
        x.copy_(before)
