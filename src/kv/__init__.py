"""Where keys and values live: pages, slots and the addresses of their elements."""

from epicute.kv.cache import CapacityError, KVCache
from epicute.kv.cache_spec import CacheSpec
from epicute.kv.fp8_layers import Fp8Layers
from epicute.kv.int4 import Int4Cache
from epicute.kv.int4_layers import Int4Layers
from epicute.kv.pages import (
    NO_SLOT,
    PAGE_SIZES,
    KVPool,
    Strides,
    cell_offset,
    check_slots,
    slot_is_valid,
    slots_for,
    split_slot,
)
from epicute.kv.qk4pv8 import QK4PV8Cache
from epicute.kv.qk4pv8_layers import QK4PV8Form, QK4PV8Layers

__all__ = [
    "NO_SLOT",
    "PAGE_SIZES",
    "CacheSpec",
    "CapacityError",
    "Fp8Layers",
    "Int4Cache",
    "Int4Layers",
    "KVCache",
    "KVPool",
    "QK4PV8Cache",
    "QK4PV8Form",
    "QK4PV8Layers",
    "Strides",
    "cell_offset",
    "check_slots",
    "slot_is_valid",
    "slots_for",
    "split_slot",
]
