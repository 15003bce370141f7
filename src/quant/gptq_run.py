"""GPTQ over a model, one linear at a time: what is held is one weight, its Hessian and one batch of its inputs.

    with GptqRun(folder, calibration="c4, 128 x 2048 tokens, seed 0", device="cuda", progress=ProgressBar()) as run:
        for name, result in run.stream(linears()):
            ...  # the codes, on the CPU

``linears`` is a generator: the inputs of a later linear may depend on the results of earlier ones, which the caller
has by then. Every finished linear is a file of its own in ``folder``, so that an interrupted run goes on where it
stopped: what is finished is read back, and its inputs are not asked for. ``manifest.json`` and each file say what they
were made with; whatever differs is refused, never mixed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

from epicute.errors import ArgumentError, require
from epicute.quant.gptq import GptqConfig, GptqResult, Hessian, quantize_gptq
from epicute.quant.int4 import Int4Codes

__all__ = ["GptqRun", "Linear", "Progress", "ProgressBar"]

VERSION = 1
"""Number of the files' contents; others are refused."""


@dataclass(frozen=True, eq=False)
class Linear:
    """A weight and where its calibration inputs come from.

    Attributes:
        name: unique in the run.
        weight: gives (N, K) float32, bfloat16 or float16, on any device.
        batches: gives its inputs, batch by batch, (..., K) each. Not called for a linear that is finished.
    """

    name: str
    weight: Callable[[], torch.Tensor]
    batches: Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True)
class Progress:
    """A linear that has just been finished, or read back.

    Attributes:
        name: of the linear.
        done: linears finished so far, this one included.
        total: of the run, where known.
        seconds: that it took.
        resumed: whether it was read back.
        error: of the codes over the calibration inputs, see ``GptqResult``.
        nearest: of rounding to nearest.
    """

    name: str
    done: int
    total: int | None
    seconds: float
    resumed: bool
    error: float
    nearest: float


class ProgressBar:
    """A callback that draws a bar, with tqdm where it is installed, else a line per linear.

    Args:
        file: where to; standard error unless given.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._bar: Any = None
        self._tqdm: Any = None
        if importlib.util.find_spec("tqdm") is not None:
            self._tqdm = importlib.import_module("tqdm").tqdm

    def __call__(self, step: Progress) -> None:
        """Draw one finished linear."""
        text = f"{step.name} {step.error:.2e}, nearest {step.nearest:.2e}"
        if self._tqdm is None:
            of = "" if step.total is None else f"/{step.total}"
            print(f"gptq {step.done}{of}: {text}", file=self._file or sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = self._tqdm(total=step.total, desc="gptq", unit="linear", file=self._file)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(1)
        if step.done == step.total:
            self.close()

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class GptqRun:
    """A folder of finished linears, and what makes more of them.

    Args:
        folder: made if need be. One run at a time writes to it.
        config: how codes are chosen.
        calibration: what the inputs are, in words of your own (data, tokens, seed, model); a run is continued with
            the same words alone.
        device: where linears are worked on, one at a time.
        precision: of the products of a Hessian, see ``Hessian``.
        total: linears of the whole run, for progress.
        progress: called after every linear.

    Raises:
        ArgumentError: the folder was made with another configuration, calibration or version.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: GptqConfig | None = None,
        *,
        calibration: str,
        device: torch.device | str = "cpu",
        precision: torch.dtype = torch.float64,
        total: int | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        require(
            bool(calibration.strip()),
            "calibration",
            repr(calibration),
            "words that say what the inputs are",
            "name data, number of tokens and seed",
        )
        self.folder, self.config = Path(folder), config or GptqConfig()
        self.device, self.precision = torch.device(device), precision
        self.total, self.progress = total, progress
        self._seen: set[str] = set()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_manifest(calibration)

    def __enter__(self) -> GptqRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close = getattr(self.progress, "close", None)
        if close is not None:
            close()

    def stream(self, linears: Iterable[Linear]) -> Iterator[tuple[str, GptqResult]]:
        """Name and result of every linear, in order; the next is asked for when a result has been taken."""
        for linear in linears:
            yield linear.name, self.linear(linear)

    def linear(self, linear: Linear) -> GptqResult:
        """Codes of one linear, on the CPU: read back where they are finished, else chosen and stored.

        Raises:
            ArgumentError: a name used twice in this run; a finished linear of this name with another weight; inputs or
                weights that are not finite or do not fit. The message names the linear.
        """
        require(
            linear.name not in self._seen,
            "name",
            repr(linear.name),
            "a new name",
            "name linears apart",
        )
        started = time.perf_counter()
        weight = linear.weight()
        path = self.folder / _file_name(linear.name)
        fingerprint = _fingerprint(weight)
        resumed = path.exists()
        if resumed:
            result = _read(path, linear.name, fingerprint, self.config)
        else:
            result = self._compute(linear, weight)
            _write(path, linear.name, fingerprint, result)
        self._seen.add(linear.name)
        if self.progress is not None:
            seconds = time.perf_counter() - started
            counts = (len(self._seen), self.total)
            errors = (result.error, result.nearest)
            self.progress(Progress(linear.name, *counts, seconds, resumed, *errors))
        return result

    def _compute(self, linear: Linear, weight: torch.Tensor) -> GptqResult:
        try:
            require(
                weight.ndim == 2,
                "weight.shape",
                tuple(weight.shape),
                "(N, K)",
                "output features first",
            )
            hessian = Hessian(weight.shape[1], self.device, self.precision)
            for batch in linear.batches():
                hessian.add(batch)
            found = quantize_gptq(weight.to(self.device), hessian.matrix, self.config)
        except ArgumentError as error:
            raise ArgumentError(f"{linear.name}: {error}") from error
        codes = found.codes
        zero = None if codes.zero is None else codes.zero.cpu()
        held = Int4Codes(codes.codes.cpu(), codes.scale.cpu(), zero, codes.group, linear.name)
        return found._replace(codes=held)

    def _check_manifest(self, calibration: str) -> None:
        path = self.folder / "manifest.json"
        wanted = {
            "version": VERSION,
            "calibration": calibration,
            "precision": str(self.precision).removeprefix("torch."),
            **_described(self.config),
        }
        if not path.exists():
            left = sorted(p.name for p in self.folder.glob("*.safetensors"))
            require(
                not left,
                str(self.folder),
                f"{left[:3]} without a manifest.json",
                "an empty folder, or one that a run has made",
                "choose another folder",
            )
            partial = path.with_name(f".manifest.{os.getpid()}")
            partial.write_text(json.dumps(wanted, indent=1, sort_keys=True), encoding="utf-8")
            os.replace(partial, path)
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ArgumentError(
                f"{path}: got {error}, expected JSON. Fix: choose another folder"
            ) from error
        for name in sorted({*wanted, *found}):
            require(
                found.get(name) == wanted.get(name),
                f"{path}: {name}",
                repr(found.get(name)),
                f"{wanted.get(name)!r}, as this run is configured",
                "continue with the settings of the folder, or choose another folder",
            )


def _described(config: GptqConfig) -> dict[str, Any]:
    """The configuration as JSON keeps it, ``block`` apart: it does not decide what is computed."""
    fields = asdict(config)
    fields.pop("block")
    grid = fields.pop("grid")
    grid["scale_dtype"] = str(grid["scale_dtype"]).removeprefix("torch.")
    return fields | grid


def _file_name(name: str) -> str:
    """A file name that says which linear it is and is that of no other."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:120]}-{digest}.safetensors"


def _fingerprint(weight: torch.Tensor) -> str:
    raw = weight.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{raw.dtype} {tuple(raw.shape)} ".encode())
    digest.update(raw.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(path: Path, name: str, fingerprint: str, result: GptqResult) -> None:
    """One finished linear, in a file that appears whole or not at all."""
    from safetensors.torch import save_file

    codes = result.codes.codes
    even = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    tensors = {
        "codes": even[:, 0::2] | even[:, 1::2] << 4,
        "scale": result.codes.scale.contiguous(),
    }
    if result.codes.zero is not None:
        tensors["zero"] = result.codes.zero.contiguous()
    metadata = {
        "version": str(VERSION),
        "name": name,
        "weight": fingerprint,
        "width": str(codes.shape[1]),
        "error": repr(result.error),
        "nearest": repr(result.nearest),
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, partial, metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path, name: str, fingerprint: str, config: GptqConfig) -> GptqResult:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ArgumentError(
            f"{path}: got {error}, expected a finished linear. Fix: delete the file, and it is made again"
        ) from error
    wanted = {"version": str(VERSION), "name": name, "weight": fingerprint}
    for key, value in wanted.items():
        require(
            found.get(key) == value,
            f"{path}: {key}",
            repr(found.get(key)),
            repr(value),
            "the weight has changed since: choose another folder, or delete the file",
        )
    halves = tensors["codes"]
    codes = torch.stack([halves & 15, halves >> 4], dim=2).flatten(1)[:, : int(found["width"])]
    held = Int4Codes(
        codes.contiguous(), tensors["scale"], tensors.get("zero"), config.grid.group, name
    )
    return GptqResult(held, float(found["error"]), float(found["nearest"]))
