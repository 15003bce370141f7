"""QK4PV8 records of all layers of a model, under the page table of a ``KVCache``, and the means their keys lack.

smoothing    means of a layer                    a page may belong to
none         none                                any number of requests
sequence     one group a request of the cache    one request: later tokens are centred as its first prefill was
static       one group, calibrated               any number of requests
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from epicute.errors import require
from epicute.kv.qk4pv8 import Memory, QK4PV8Cache
from epicute.layouts.qk4pv8 import ORDERS, QK4PV8Page
from epicute.quant.nvfp4 import CastCounters
from epicute.quant.smoothing import KINDS, TERMS, Calibration, Means

__all__ = ["QK4PV8Form", "QK4PV8Layers"]


@dataclass(frozen=True)
class QK4PV8Form:
    """What may differ between QK4PV8 caches of one model; ``Llama.new_cache(dtype=…)`` takes one, or "qk4pv8".

    Attributes:
        smoothing: where the means of keys come from, of ``quant.smoothing.KINDS``.
        terms: BF16 terms of ΔS, 1 to 3; without smoothing there are none.
        qk: how prefill multiplies keys and so how their bits are ordered: "exact16", "fast8" or "tcgen05". A decode
            step multiplies them exactly in any case.
        means: of ``static``: observed queries and keys of every layer.
        k_scale, v_scale: of all layers, see ``QK4PV8Cache``.
    """

    smoothing: str = "sequence"
    terms: int = 2
    qk: str = "exact16"
    means: Calibration | None = field(default=None, repr=False, compare=False)
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, allowed in (("smoothing", KINDS), ("terms", TERMS), ("qk", ORDERS)):
            value = getattr(self, name)
            require(value in allowed, name, repr(value), f"one of {allowed}", "choose one of these")
        require(
            (self.means is not None) == (self.smoothing == "static"),
            "means",
            None if self.means is None else type(self.means).__name__,
            "a Calibration" if self.smoothing == "static" else f"None for {self.smoothing!r}",
            "observe text with models.reference_means.observe_means for smoothing='static' alone",
        )

    @property
    def stored_terms(self) -> int:
        """BF16 numbers that each key keeps of its ΔS for a query head."""
        return 0 if self.smoothing == "none" else self.terms

    def records(
        self, pages: int, page_size: int, heads: tuple[int, int], head_dim: int
    ) -> QK4PV8Cache:
        """The format of one layer; ``heads``: of queries, and of keys and values.

        Raises:
            ArgumentError: a page size or head that no record has.
        """
        q_heads, kv_heads = heads
        page = QK4PV8Page(page_size, head_dim, self.qk)
        scales = self.k_scale, self.v_scale
        return QK4PV8Cache(pages, kv_heads, q_heads, page, self.stored_terms, *scales)


class QK4PV8Layers:
    """The memory of every layer's records, which all have one format, and its means.

    Attributes:
        form: what was asked for.
        format: of each layer, see ``QK4PV8Cache``: scales, how rows are quantised and laid out.
        records: (layers, pages, kv_heads, record bytes) uint8.
        delta: (layers, pages, q_heads, terms, page_size) bfloat16, None without smoothing.
        q_means, k_means: (layers, groups, heads, head_dim) float32, None without smoothing. A group is a request of the
            cache for ``sequence``; ``static`` has one.
        counters: of keys and of values, what quantisation lost in all layers.
    """

    def __init__(
        self,
        form: QK4PV8Form,
        format: QK4PV8Cache,
        layers: int,
        requests: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.form, self.format = form, format
        page = format.page
        shape = (layers, format.pages, format.kv_heads, page.bytes)
        self.records = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.delta: torch.Tensor | None = None
        self.q_means: torch.Tensor | None = None
        self.k_means: torch.Tensor | None = None
        if format.terms:
            side = (layers, format.pages, format.q_heads, format.terms, page.page_size)
            self.delta = torch.zeros(side, dtype=torch.bfloat16, device=device)
            groups = 1 if form.smoothing == "static" else requests
            self.q_means, self.k_means = (
                torch.zeros(layers, groups, heads, page.head_dim, device=device)
                for heads in (format.q_heads, format.kv_heads)
            )
        self.counters = CastCounters.create(device), CastCounters.create(device)
        if form.means is not None:
            self._calibrate(form.means)

    def _calibrate(self, calibration: Calibration) -> None:
        assert self.q_means is not None
        assert self.k_means is not None
        for name, mean, observed in (
            ("q", self.q_means, calibration.q),
            ("k", self.k_means, calibration.k),
        ):
            wanted = (mean.shape[0], *mean.shape[2:])
            require(
                observed.shape == wanted,
                f"means.{name}",
                tuple(observed.shape),
                f"{wanted}: layers, heads, head_dim",
                "observe text with the model that the cache is for",
            )
        for layer in range(len(self.records)):
            found = calibration.means(layer)
            self.q_means[layer].copy_(found.q)
            self.k_means[layer].copy_(found.k)

    def __repr__(self) -> str:
        smoothed = "not smoothed" if self.delta is None else f"smoothing {self.form.smoothing}"
        return f"QK4PV8Layers({len(self.records)} layers, {self.format.page}, {smoothed})"

    @property
    def nbytes(self) -> int:
        """Bytes of records and ΔS."""
        return self.records.nbytes + (0 if self.delta is None else self.delta.nbytes)

    def layer(self, layer: int) -> Memory:
        """Records and ΔS of one layer, views: what kernels take.

        Raises:
            ArgumentError: no such layer.
        """
        self._check(layer)
        return Memory(self.records[layer], None if self.delta is None else self.delta[layer])

    def means(self, layer: int) -> Means | None:
        """Means of one layer, views: writing to them changes what later rows are centred by. None without smoothing.

        Raises:
            ArgumentError: no such layer.
        """
        self._check(layer)
        if self.q_means is None or self.k_means is None:
            return None
        return Means(self.form.smoothing, self.q_means[layer], self.k_means[layer])

    def _check(self, layer: int) -> None:
        require(
            0 <= layer < len(self.records),
            "layer",
            layer,
            f"0 to {len(self.records) - 1}",
            "count layers from 0",
        )
