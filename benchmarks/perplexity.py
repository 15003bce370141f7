"""Table ``perplexity``: what formats of weights and caches cost a trained model, computed by the CPU references.

``python -m benchmarks perplexity`` reads SmolLM2-135M from its package (or ``--checkpoint FOLDER``) and a speech that
the model has not seen (or ``--text FILE``). Nothing is timed and no GPU kernel runs: every number is that of
``epicute.models.reference_backend``, which rounds where kernels round and adds in float64. ``backend`` says so.

Smoothing is judged on one window of 8192 tokens, the model's whole context; the other formats on windows of 2048.
Every row names the perplexity of BF16 on the same tokens, and the standard error of the mean difference of the two
log-losses.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gptq_model import gptq_codes
from benchmarks.harness import Options, told
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.texts import CALIBRATION, HELD_OUT, speech
from benchmarks.transformers_model import transformers_model
from epicute.kv.cache import KVCache
from epicute.kv.qk4pv8_layers import QK4PV8Form
from epicute.models.config import ModelConfig
from epicute.models.folder import Folder, tensors_of
from epicute.models.generation import fp8_scales
from epicute.models.llama import Llama
from epicute.models.packaged import PackagedTensors, packaged_config
from epicute.models.reference_backend import ReferenceBackend
from epicute.models.reference_means import observe_means
from epicute.models.requests import Requests
from epicute.models.smollm2 import Checkpoint
from epicute.quant.smoothing import Calibration

__all__ = ["FLOOR", "PAPER", "PROTOCOL", "kernels", "measure", "recovered", "summary", "table"]

PAPER = (
    "MpFA (arXiv 2609.04521), section 5, and FuTransformer (arXiv 2610.23796), section 4.10: quality of formats, on a "
    "small model instead of theirs"
)

PROTOCOL = (
    "teacher-forced prefill of windows of the text {text}, each by itself, every token of a window but the first "
    "scored; computed by the CPU references in float64, which round where kernels round, no GPU kernel involved; "
    "checkpoint rounded to BF16 first; scales of FP8 caches, means of static smoothing and inputs of GPTQ from up to "
    "{calibration} tokens of other speeches; INT4 caches as a decode reads them, all rows quantised; FP8 weights with "
    "delayed scales after one window that settles them; QK4PV8 with P scale 448 and no error of the tensor core's "
    "accumulator; standard_error: of the mean difference of log-losses"
)

FLOOR = "none (0): nothing is timed"

CONTEXT = 8192
WINDOW = 2048
LENGTHS = (CONTEXT, WINDOW)
TOKENS = {CONTEXT: 8192, WINDOW: 4096}
"""Tokens of the text that are read at most, by the length of a window."""

PLAIN_TOKENS = 12288
"""The same of BF16 beside ``transformers``, in windows of ``WINDOW``."""

CALIBRATION_TOKENS = 4096
GPTQ_LENGTH = 512
SLICE = 1024
"""Rows whose logits are in memory at a time."""

GROUP = 128


@dataclass(frozen=True)
class Kind:
    """A row: what weights and cache are, and how attention multiplies."""

    length: int
    weights: str = "bf16"
    cache: str = "bf16"
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> dict[str, Any]:
        """Fields of the table's case."""
        return {"weights": self.weights, "cache": self.cache, "length": self.length, **self.extra}


def kinds(length: int) -> Iterator[Kind]:
    """Every row of one length of windows; BF16 comes first."""
    yield Kind(length)
    if length == CONTEXT:
        for smoothing in ("none", "sequence", "static"):
            yield Kind(length, cache="qk4pv8", extra={"qk": "exact16", "smoothing": smoothing})
        yield Kind(length, cache="fp8", extra={"variant": "fp8/fp8"})
        return
    yield Kind(length, "fp8", extra={"variant": "delayed scales"})
    yield Kind(length, cache="fp8", extra={"variant": "bf16/bf16"})
    for variant in ("rotated", "not rotated"):
        yield Kind(length, cache="int4", extra={"variant": variant})
    for variant in ("rounded to nearest", "GPTQ"):
        yield Kind(length, "int4", extra={"variant": variant, "group": GROUP})
    yield Kind(length, "int4", "int4", {"variant": "GPTQ, cache rotated", "group": GROUP})
    for qk, smoothings in (
        ("exact16", ("none", "sequence", "static")),
        ("fast8", ("none", "static")),
    ):
        for smoothing in smoothings:
            yield Kind(length, cache="qk4pv8", extra={"qk": qk, "smoothing": smoothing})


@dataclass
class Bench:
    """A checkpoint, texts, and what was learnt from the calibration text; each made when first asked for."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    text: Sequence[int]
    calibration: Sequence[int]
    _models: dict[str, Llama] = field(default_factory=dict)
    _baselines: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def create(options: Options) -> Bench:
        """Of the command line's checkpoint and text; the packaged ones where they are not given."""
        if options.checkpoint is not None:
            from tokenizers import Tokenizer

            config, source = ModelConfig.from_folder(options.checkpoint), Folder(options.checkpoint)
            tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
            tensors = {name: source[name].bfloat16() for name in tensors_of(config)}
        else:
            packaged = Checkpoint.open()
            config, tokenizer = packaged_config(packaged), packaged.tokenizer
            stored = PackagedTensors(packaged)
            tensors = {name: stored[name].bfloat16() for name in stored}
        text = speech(HELD_OUT) if options.text is None else options.text.read_text("utf-8")
        others = "\n\n".join(map(speech, CALIBRATION))
        return Bench(config, tensors, tokenizer.encode(text).ids, tokenizer.encode(others).ids)

    def windows(self, length: int, most: int | None = None) -> list[Sequence[int]]:
        """Whole windows of the text, of ``most`` tokens in all; the text itself where it is shorter than one."""
        ids = self.text[: TOKENS.get(length, length) if most is None else most]
        whole = [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
        return whole or [ids]

    @property
    def learnt_from(self) -> list[Sequence[int]]:
        """The calibration text in windows."""
        ids = self.calibration[:CALIBRATION_TOKENS]
        return [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]

    def model(self, weights: str) -> Llama:
        """The model with weights of one form; one of them at a time."""
        if weights not in self._models:
            self._models.clear()
            gc.collect()
            given = {"int4": self.gptq} if weights == "gptq" else {}
            form = "int4" if weights == "gptq" else weights
            made = Llama.from_tensors(
                self.config, self.tensors, device="cpu", weights=form, **given
            )
            self._models[weights] = made
            if form == "fp8":
                self.losses(made, self.windows(WINDOW)[:1], lambda n: made.new_cache(1, n))
        return self._models[weights]

    @cached_property
    def gptq(self) -> Mapping[str, Any]:
        """Codes of every projection, chosen on the calibration text."""
        ids = self.calibration[:CALIBRATION_TOKENS]
        parts = [ids[at : at + GPTQ_LENGTH] for at in range(0, len(ids), GPTQ_LENGTH)]
        with tempfile.TemporaryDirectory() as folder:
            return gptq_codes(self.config, self.tensors, parts, Path(folder))

    @cached_property
    def means(self) -> Calibration:
        """Of static smoothing."""
        return observe_means(self.model("bf16"), self.learnt_from)

    @cached_property
    def scales(self) -> tuple[Tensor, Tensor]:
        """Of an FP8 cache."""
        return fp8_scales(self.model("bf16"), self.learnt_from[0])

    def cache(self, kind: Kind, model: Llama) -> Callable[[int], KVCache]:
        """What makes the row's cache for so many tokens."""
        if kind.cache == "qk4pv8":
            smoothing = kind.extra["smoothing"]
            means = self.means if smoothing == "static" else None
            form = QK4PV8Form(smoothing, qk=kind.extra["qk"], means=means)
            return lambda n: model.new_cache(1, n, dtype=form)
        if kind.cache == "fp8":
            scales = self.scales
            return lambda n: model.new_cache(1, n, dtype="fp8", scales=scales)
        if kind.cache == "int4":
            rotated = kind.extra["variant"] != "not rotated"
            return lambda n: model.new_cache(1, n, dtype="int4", rotated=rotated)
        return lambda n: model.new_cache(1, n)

    def row_losses(self, kind: Kind, most: int | None = None) -> Tensor:
        """(scored tokens,) float64 log-losses of a row."""
        gptq = kind.extra.get("variant", "").startswith("GPTQ")
        model = self.model("gptq" if gptq else kind.weights)
        make = self.cache(kind, model)
        backend = model.backend
        assert isinstance(backend, ReferenceBackend)
        backend.attention = "fp8/fp8" if kind.extra.get("variant") == "fp8/fp8" else "bf16/bf16"
        backend.as_decoded = kind.cache == "int4"
        try:
            return self.losses(model, self.windows(kind.length, most), make)
        finally:
            backend.attention, backend.as_decoded = "bf16/bf16", False

    @staticmethod
    @torch.no_grad()
    def losses(
        model: Llama, windows: Sequence[Sequence[int]], make: Callable[[int], KVCache]
    ) -> Tensor:
        """(scored tokens,) float64: minus the log of what each token but a window's first was given."""
        found = []
        for window in windows:
            cache, ids, count = make(len(window)), torch.tensor(window), len(window)
            cache.reserve([count], [0])
            requests = Requests.packed([count], cache.spec.page_size, cache.host_table([0]))
            x = model.backend.embed(ids)
            for layer in range(model.config.layers):
                x = model.backend.block(layer, x, requests, cache)
            for some in torch.arange(count - 1).split(SLICE):
                logits = model.backend.logits(x, some).double()
                right = ids[some + 1]
                found.append(torch.nn.functional.cross_entropy(logits, right, reduction="none"))
        return torch.cat(found)

    def baseline(self, length: int) -> Tensor:
        """Losses of BF16 on the same windows."""
        if length not in self._baselines:
            self._baselines[length] = self.row_losses(Kind(length))
        return self._baselines[length]

    def theirs(self, length: int) -> dict[str, Tensor]:
        """Losses of ``transformers`` in float32 and in BF16, of the same BF16 weights."""
        found = {}
        for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
            model = transformers_model(self.config, self.tensors, dtype)
            losses = []
            for window in self.windows(length, PLAIN_TOKENS):
                ids = torch.tensor(window)
                with torch.no_grad():
                    logits = model(input_ids=ids[None]).logits[0, :-1]
                for part, right in zip(logits.split(SLICE), ids[1:].split(SLICE), strict=True):
                    given = part.double()
                    losses.append(torch.nn.functional.cross_entropy(given, right, reduction="none"))
            found[f"transformers-{name}"] = torch.cat(losses)
        return found


def perplexity(losses: Tensor) -> float:
    """e to the mean."""
    return math.exp(float(losses.mean()))


def measure(bench: Bench, kind: Kind) -> Row:
    """One row."""
    plain = (kind.weights, kind.cache) == ("bf16", "bf16")
    if plain and kind.length == WINDOW:
        mine = bench.row_losses(kind, PLAIN_TOKENS)
        peers = bench.theirs(kind.length)
    else:
        base = bench.baseline(kind.length)
        mine = base if plain else bench.row_losses(kind)
        peers = {} if plain else {"ours-bf16": base}
    return Row(
        {"shape": bench.config.shape.name, "M": len(mine), **kind.case},
        None,
        0.0,
        perplexity={"ours": perplexity(mine), **{n: perplexity(x) for n, x in peers.items()}},
        standard_error={
            name: float((mine - x).std() / len(mine) ** 0.5) for name, x in peers.items()
        },
    )


def kernels(options: Options) -> Iterator[Any]:
    """None: the references run."""
    return iter(())


def table(options: Options, timer: object, source: Provenance, folder: Path) -> Table:
    """Compute every row and write ``perplexity.json`` into ``folder``."""
    bench = Bench.create(options)
    text = HELD_OUT if options.text is None else options.text.stem
    protocol = PROTOCOL.format(text=text, calibration=CALIBRATION_TOKENS)
    path = folder / "perplexity.json"
    found = Table("perplexity", PAPER, protocol, FLOOR, source, path, backend="reference")
    for length in options.lengths or LENGTHS:
        for kind in kinds(length):
            try:
                row = measure(bench, kind)
            except Exception as error:
                case = {"shape": bench.config.shape.name, **kind.case}
                row = Row(case, None, 0.0, failed={"ours": told(error)})
            found.add(row)
    return found


def recovered(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str, str], float]:
    """(length, qk, smoothing) → share of what QK4PV8 loses without smoothing that it gives back, in mean log-loss over
    BF16's.

    Not there where the unsmoothed row is missing. Above 1 or below 0 where smoothing does more or harm.
    """
    lost: dict[tuple[int, str, str], float] = {}
    for row in rows:
        case, found = row["case"], row.get("perplexity", {})
        if case.get("cache") == "qk4pv8" and {"ours", "ours-bf16"} <= set(found):
            at = case["length"], case["qk"], case["smoothing"]
            lost[at] = math.log(found["ours"] / found["ours-bf16"])
    return {
        (length, qk, smoothing): 1 - loss / lost[length, qk, "none"]
        for (length, qk, smoothing), loss in lost.items()
        if smoothing != "none" and lost.get((length, qk, "none"))
    }


def summary(content: Mapping[str, Any]) -> str:
    """What smoothing gives back."""
    return "\n".join(
        f"smoothing {smoothing}, {qk}, {length} tokens: gives back {share:.0%} of what QK4PV8 loses"
        for (length, qk, smoothing), share in recovered(content["rows"]).items()
    )
