"""The packaged checkpoint as a model: its configuration and its tensors under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from epicute.models.config import ModelConfig
from epicute.models.folder import EMBEDDING, NORM, layer_prefix, tensors_of
from epicute.models.rope import Rope
from epicute.models.smollm2 import Checkpoint

__all__ = ["PackagedTensors", "packaged_config"]


def packaged_config(checkpoint: Checkpoint) -> ModelConfig:
    """What the packaged model is."""
    config = checkpoint.config
    dim = config.shape.head_dim
    return ModelConfig(
        family="llama",
        shape=config.shape,
        layers=config.layers,
        vocabulary=config.vocabulary,
        rope=Rope(dim, dim, config.rope_theta),
        eps=config.rms_eps,
        context=config.context,
        tied=True,
    )


class PackagedTensors(Mapping[str, Tensor]):
    """The checkpoint's tensors, float32, a layer dequantised when the first of it is asked for and forgotten with the
    next one.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._names = tensors_of(packaged_config(checkpoint))
        self._layer: tuple[int, Mapping[str, Tensor]] = (-1, {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        if name == EMBEDDING:
            return self._checkpoint.embedding()
        if name == NORM:
            return self._checkpoint.final_norm()
        index = int(name.removeprefix(layer_prefix(0)[: -len("0.")]).split(".")[0])
        if self._layer[0] != index:
            self._layer = (index, self._checkpoint.layer(index))
        return self._layer[1][name.removeprefix(layer_prefix(index)).removesuffix(".weight")]
