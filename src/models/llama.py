"""A Llama-style model from a Hugging Face folder: prefill of any requests into a KV cache, and a token more of each.

    model = Llama.from_folder("…/Llama-3.1-8B", device="cuda", weights="fp8")
    cache = model.new_cache(requests=4, max_length=4096)
    logits = model.prefill([ids_a, ids_b], cache)        # (2, vocabulary), of each request's last token
    logits = model.decode([7, 11, -1, -1], cache)        # (4, vocabulary); requests 2 and 3 take no part

What runs is a ``Backend``: on a GPU the fused layers of ``PrefillBlock``, on a CPU the references. Requests are packed
row after row (FuTransformer 3.2.4), and continue where the cache's lengths stand, so that a prompt may come in chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from epicute.errors import UnsupportedError, require
from epicute.kv.cache import CacheSpec, KVCache
from epicute.kv.qk4pv8_layers import QK4PV8Form
from epicute.kv.transfer import to_device
from epicute.models.config import ModelConfig
from epicute.models.folder import tensors_of
from epicute.models.placement import resolve_device
from epicute.models.requests import Requests
from epicute.models.stored_model import StoredModel
from epicute.models.token_ids import batches, is_id, prompts_of, step_of

__all__ = ["Backend", "Llama"]

WANTED = ("last", "all")

CACHES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int4": None,
    "qk4pv8": None,
}
"""Names of what a cache keeps, and its dtype; records are made of what the backend's own caches hold."""


class Backend(Protocol):
    """What runs a model's layers on one device. Its streams (what a layer reads and gives) are its own affair.

    A prefill is one ``embed``, every layer's ``block`` in order, and ``logits``; a token more of each request is
    ``decode``.
    """

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the caches that it is made for; others may be refused."""

    @property
    def page_size(self) -> int:
        """Tokens per page of the caches that it is made for; others may be refused."""

    @property
    def max_rows(self) -> int | None:
        """Rows that it runs at once at most; None for any number."""

    def check_cache(self, cache: KVCache) -> None:
        """Refuse, before anything is changed, a cache of this model that it does not serve."""

    @property
    def decodes(self) -> bool:
        """Whether it has ``decode``, and caches of records; else ``prefill`` of one token does the same, slower."""

    def embed(self, ids: torch.Tensor) -> Any:
        """The stream that enters the first layer, of token ids (M,) int64 on the device."""

    def block(self, layer: int, x: Any, requests: Requests, cache: KVCache) -> Any:
        """One layer: places keys and values of all rows in ``cache`` and gives the stream that leaves."""

    def logits(self, x: Any, rows: torch.Tensor) -> torch.Tensor:
        """(R, vocabulary) float32: final norm and head of the rows (R,) int64 of the last stream."""

    def decode(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """A whole step: token ids[b] of request b of the cache goes behind those it holds.

        Device work alone, from ``cache.begin_step`` to ``cache.end_step``, both of which it calls; the host has been at
        ``cache.reserve_step``.

        Args:
            ids: (requests,) int64 on the device, -1 where a request takes no part: its row gives zeros, and is seen by
                no scale, counter or cache.
            cache: of this model.

        Returns:
            (requests, vocabulary) float32.

        Raises:
            UnsupportedError: there are no kernels for it.
        """

    def prepare(self, cache: KVCache, batch_invariant: bool | None = None) -> None:
        """Do now what the first ``decode`` of this cache would do beside its step; nothing where there is nothing."""

    def likeliest(self, logits: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """(requests,) int64 on the device: the largest of the ``logits`` of the last ``decode`` of ``cache``."""


class Llama:
    """A model: its configuration, and a backend that holds its weights. Make it with ``from_folder``.

    Attributes:
        config: what it is.
        backend: what runs it.
        device: where.
    """

    def __init__(self, config: ModelConfig, backend: Backend, device: torch.device | str) -> None:
        self.config, self.backend, self.device = config, backend, resolve_device(device)

    def __repr__(self) -> str:
        config = self.config
        return (
            f"Llama({config.family} {config.shape.name}, {config.layers} layers, "
            f"{type(self.backend).__name__} on {self.device})"
        )

    @staticmethod
    def from_folder(
        path: str | Path,
        *,
        device: torch.device | str | None = None,
        weights: str | None = None,
        scaling: str = "delayed",
        **options: Any,
    ) -> Llama:
        """Read configuration and weights, fold and quantise them, and plan what runs them.

        Args:
            path: a folder with ``config.json`` and safetensors, in one file or sharded.
            device: a CUDA device or the CPU; by default the GPU where there is one. "cuda" is the GPU that is current.
            weights: "bf16", "fp16", "fp8" or "int4"; on a CPU also "exact", which rounds nothing. None: as they are
                stored: "fp8" and "int4" with the codes of a checkpoint that was quantised so, else "bf16". Codes are
                decoded for any other form.
            scaling: of activations beside FP8 weights, "delayed" per tensor or "row".
            options: ``cache``, ``page_size``, ``max_rows`` and ``int4`` of ``GpuBackend``, or ``int4``, ``resident``,
                ``attention`` and ``as_decoded`` of ``ReferenceBackend``.

        Raises:
            ConfigError, CheckpointError: files that are missing, broken or do not belong together.
            UnsupportedError: what no block carries, by the name of its key; "exact" on a GPU.
            ArgumentError: an unknown format, scaling or option; non-finite weights.
        """
        config = ModelConfig.from_folder(path)
        stored = StoredModel.open(path, config)
        form = weights or stored.form
        if form == stored.form == "int4":
            options = {"int4": stored.int4, **options}
        return Llama.from_tensors(
            config, stored.tensors(form), device=device, weights=form, scaling=scaling, **options
        )

    @staticmethod
    def from_tensors(
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        device: torch.device | str | None = None,
        weights: str = "bf16",
        scaling: str = "delayed",
        **options: Any,
    ) -> Llama:
        """The same from weights by their Hugging Face names, which ``models.folder.tensors_of`` lists; others are left.

        Raises:
            as ``from_folder``, files apart. ArgumentError: a tensor that is missing.
        """
        missing = sorted(set(tensors_of(config)) - set(tensors))
        require(
            not missing,
            "tensors",
            f"none called {', '.join(missing[:3])}",
            f"all {len(tensors_of(config))} of a {config.family} model with {config.layers} layers",
            "pass them by the names of models.folder.tensors_of(config)",
        )
        device = resolve_device(device)
        backend = _backend(config, tensors, device, weights=weights, scaling=scaling, **options)
        return Llama(config, backend, device)

    def new_cache(
        self,
        requests: int,
        max_length: int,
        *,
        pages: int | None = None,
        dtype: torch.dtype | str | QK4PV8Form | None = None,
        page_size: int | None = None,
        layout: str = "NHD",
        scales: tuple[object, object] | None = None,
        mirror: bool = False,
        rotated: bool = True,
    ) -> KVCache:
        """An empty cache for this model.

        Args:
            requests: at one time.
            max_length: tokens of the longest; of pages, as many as hold them all, so that some more may fit.
            pages: of a shared pool; None: room for ``max_length`` tokens of each request.
            dtype: bfloat16, float16 or float8_e4m3fn, on a CPU float32; or "bf16", "fp16", "fp8"; or "int4", records
                of nibbles (FuTransformer 3.3.2), heads of a multiple of 64; or a ``QK4PV8Form``, "qk4pv8" for the
                default one: NVFP4 keys and FP8 values (MpFA 4), heads of 64 or 128; by default what the backend is
                made for.
            page_size: tokens per page; by default what the backend is made for.
            layout: "NHD" or "HND".
            scales: FP8: K's and V's, see ``KVCache``.
            mirror: INT4 and FP8: keep a main cache of the backend's dtype beside what a step reads, which prefill
                reads; else the nibbles, or FP8 rows, are all there is.
            rotated: INT4: rotate rows over their heads before they are quantised (3.3.3).

        Raises:
            UnsupportedError: INT4 or QK4PV8 where the backend has no step that reads them.
            ArgumentError: another dtype; sizes or scales that make no sense; ``mirror`` with neither INT4 nor FP8;
                ``rotated`` without INT4.
        """
        int4 = dtype == "int4"
        form = QK4PV8Form() if dtype == "qk4pv8" else None
        if isinstance(dtype, QK4PV8Form):
            form, dtype = dtype, "qk4pv8"
        if isinstance(dtype, str):
            require(dtype in CACHES, "dtype", repr(dtype), f"one of {tuple(CACHES)}", "name one")
            dtype = CACHES[dtype]
        fp8 = mirror and dtype == CACHES["fp8"]
        if fp8:
            dtype = None  # of the main copy: what the backend is made for
        for name, value, plain, right, instead in (
            ("mirror", mirror, False, int4 or fp8, "'int4' or 'fp8'"),
            ("rotated", rotated, True, int4, "'int4'"),
        ):
            require(
                right or value == plain,
                name,
                value,
                f"{plain}, as there are no {'INT4 records' if name == 'rotated' else 'two copies'}",
                f"pass dtype={instead}, or leave {name} out",
            )
        require(
            not (int4 or form or fp8) or self.backend.decodes,
            "dtype",
            "'int4'" if int4 else "'fp8' with a main copy" if fp8 else f"{form}",
            "a cache that prefill reads, as no kernel here decodes",
            "leave dtype out, or run the model on the CPU",
            UnsupportedError,
        )
        shape = self.config.shape
        spec = CacheSpec(
            self.config.layers,
            shape.kv_heads,
            shape.head_dim,
            dtype or self.backend.cache_dtype,
            page_size or self.backend.page_size,
            layout,
            ("mirror" if mirror else "only") if int4 else None,
            rotated,
            form,
            shape.heads if form else None,
            fp8,
        )
        if pages is None:
            return KVCache.dense(spec, requests, max_length, scales=scales, device=self.device)
        return KVCache.paged(spec, requests, max_length, pages, scales=scales, device=self.device)

    @torch.no_grad()
    def prefill(
        self,
        ids: torch.Tensor | Sequence[int] | Sequence[torch.Tensor | Sequence[int]],
        cache: KVCache,
        *,
        rows: Sequence[int] | None = None,
        chunk: int | None = None,
        logits: str = "last",
    ) -> torch.Tensor:
        """Run new tokens of one or more requests, which follow those that the cache holds of them.

        The host knows all lengths and checks them, so ids on a GPU are waited for.

        Args:
            ids: token ids of one request; or one such list or tensor for each; or (requests, tokens).
            cache: of this model; it holds the tokens afterwards.
            rows: the cache's request that each prompt belongs to; by default 0, 1, ….
            chunk: most tokens that run at once, of all requests together; None for what the backend takes.
            logits: "last": of each prompt's last token; "all": of every token.

        Returns:
            float32 on the device: (requests, vocabulary), or (all tokens, vocabulary), prompt after prompt.

        Raises:
            ArgumentError: an empty prompt, ids outside of the vocabulary, or a cache that is not this model's.
            CapacityError: the cache has no room.

        Whatever is raised, the cache holds the tokens, and owns the pages, that it did before.
        """
        require(
            logits in WANTED, "logits", repr(logits), f"one of {WANTED}", "say what is to be given"
        )
        require(
            chunk is None or (is_id(chunk) and chunk >= 1),
            "chunk",
            chunk,
            "a positive count of tokens, or None",
            "leave it out to run whole prompts",
        )
        prompts = prompts_of(ids, self.config.vocabulary)
        self._check_cache(cache)
        require(
            rows is None or (isinstance(rows, Sequence) and all(is_id(row) for row in rows)),
            "rows",
            rows,
            "a list of the cache's requests, one for each prompt, or None",
            "write rows=[3] for a single prompt",
        )
        counts = [len(prompt) for prompt in prompts]
        owners = list(range(len(prompts))) if rows is None else list(rows)
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        limit = min(n for n in (sum(counts), chunk, self.backend.max_rows) if n is not None)
        mark = cache.mark()
        cache.reserve(counts, owners)
        try:
            for batch in batches(counts, limit):
                parts = [prompts[i][start:end] for i, start, end in batch]
                ends = [end == counts[i] for i, _, end in batch]
                marked = None if logits == "all" else ends
                given = self._run(parts, cache, [owners[i] for i, _, _ in batch], marked)
                for (i, _, _), part in zip(batch, given, strict=True):
                    found[i].append(part)
        except BaseException:
            cache.roll_back(mark)
            raise
        return torch.cat([part for parts in found for part in parts])

    @torch.no_grad()
    def decode(self, tokens: torch.Tensor | Sequence[int], cache: KVCache) -> torch.Tensor:
        """Run one token more of each request, behind those that the cache holds of it.

        The host knows all lengths and checks them, so tokens on a GPU are waited for.

        Args:
            tokens: (B,) integers, one for each request of the cache; -1 where a request takes no part.
            cache: of this model; it holds the tokens afterwards. Of INT4 records alone are read, the new ones too.

        Returns:
            (B, vocabulary) float32 on the device: for the token that follows; zeros where a request took no part.

        Raises:
            ArgumentError: not one token a request, a token outside of the vocabulary, one for a request that holds none
                (``prefill`` it first), or a cache that is not this model's.
            CapacityError: the cache has no room; nothing was changed.
            UnsupportedError: the backend has no kernels for it; ``prefill`` of one token works.
        """
        self._check_cache(cache)
        ids = step_of(tokens, cache.held, self.config.vocabulary)
        cache.reserve_step([i >= 0 for i in ids])
        try:
            return self.backend.decode(to_device(torch.tensor(ids), self.device), cache)
        except BaseException:
            cache.cancel_step()
            raise

    def prepare(self, cache: KVCache, *, batch_invariant: bool | None = None) -> None:
        """Plan, compile and capture what ``decode`` of this cache needs, so that its first step is as fast as any.

        Args:
            cache: of this model.
            batch_invariant: whether a request's logits have the same bits whatever else is in the batch; costs a few
                per cent for few requests. None: as its steps are, at first False.

        Raises:
            ArgumentError: a cache that is not this model's.
            UnsupportedError: what there are no kernels for. CompileError.
        """
        self._check_cache(cache)
        if self.backend.decodes:
            self.backend.prepare(cache, batch_invariant)

    def likeliest(self, logits: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """(B,) int64 on the device: each request's likeliest next token, of the logits that ``decode`` just gave."""
        return self.backend.likeliest(logits, cache)

    def _run(
        self,
        parts: list[list[int]],
        cache: KVCache,
        owners: list[int],
        last: list[bool] | None,
    ) -> list[torch.Tensor]:
        """One invocation: logits of the last row of each request that is marked; None: of every row."""
        counts = [len(part) for part in parts]
        requests = Requests.packed(
            counts,
            cache.spec.page_size,
            cache.host_table(owners),
            cached=[cache.held[owner] for owner in owners],
            device=self.device,
        )
        flat = torch.tensor([i for part in parts for i in part], dtype=torch.int64)
        x = self.backend.embed(to_device(flat, self.device))
        for layer in range(self.config.layers):
            x = self.backend.block(layer, x, requests, cache)
        cache.advance(counts, owners)
        if last is None:
            wanted, sizes = torch.arange(len(flat)), counts
        else:
            marks = torch.tensor(last)
            wanted, sizes = torch.tensor(counts).cumsum(0)[marks] - 1, marks.int().tolist()
        given = self.backend.logits(x, to_device(wanted, self.device))
        return list(given.split(sizes))

    def _check_cache(self, cache: KVCache) -> None:
        require(
            isinstance(cache, KVCache),
            "cache",
            type(cache).__name__,
            "a KVCache",
            "allocate it with model.new_cache(…)",
        )
        shape, spec = self.config.shape, cache.spec
        wanted = (self.config.layers, shape.kv_heads, shape.head_dim)
        require(
            (spec.layers, spec.kv_heads, spec.head_dim) == wanted,
            "cache",
            f"{spec.layers} layers with {spec.kv_heads} heads of {spec.head_dim}",
            f"{wanted[0]} layers with {wanted[1]} heads of {wanted[2]}",
            "allocate it with model.new_cache(…)",
        )
        require(
            cache.device == self.device,
            "cache",
            f"on {cache.device}",
            f"on {self.device}, as the model",
            "allocate it with model.new_cache(…)",
        )
        self.backend.check_cache(cache)


def _backend(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    **options: Any,
) -> Backend:
    """The device's backend; each is imported when it is asked for."""
    if device.type == "cpu":
        from epicute.models.reference_backend import ReferenceBackend

        known = {"weights", "scaling", "int4", "resident", "attention", "as_decoded"}
        unknown = sorted(set(options) - known)
        require(not unknown, "options", unknown, f"{sorted(known)} on a CPU", "leave them out")
        return ReferenceBackend(config, tensors, **options)
    from epicute.models.gpu_backend import GpuBackend

    return GpuBackend(config, tensors, device=device, **options)
