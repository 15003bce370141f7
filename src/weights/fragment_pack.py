"""A weight as few-row kernels stream it: records in fragment order, one contiguous piece per work item."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from epicute.errors import ArgumentError, require
from epicute.layouts import Record, Records, RowOrder
from epicute.quant.int4 import SCALE_DTYPES, Int4Codes, groups_of
from epicute.weights.int4_pack import arrange, pack_int4, restore, unpack_int4
from epicute.weights.quantized import DTYPES, Quantized, bits
from epicute.weights.quantized_int4 import QuantizedInt4
from epicute.weights.storage import (
    read_file,
    require_columns,
    require_positive_scales,
    same_order,
    write_file,
)

__all__ = ["FRAGMENT_VERSION", "FragmentPacked"]

FRAGMENT_VERSION = 2
"""Number of the arrangement of bytes; files of any other are refused."""

KIND = "fragments"

_BITS = {"int4": 4, "fp8": 8, "bf16": 16, "fp16": 16}


@dataclass(frozen=True, eq=False)
class FragmentPacked:
    """Codes in fragment order (``layouts.decode_order``), rows in the order a composition asks for.

    Attributes:
        format: "int4", "fp8", "bf16" or "fp16".
        data: (down, along, record size) contiguous uint8: the records, padding included.
        scale: fp8: (N,) or (1,) float32 in logical order; else None (INT4's scales are in the records).
        order: where each output feature stands.
        records: how ``data`` is divided.
        shape: (N, K).
        group: of int4: 32, 64, 128, or -1 for one scale per output feature; else 0.
        scale_dtype: of the scales in the records: float16 or bfloat16; None without.
        gain_operand: see ``QuantizedInt4``.
        name: how errors call it.
    """

    format: str
    data: torch.Tensor
    scale: torch.Tensor | None
    order: RowOrder
    records: Records
    shape: tuple[int, int]
    group: int = 0
    scale_dtype: torch.dtype | None = None
    gain_operand: bool = False
    name: str = "weight"

    def __post_init__(self) -> None:
        columns, width = self.shape
        require_columns(self.name, self.order, columns)
        known = _BITS.get(self.format)
        require(
            known is not None,
            f"{self.name}.format",
            repr(self.format),
            f"{tuple(_BITS)}",
            "name one",
        )
        record = self.records.record
        expected = Records.of(
            self.order.rows,
            width,
            int(known or 0),
            self.group,
            record.zeros,
            record.tiles,
            max(record.scales_start, 1),
        )
        require(
            self.records == expected and (self.format == "int4") == (self.group != 0),
            f"{self.name}.records",
            self.records,
            f"{expected} for {self.format} of shape {self.shape} in order [{self.order}]",
            "build it with Quantized.pack_fragments",
        )
        size = (self.records.down, self.records.along, record.size)
        require(
            self.data.dtype == torch.uint8
            and tuple(self.data.shape) == size
            and self.data.is_contiguous(),
            f"{self.name}.data",
            f"{tuple(self.data.shape)} {self.data.dtype}, strides {self.data.stride()}",
            f"contiguous {size} uint8",
            "build it with Quantized.pack_fragments",
        )
        self._require_scales(columns)

    def _require_scales(self, columns: int) -> None:
        scale, dtypes = self.scale, SCALE_DTYPES if self.format == "int4" else (None,)
        require(
            self.scale_dtype in dtypes,
            f"{self.name}.scale_dtype",
            self.scale_dtype,
            f"one of {dtypes} for {self.format}",
            "build it with Quantized.pack_fragments",
        )
        fits = (
            scale is None
            if self.format != "fp8"
            else scale is not None
            and scale.dtype == torch.float32
            and scale.shape in ((1,), (columns,))
            and scale.device == self.data.device
        )
        require(
            fits,
            f"{self.name}.scale",
            None if scale is None else f"{tuple(scale.shape)} {scale.dtype} on {scale.device}",
            f"float32 ({columns},) or (1,) on {self.data.device} for fp8, else None",
            "build it with Quantized.pack_fragments",
        )

    def __repr__(self) -> str:
        at = f"{self.shape} on {self.device}"
        group = f", groups of {self.group}" if self.group > 0 else ""
        pieces = (
            f"{self.records.down} x {self.records.along} records of {self.records.record.size} B"
        )
        return f"FragmentPacked({self.name!r}, {self.format}{group}, {at}, {pieces}, order [{self.order}])"

    @staticmethod
    def of(
        source: Quantized, order: RowOrder, tiles: int = 1, record_bytes: int | None = None
    ) -> FragmentPacked:
        """Pack ``source`` in ``order``. Looks at the values once, so it waits for the device.

        Args:
            source: any format; int4 with its groups.
            order: of the composition that will read it.
            tiles: row tiles (of 16 rows) per record: 1 for `mma.sync`, 4 for `wgmma`.
            record_bytes: of a record's codes, at most; 8192 unless given.

        Raises:
            ArgumentError: the order is for another number of output features, a scale is not finite (or, of fp8, not
                positive), or an INT4 code is above 15.
        """
        columns, width = (int(n) for n in source.codes.shape)
        require_columns(source.name, order, columns)
        int4 = source if isinstance(source, QuantizedInt4) else None
        limit = {} if record_bytes is None else {"record_bytes": record_bytes}
        records = Records.of(
            order.rows,
            width,
            _BITS[source.format],
            int4.group if int4 else 0,
            int4 is not None and int4.zero is not None,
            tiles,
            **limit,
        )
        rows = torch.from_numpy(order.physical()).to(source.codes.device)
        if int4 is not None:
            data = pack_int4(int4.int4, rows, records)
            return FragmentPacked(
                source.format,
                data,
                None,
                order,
                records,
                (columns, width),
                int4.group,
                int4.scales.dtype,
                int4.gain_operand,
                source.name,
            )
        require_positive_scales(source.name, source.scale)
        codes = bits(source.codes)
        padded = torch.zeros(records.rows, records.width, dtype=codes.dtype, device=codes.device)
        padded[rows, :width] = codes
        places = torch.from_numpy(records.record.code_sources).to(codes.device)
        data = arrange(padded, records, records.record.depth, places).view(torch.uint8)
        shape = (columns, width)
        return FragmentPacked(
            source.format, data, source.scale, order, records, shape, name=source.name
        )

    def unpack(self) -> Quantized:
        """The codes and scales that were packed, bit for bit, in logical order."""
        rows = torch.from_numpy(self.order.physical()).to(self.device)
        columns, width = self.shape
        if self.format == "int4":
            codes = torch.empty(self.shape, dtype=torch.uint8, device="meta")
            groups = (columns, groups_of(width, self.group))
            scale = torch.empty(groups, dtype=self.scale_dtype, device="meta")
            like = Int4Codes(codes, scale, None, self.group, self.name)
            found = unpack_int4(self.data, rows, self.records, like)
            return QuantizedInt4.of(found, self.name, self.gain_operand)
        record, dtype = self.records.record, DTYPES[self.format]
        places = torch.from_numpy(record.code_sources).to(self.device)
        whole = self.data.view(torch.uint8 if record.bits == 8 else torch.int16)
        cells = restore(whole, self.records, record.depth, places)[rows, :width]
        return Quantized(self.format, cells.view(dtype), self.scale, self.name)

    @property
    def device(self) -> torch.device:
        """Where the records are."""
        return self.data.device

    @cached_property
    def nbytes(self) -> int:
        """Bytes of records and scales, padding included."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def to(self, device: torch.device | str) -> FragmentPacked:
        """The same weight on ``device``."""
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, data=self.data.to(device), scale=scale)

    def order_matches(self, order: RowOrder) -> bool:
        """Whether every row stands where ``order`` would put it, whatever it calls its ranges."""
        return same_order(self.order, order)

    def require_order(self, order: RowOrder, reader: str) -> None:
        """Raise unless ``reader`` (a composition, in words) finds rows in the ``order`` it needs.

        Raises:
            ArgumentError: naming both orders.
        """
        require(
            self.order_matches(order),
            f"{self.name}.order",
            f"[{self.order}]",
            f"[{order}] for {reader}",
            "pack again: packed.unpack().pack_fragments(order)",
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: tensors ``data`` and ``scale``, the rest as metadata.

        The file appears whole or not at all.
        """
        tensors = {"data": self.data}
        if self.scale is not None:
            tensors["scale"] = self.scale.contiguous()
        metadata = {
            "kind": KIND,
            "layout_version": str(FRAGMENT_VERSION),
            "format": self.format,
            "shape": json.dumps(self.shape),
            "order": self.order.to_json(),
            "records": json.dumps(asdict(self.records), sort_keys=True),
            "group": str(self.group),
            "scale_dtype": str(self.scale_dtype).removeprefix("torch."),
            "gain_operand": json.dumps(self.gain_operand),
            "name": self.name,
        }
        write_file(path, tensors, metadata)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> FragmentPacked:
        """Read what ``save`` wrote.

        Raises:
            ArgumentError: another kind of file, another layout version, or unreadable contents.
        """
        found, tensors = read_file(path, device, FRAGMENT_VERSION, KIND)
        try:
            fields = _fields(found)
            packed = FragmentPacked(data=tensors["data"], scale=tensors.get("scale"), **fields)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(
                f"{os.fspath(path)}: got unreadable contents ({error!r}), expected a packed weight. "
                "Fix: write it with FragmentPacked.save"
            ) from error
        require_positive_scales(packed.name, packed.scale)
        return packed


def _fields(found: dict[str, str]) -> dict[str, Any]:
    columns, width = json.loads(found["shape"])
    records = json.loads(found["records"])
    names = {str(dtype).removeprefix("torch."): dtype for dtype in (None, *SCALE_DTYPES)}
    return {
        "format": found["format"],
        "order": RowOrder.from_json(found["order"]),
        "records": Records(Record(**records.pop("record")), **records),
        "shape": (columns, width),
        "group": int(found["group"]),
        "scale_dtype": names[found["scale_dtype"]],
        "gain_operand": bool(json.loads(found["gain_operand"])),
        "name": found["name"],
    }
