"""Means of a model's queries and keys over text, for QK4PV8 caches with ``static`` smoothing (MpFA 4.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epicute.errors import UnsupportedError, require
from epicute.models.llama import Llama
from epicute.models.reference_backend import ReferenceBackend
from epicute.quant.smoothing import Calibration

__all__ = ["observe_means"]


def observe_means(model: Llama, prompts: Iterable[Sequence[int]]) -> Calibration:
    """Prefill every prompt in a cache of its own and add up what its layers' queries and keys are, after RoPE.

    Args:
        model: on a CPU. The sums serve caches on any device.
        prompts: token ids of typical text; a few thousand tokens in all.

    Returns:
        ``means`` of ``QK4PV8Form(smoothing="static")``.

    Raises:
        UnsupportedError: a model on a GPU. ArgumentError: no token; values that are not finite; see ``Llama.prefill``.
    """
    backend = model.backend
    require(
        isinstance(backend, ReferenceBackend),
        "model",
        f"{type(backend).__name__} on {model.device}",
        "a model on the CPU",
        "load it once more with device='cpu'",
        UnsupportedError,
    )
    assert isinstance(backend, ReferenceBackend)
    shape = model.config.shape
    found = Calibration(model.config.layers, shape.heads, shape.kv_heads, shape.head_dim)
    backend.observed = found
    try:
        for ids in prompts:
            model.prefill(list(ids), model.new_cache(1, len(ids)))
    finally:
        backend.observed = None
    require(
        int(found.tokens.min()) > 0, "prompts", "no token", "some text", "pass lists of token ids"
    )
    return found
