"""A Llama-style model from a Hugging Face folder: prefill of any requests into a KV cache.

    model = Llama.from_folder("…/Llama-3.1-8B", device="cuda", weights="fp8")
    cache = model.new_cache(requests=4, max_length=4096)
    logits = model.prefill([ids_a, ids_b], cache)        # (2, vocabulary), of each request's last token

What runs is a ``Backend``: on a GPU the fused layers of ``PrefillBlock``, on a CPU the references. Requests are packed
row after row (FuTransformer 3.2.4), and continue where the cache's lengths stand, so that a prompt may come in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import torch

from epicute.errors import UnsupportedError, require
from epicute.kv.cache import CacheSpec, KVCache
from epicute.models.config import ModelConfig
from epicute.models.folder import Folder
from epicute.models.requests import Requests

__all__ = ["Backend", "Llama"]

WANTED = ("last", "all")


class Backend(Protocol):
    """What runs a model's layers on one device. Its streams (what a layer reads and gives) are its own affair.

    An invocation is one ``embed``, every layer's ``block`` in order, and ``logits``.
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

    def embed(self, ids: torch.Tensor) -> Any:
        """The stream that enters the first layer, of token ids (M,) int64 on the device."""

    def block(self, layer: int, x: Any, requests: Requests, cache: KVCache) -> Any:
        """One layer: places keys and values of all rows in ``cache`` and gives the stream that leaves."""

    def logits(self, x: Any, rows: torch.Tensor) -> torch.Tensor:
        """(R, vocabulary) float32: final norm and head of the rows (R,) int64 of the last stream."""


class Llama:
    """A model: its configuration, and a backend that holds its weights. Make it with ``from_folder``.

    Attributes:
        config: what it is.
        backend: what runs it.
        device: where.
    """

    def __init__(self, config: ModelConfig, backend: Backend, device: torch.device | str) -> None:
        self.config, self.backend, self.device = config, backend, torch.device(device)

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
        weights: str = "bf16",
        scaling: str = "delayed",
        **options: Any,
    ) -> Llama:
        """Read configuration and weights, fold and quantise them, and plan what runs them.

        Args:
            path: a folder with ``config.json`` and safetensors, in one file or sharded.
            device: a CUDA device or the CPU; by default the GPU where there is one.
            weights: "bf16", "fp16" or "fp8"; on a CPU also "exact", which rounds nothing.
            scaling: of activations beside FP8 weights, "delayed" per tensor or "row".
            options: ``cache``, ``page_size`` and ``max_rows`` of ``GpuBackend``; a CPU has none.

        Raises:
            ConfigError, CheckpointError: files that are missing, broken or do not belong together.
            UnsupportedError: what no block carries, by the name of its key; "exact" on a GPU.
            ArgumentError: an unknown format, scaling or option; non-finite weights.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        require(
            device.type in ("cpu", "cuda"),
            "device",
            device,
            "a CUDA device or the CPU",
            "pass device='cpu'",
            UnsupportedError,
        )
        config, folder = ModelConfig.from_folder(path), Folder(path)
        folder.check(config)
        folder.head(config)
        backend = _backend(config, folder, device, weights=weights, scaling=scaling, **options)
        return Llama(config, backend, device)

    def new_cache(
        self,
        requests: int,
        max_length: int,
        *,
        pages: int | None = None,
        dtype: torch.dtype | None = None,
        page_size: int | None = None,
        layout: str = "NHD",
        scales: tuple[object, object] | None = None,
    ) -> KVCache:
        """An empty cache for this model.

        Args:
            requests: at one time.
            max_length: tokens of the longest.
            pages: of a shared pool; None: room for ``max_length`` tokens of each request.
            dtype: bfloat16, float16 or float8_e4m3fn, on a CPU also float32; by default what the backend is made for.
            page_size: tokens per page; by default what the backend is made for.
            layout: "NHD" or "HND".
            scales: FP8: K's and V's, see ``KVCache``.
        """
        shape = self.config.shape
        spec = CacheSpec(
            self.config.layers,
            shape.kv_heads,
            shape.head_dim,
            dtype or self.backend.cache_dtype,
            page_size or self.backend.page_size,
            layout,
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
            CapacityError: the cache has no room; nothing was changed.
        """
        require(
            logits in WANTED, "logits", repr(logits), f"one of {WANTED}", "say what is to be given"
        )
        require(
            chunk is None or chunk >= 1,
            "chunk",
            chunk,
            "a positive count of tokens, or None",
            "leave it out to run whole prompts",
        )
        prompts = _prompts(ids, self.config.vocabulary)
        self._check_cache(cache)
        counts = [len(prompt) for prompt in prompts]
        owners = list(range(len(prompts))) if rows is None else list(rows)
        cache.reserve(counts, owners)
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        limit = min(n for n in (sum(counts), chunk, self.backend.max_rows) if n is not None)
        for batch in _batches(counts, limit):
            parts = [prompts[i][start:end] for i, start, end in batch]
            ends = [end == counts[i] for i, _, end in batch]
            given = self._run(
                parts, cache, [owners[i] for i, _, _ in batch], None if logits == "all" else ends
            )
            for (i, _, _), part in zip(batch, given, strict=True):
                found[i].append(part)
        return torch.cat([part for parts in found for part in parts])

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
            cache.page_table[owners],
            cached=[cache.held[owner] for owner in owners],
            device=self.device,
        )
        flat = torch.tensor([i for part in parts for i in part], dtype=torch.int64)
        x = self.backend.embed(flat.to(self.device))
        for layer in range(self.config.layers):
            x = self.backend.block(layer, x, requests, cache)
        cache.advance(counts, owners)
        if last is None:
            wanted, sizes = torch.arange(len(flat)), counts
        else:
            marks = torch.tensor(last)
            wanted, sizes = torch.tensor(counts).cumsum(0)[marks] - 1, marks.int().tolist()
        given = self.backend.logits(x, wanted.to(self.device))
        return list(given.split(sizes))

    def _check_cache(self, cache: KVCache) -> None:
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
            cache.device.type == self.device.type
            and self.device.index in (None, cache.device.index),
            "cache",
            f"on {cache.device}",
            f"on {self.device}, as the model",
            "allocate it with model.new_cache(…)",
        )


def _batches(counts: list[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """(request, first token, behind its last) in order; all batches but the last have ``limit`` tokens."""
    batch: list[tuple[int, int, int]] = []
    room = limit
    for request, count in enumerate(counts):
        done = 0
        while done < count:
            taken = min(room, count - done)
            batch.append((request, done, done + taken))
            done, room = done + taken, room - taken
            if room == 0:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch


def _prompts(ids: Any, vocabulary: int) -> list[list[int]]:
    """Checked token ids of each request."""
    if isinstance(ids, torch.Tensor):
        require(
            not ids.is_floating_point() and not ids.is_complex() and ids.ndim in (1, 2),
            "ids",
            f"{tuple(ids.shape)} {ids.dtype}",
            "integers, (tokens,) or (requests, tokens)",
            "pass what the tokenizer gives",
        )
        found = ids.tolist() if ids.ndim == 2 else [ids.tolist()]
    else:
        listed = list(ids)
        nested = bool(listed) and isinstance(listed[0], torch.Tensor | Sequence)
        found = [_prompt(prompt) for prompt in listed] if nested else [listed]
    for place, prompt in enumerate(found):
        require(
            len(prompt) > 0,
            f"ids[{place}]",
            "no token",
            "at least one",
            "leave out requests that have nothing new",
        )
        wrong = [i for i in prompt if not (isinstance(i, Integral) and 0 <= int(i) < vocabulary)]
        require(
            not wrong,
            f"ids[{place}]",
            wrong[:3],
            f"token ids from 0 to {vocabulary - 1}",
            "use the tokenizer of this checkpoint",
        )
    return found


def _prompt(prompt: Any) -> list[int]:
    if not isinstance(prompt, torch.Tensor):
        return list(prompt)
    require(
        prompt.ndim == 1 and not prompt.is_floating_point(),
        "ids",
        f"{tuple(prompt.shape)} {prompt.dtype}",
        "integers, (tokens,) for each request",
        "pass what the tokenizer gives",
    )
    return list(prompt.tolist())


def _backend(config: ModelConfig, folder: Folder, device: torch.device, **options: Any) -> Backend:
    """The device's backend; each is imported when it is asked for."""
    if device.type == "cpu":
        from epicute.models.reference_backend import ReferenceBackend

        unknown = sorted(set(options) - {"weights", "scaling"})
        require(not unknown, "options", unknown, "none on a CPU", "leave them out")
        return ReferenceBackend(config, folder, **options)
    from epicute.models.gpu_backend import GpuBackend

    return GpuBackend(config, folder, device=device, **options)
