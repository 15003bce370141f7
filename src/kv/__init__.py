"""Where keys and values live: pages, slots and the addresses of their elements."""

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

__all__ = [
    "NO_SLOT",
    "PAGE_SIZES",
    "KVPool",
    "Strides",
    "cell_offset",
    "check_slots",
    "slot_is_valid",
    "slots_for",
    "split_slot",
]
