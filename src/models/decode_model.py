"""A model's step on a GPU, from tokens to the likeliest next ones: one captured graph for each cache.

    ids ─► where they stand ─► embedding ─► DecodeBlock × layers ─► final norm ─► head ─► logits ─► likeliest
              cache.begin_step                                                              cache.end_step

A graph serves every length, page and choice of requests. There is one for each number of rows that a step of a cache
runs: the requests up to the last one that holds anything, rounded up to a power of two. What a graph writes it writes
again with the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from epicute.decode import MOST_ROWS, pack_few_rows
from epicute.epilogues import Store, compose
from epicute.errors import UnsupportedError, require
from epicute.kv.cache import KVCache
from epicute.models.block_state import Stream, matrix
from epicute.models.decode_block import MOST_LENGTH, DecodeBlock
from epicute.models.decode_cache import CacheForm, DecodeCache
from epicute.models.decode_step import DecodeStep
from epicute.models.decode_weights import DecodeWeights
from epicute.models.embedding import plan_embedding
from epicute.models.final_norm import plan_final_norm
from epicute.models.kernels import Kernels, Streamed
from epicute.weights import FragmentPacked, Quantized

__all__ = ["DecodeEnds", "DecodeModel", "rows_for"]

HEAD = compose(Store(torch.float32))
"""Logits as they are summed."""


def rows_for(requests: int, most: int = MOST_ROWS) -> int:
    """Rows that a step of so many requests runs: the next power of two, at most ``most``."""
    return min(1 << max(requests - 1, 0).bit_length(), most)


@dataclass(frozen=True, eq=False)
class DecodeEnds:
    """What stands before the first layer and behind the last one.

    Attributes:
        table: (vocabulary, hidden) of the activations' dtype, embedding rows, scaled where the model does that.
        gain: (hidden,) float32 of the final norm, without its offset. eps, offset: of that norm.
        head: (vocabulary, hidden), packed for ``HEAD``.
        strays: (1,) int64, raised by ids outside of the embedding.
    """

    table: torch.Tensor
    gain: torch.Tensor
    eps: float
    offset: float
    head: FragmentPacked
    strays: torch.Tensor

    @staticmethod
    def pack_head(head: Quantized) -> FragmentPacked:
        """A 16-bit head in the order in which a step streams it."""
        return pack_few_rows(head, HEAD)


@dataclass(frozen=True, eq=False)
class _Planned:
    """Kernels and memory for steps of up to so many requests over one form of cache.

    Attributes:
        blocks: the layers. head: what runs the head. streams: two, which layers write in turn. y: (rows, hidden) of the
            final norm.
    """

    blocks: list[DecodeBlock]
    head: Streamed
    streams: list[Stream]
    y: torch.Tensor


@dataclass(eq=False)
class _Steps:
    """What the steps of one cache read and write.

    Attributes:
        planned: what runs them. invariant: whether a request's bits depend on it alone.
        layers: its memory. ids: (requests,) int64 of the step. lengths: (requests,) int32, 0 where there is no token.
        logits: (requests, vocabulary) float32. likeliest: (requests,) int64. graphs: captured steps, by their rows.
    """

    planned: _Planned
    invariant: bool
    layers: list[DecodeCache]
    ids: torch.Tensor
    lengths: torch.Tensor
    logits: torch.Tensor
    likeliest: torch.Tensor
    graphs: dict[int, Any] = field(default_factory=dict)


class DecodeModel:
    """The steps of a model's caches. Kernels are planned for a form of cache when the first of it is seen."""

    def __init__(
        self,
        weights: Callable[[], Sequence[DecodeWeights]],
        inv_freq: torch.Tensor,
        ends: Callable[[], DecodeEnds],
        *,
        kernels: Kernels,
    ) -> None:
        """Keep what is needed to plan; ``weights`` and ``ends`` are asked once, for the first step.

        Args:
            weights: of all layers, beside any cache.
            inv_freq: (rotary_dim / 2,) float32, on the device.
            ends: what stands around them.
            kernels: where to get the kernels from.
        """
        self._weights, self._ends, self._inv_freq = weights, ends, inv_freq
        self._kernels = kernels
        self._held: tuple[Sequence[DecodeWeights], DecodeEnds] | None = None
        self._planned: dict[tuple[CacheForm, bool, int], _Planned] = {}
        self._steps: WeakKeyDictionary[KVCache, _Steps] = WeakKeyDictionary()
        self._embed: Any = None
        self._norm: Any = None

    def prepare(self, cache: KVCache, batch_invariant: bool | None = None) -> None:
        """Pack, plan and capture what a step of this cache needs now, so that the first one is as fast as any.

        ``batch_invariant``: of its steps from here on, see ``DecodeBlock.plan``; None: as they are, at first False.

        Raises:
            UnsupportedError: more requests than a step serves, or what there are no kernels for. CompileError.
        """
        rows = self._rows(cache)
        steps = self._of(cache, batch_invariant)
        if steps.ids.device.type == "cuda" and rows not in steps.graphs:
            steps.graphs[rows] = self._captured(cache, steps, rows)

    def decode(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """A step, see ``Backend.decode``: (requests, vocabulary) float32 in memory of its own.

        Raises:
            as ``prepare``.
        """
        self.prepare(cache)
        steps, rows = self._of(cache), self._rows(cache)
        steps.ids.copy_(ids)
        graph = steps.graphs.get(rows)
        if graph is None:
            self._run(cache, steps, rows)
        else:
            graph.replay()
        return steps.logits.clone()

    def likeliest(self, cache: KVCache) -> torch.Tensor:
        """(requests,) int64, the likeliest next tokens of this cache's last step; written again by the next."""
        return self._of(cache).likeliest

    # --- planning ---

    def _rows(self, cache: KVCache) -> int:
        """Rows that the next step runs."""
        last = max((row + 1 for row, held in enumerate(cache.held) if held), default=1)
        require(
            last <= MOST_ROWS,
            "cache",
            f"request {last - 1}, in a step of {last} rows",
            f"at most {MOST_ROWS}, which a step of one token serves",
            "prefill one token of each, or split the requests into several caches",
            UnsupportedError,
        )
        return min(rows_for(last), cache.requests)

    def _of(self, cache: KVCache, invariant: bool | None = None) -> _Steps:
        """What steps of a cache need, made when the first one is asked for, or one of the other kind."""
        found = self._steps.get(cache)
        if found is None or invariant not in (None, found.invariant):
            invariant = bool(invariant)
            planned = self._plan(DecodeCache.of_model(cache, 0).form, cache.requests, invariant)
            count, device = cache.requests, cache.device
            layers = [DecodeCache.of_model(cache, i) for i in range(len(planned.blocks))]
            vocabulary = self._both()[1].head.shape[0]
            found = _Steps(
                planned,
                invariant,
                layers,
                torch.full((count,), -1, dtype=torch.int64, device=device),
                torch.zeros(count, dtype=torch.int32, device=device),
                matrix(count, vocabulary, torch.float32, device).zero_(),
                torch.zeros(count, dtype=torch.int64, device=device),
            )
            self._steps[cache] = found
        return found

    def _both(self) -> tuple[Sequence[DecodeWeights], DecodeEnds]:
        if self._held is None:
            self._held = self._weights(), self._ends()
        return self._held

    def _plan(self, form: CacheForm, requests: int, invariant: bool) -> _Planned:
        """Kernels for steps of that many requests; those of more serve fewer."""
        most = rows_for(requests)
        known = [n for (f, i, n) in self._planned if (f, i) == (form, invariant) and n >= most]
        if known:
            return self._planned[form, invariant, min(known)]
        layers, ends = self._both()
        weights = [layer.reading(form) for layer in layers]
        spec, device = weights[0].spec, weights[0].device
        blocks = DecodeBlock.chain(
            weights,
            self._inv_freq,
            max_batch=most,
            max_len=MOST_LENGTH,
            batch_invariant=invariant,
            # ``_run`` writes lengths before anything else, and page tables are written before a step.
            prefetch=True,
            kernels=self._kernels,
        )
        options = {"max_rows": most, "batch_invariant": invariant, "x_dtype": spec.dtype}
        head = self._kernels.few_rows(HEAD, ends.head, options)
        hidden = spec.block.shape.hidden
        if self._embed is None:
            self._embed = plan_embedding(hidden, spec.dtype, fp8=False, device=device)
            self._norm = plan_final_norm(
                hidden,
                spec.dtype,
                gain_dtype=torch.float32,
                eps=ends.eps,
                offset=ends.offset,
                rows_dtype=None,
                device=device,
            )
        streams = [Stream.allocate(spec.block, most, device) for _ in range(2)]
        y = matrix(most, hidden, spec.dtype, device)
        found = self._planned[form, invariant, most] = _Planned(blocks, head, streams, y)
        return found

    # --- running ---

    def _captured(self, cache: KVCache, steps: _Steps, rows: int) -> Any:
        """A graph of a step. A step that nobody takes part in runs first: it loads what PyTorch loads lazily."""
        steps.ids.fill_(-1)
        self._run(cache, steps, rows)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(cache.device)
        with torch.cuda.device(cache.device), torch.cuda.graph(graph):
            self._run(cache, steps, rows)
        return graph

    def _run(self, cache: KVCache, steps: _Steps, rows: int) -> None:
        """A step of the first ``rows`` requests of ``steps.ids``: device work alone."""
        planned, ends = steps.planned, self._both()[1]
        cache.begin_step(steps.ids >= 0)
        live = cache.step_slots[:rows] >= 0
        lengths = steps.lengths[:rows]
        # Attention reads lengths as early as it can: when the kernel behind this one runs, they are in memory.
        lengths.copy_(torch.where(live, cache.step_lengths[:rows], 0))
        ids = torch.where(live, steps.ids[:rows], -1)
        step = DecodeStep(
            cache.step_positions[:rows], cache.step_slots[:rows], lengths, cache.page_table[:rows]
        )
        x, other = (stream.first(rows) for stream in planned.streams)
        self._embed.run(ids, ends.table, x.values, x.sumsq, ends.strays)
        for block, layer in zip(planned.blocks, steps.layers, strict=True):
            block.run(x, step, layer, other)
            x, other = other, x
        y = planned.y[:rows]
        self._norm.run(x.values, ends.gain, y, sumsq=x.sumsq)
        logits = steps.logits[:rows]
        planned.head.run(y, ends.head, out=logits)
        steps.likeliest[:rows].copy_(logits.argmax(dim=1))
        steps.logits[rows:].zero_()
        cache.end_step()
