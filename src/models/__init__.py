"""Models: layer shapes, checkpoints, prefill and decode blocks and Llama, and a trained checkpoint as a package."""

from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import BlockScales, LayerCache, Stream, Workspace, model_sites
from epicute.models.config import ModelConfig
from epicute.models.decode_block import DecodeBlock
from epicute.models.decode_block_spec import DecodeBlockSpec
from epicute.models.decode_cache import CacheForm, DecodeCache
from epicute.models.decode_step import DecodeStep
from epicute.models.decode_weights import DecodeWeights
from epicute.models.embedding import plan_embedding
from epicute.models.final_norm import plan_final_norm
from epicute.models.folder import Folder
from epicute.models.gains import fold_gain
from epicute.models.kernels import Kernels
from epicute.models.layer_weights import LayerWeights
from epicute.models.llama import Llama
from epicute.models.prefill import PrefillBlock
from epicute.models.requests import Requests
from epicute.models.rope import Rope
from epicute.models.shapes import SHAPES, LayerShape, projections

__all__ = [
    "SHAPES",
    "BlockScales",
    "BlockSpec",
    "CacheForm",
    "DecodeBlock",
    "DecodeBlockSpec",
    "DecodeCache",
    "DecodeStep",
    "DecodeWeights",
    "Folder",
    "Kernels",
    "LayerCache",
    "LayerShape",
    "LayerWeights",
    "Llama",
    "ModelConfig",
    "PrefillBlock",
    "Requests",
    "Rope",
    "Stream",
    "Workspace",
    "fold_gain",
    "model_sites",
    "plan_embedding",
    "plan_final_norm",
    "projections",
]
