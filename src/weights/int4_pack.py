"""INT4 codes, scales and zero points as the bytes of records, and back (FuTransformer 3.3.4, ``layouts.decode_order``).

Padding is exact: a padding row or group has scale 0, and padding columns inside a group that K leaves unfinished hold
its zero point, so that all of it is worth 0 whether the kernel subtracts from codes or from sums. Activations beyond K
have to be finite numbers all the same: 0 * NaN is NaN.
"""

from __future__ import annotations

import torch

from epicute.layouts import CHANNEL, Records
from epicute.quant.int4 import MIDDLE, Int4Codes, per_column, require_int4_values

__all__ = ["arrange", "pack_int4", "restore", "unpack_int4"]


def arrange(cells: torch.Tensor, records: Records, width: int, order: torch.Tensor) -> torch.Tensor:
    """(rows, along * width) cells as (down, along, record rows * width), each record's in ``order``."""
    high = records.record.rows
    tiled = cells.reshape(records.down, high, records.along, width).permute(0, 2, 1, 3)
    return tiled.reshape(records.down, records.along, high * width)[..., order]


def restore(cells: torch.Tensor, records: Records, width: int, order: torch.Tensor) -> torch.Tensor:
    """The inverse of ``arrange``."""
    high = records.record.rows
    tiled = torch.empty_like(cells)
    tiled[..., order] = cells
    tiled = tiled.reshape(records.down, records.along, high, width).permute(0, 2, 1, 3)
    return tiled.reshape(records.down * high, records.along * width)


def pack_int4(source: Int4Codes, rows: torch.Tensor, records: Records) -> torch.Tensor:
    """Bytes of all records. Looks at the values once, so it waits for the device.

    Args:
        source: codes in logical order.
        rows: (N,) int64, the physical row of each output feature.
        records: of ``source``'s group, with zero points where it has some.

    Returns:
        (down, along, record size) uint8.

    Raises:
        ArgumentError: a code or zero point above 15, or a scale that is not finite.
    """
    require_int4_values(source.name, source.codes, source.scale, source.zero)
    record, device = records.record, source.codes.device
    width, groups = source.codes.shape[1], records.along * record.groups
    scale = torch.zeros(records.rows, groups, dtype=torch.int16, device=device)
    point = torch.full((records.rows, groups), MIDDLE, dtype=torch.uint8, device=device)
    known = groups if source.group == CHANNEL else source.scale.shape[1]
    scale[rows, :known] = source.scale.view(torch.int16).expand(-1, known)
    if source.zero is not None:
        point[rows, :known] = source.zero.expand(-1, known)
    codes = per_column(point, record.group, records.width)
    codes[rows, :width] = source.codes
    order = torch.from_numpy(record.code_sources).to(device)
    nibbles = arrange(codes, records, record.depth, order)
    parts = [nibbles[..., 0::2] | nibbles[..., 1::2] << 4]
    slots = torch.from_numpy(record.slot_sources).to(device)
    parts.append(_slots(scale, records, slots, 0).view(torch.uint8))
    if record.zeros:
        parts.append(_slots(point, records, slots, MIDDLE))
    return torch.cat(parts, dim=2)


def unpack_int4(
    packed: torch.Tensor, rows: torch.Tensor, records: Records, source: Int4Codes
) -> Int4Codes:
    """What ``pack_int4`` packed, bit for bit.

    Args:
        packed: (down, along, record size) uint8.
        rows: (N,) physical row of each output feature.
        records: as packed.
        source: of the same group, name, shapes and dtypes; only these are looked at (a meta tensor will do).
    """
    record, device = records.record, packed.device
    width, known = source.codes.shape[1], source.scale.shape[1]
    halves = packed[..., : record.scales_start]
    nibbles = torch.stack([halves & 15, halves >> 4], dim=3).flatten(2)
    order = torch.from_numpy(record.code_sources).to(device)
    codes = restore(nibbles, records, record.depth, order)[rows, :width]
    slots = torch.from_numpy(record.slot_sources).to(device)
    stored = packed[..., record.scales_start : record.zeros_start].contiguous().view(torch.int16)
    scale = _groups(stored, records, slots)[rows, :known].view(source.scale.dtype)
    zero = None
    if record.zeros:
        zero = _groups(packed[..., record.zeros_start :], records, slots)[rows, :known]
    return Int4Codes(codes, scale, zero, source.group, source.name)


def _slots(grouped: torch.Tensor, records: Records, order: torch.Tensor, fill: int) -> torch.Tensor:
    """(rows, along * groups) as (down, along, record rows * slots), unused slots filled."""
    record = records.record
    wide = grouped.reshape(records.rows, records.along, record.groups)
    wide = torch.nn.functional.pad(wide, (0, record.slots - record.groups), value=fill)
    return arrange(wide.reshape(records.rows, -1), records, record.slots, order)


def _groups(stored: torch.Tensor, records: Records, order: torch.Tensor) -> torch.Tensor:
    """The inverse of ``_slots``."""
    record = records.record
    wide = restore(stored, records, record.slots, order)
    wide = wide.reshape(records.rows, records.along, record.slots)[..., : record.groups]
    return wide.reshape(records.rows, -1)
