"""Table ``prefill-model``: a trained model's prefill at batch one, and what its answers are worth.

``python -m benchmarks prefill-model --checkpoint FOLDER --text FILE`` reads a Hugging Face folder of
safetensors and a plain text. Rows of quality come first, one per format of weights: perplexity of the
text in windows, and logits against ``transformers`` in float32, with ``transformers`` in BF16 beside
them. Rows of time follow, per length and format: from token ids to the logits of the last token, keys
and values in a cache. Without a text prompts are random ids, and nothing is said of quality.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.check import Error, WrongResult, checker
from benchmarks.floors import BANDWIDTH, PEAK
from benchmarks.harness import Options, Session, fill, told
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Timer
from benchmarks.work import layer_floor
from epicute.models.config import ModelConfig
from epicute.models.llama import Llama
from epicute.models.requests import Requests

__all__ = ["FLOOR", "PAPER", "PROTOCOL", "kernels", "measure", "table"]

PAPER = "FuTransformer (arXiv 2610.23796), section 4.5, table 6: prefill of a complete model"

PROTOCOL = (
    ". A call is a prefill of one prompt, the logits of its last token included; one instance of each "
    "model and one cache, so that what a call reads (embedding, layers, head) lies as far apart as a "
    "call is long; transformers-eager is in a CUDA graph too, which spares it its launches. "
    "Perplexity: windows of {window} tokens, each by itself, after one that settles the scales; "
    "errors of its rows: all logits of these windows against transformers in float32, of rows of "
    "time: the last token's"
)

FLOOR = (
    "the layers' floors (as in prefill-layer) one after another, and the larger of the head's FLOP "
    "for one token over BF16's tensor peak and its bytes over 4.8 TB/s"
)

FORMATS = ("bf16", "fp8")
WINDOW = 2048
TOKENS = 12288
"""Tokens of the text that are read at most."""


def allowed(weights: str) -> Error:
    """What logits may be off by, over a whole model: far less than another token's."""
    return Error(0.25, 1.0) if weights == "fp8" else Error(0.05, 0.3)


@dataclass
class Models:
    """One checkpoint, in everybody's hands: each is loaded when it is first asked for."""

    folder: Path
    device: str
    _ours: dict[str, Llama] = field(default_factory=dict)
    _theirs: dict[torch.dtype, Any] = field(default_factory=dict)

    @cached_property
    def config(self) -> ModelConfig:
        """Of the folder."""
        return ModelConfig.from_folder(self.folder)

    def ours(self, weights: str) -> Llama:
        """epicute's, in one format."""
        if weights not in self._ours:
            self._ours[weights] = Llama.from_folder(
                self.folder, device=self.device, weights=weights
            )
        return self._ours[weights]

    def theirs(self, dtype: torch.dtype) -> Any:
        """``transformers``', with SDPA."""
        if dtype not in self._theirs:
            from transformers import AutoModelForCausalLM

            found = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=dtype, attn_implementation="sdpa"
            )
            self._theirs[dtype] = found.to(self.device).eval()
        return self._theirs[dtype]

    def encode(self, text: Path) -> list[int]:
        """Token ids of a file."""
        from tokenizers import Tokenizer

        found = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        ids: list[int] = found.encode(text.read_text(encoding="utf-8")).ids
        return ids


# --- quality ---


@dataclass
class Quality:
    """Windows of a text, for every format."""

    models: Models
    name: str
    windows: list[list[int]]

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case that every row of it has."""
        tokens = sum(map(len, self.windows))
        shape = self.models.config.shape.name
        variant = f"perplexity of {self.name}"
        sizes = {"M": tokens, "length": len(self.windows[0])}
        return {"shape": shape, "cache": "bf16", "variant": variant, **sizes}


@dataclass
class Judged:
    """What a candidate's logits add up to, window by window."""

    allowed: Error
    wrong: float = 0.0
    size: float = 0.0
    worst: float = 0.0
    loss: float = 0.0
    tokens: int = 0

    def see(self, logits: Tensor, exact: Tensor, ids: Tensor) -> None:
        """Take in (tokens, vocabulary) of one window, beside the reference's."""
        difference = torch.linalg.vector_norm(logits - exact, dim=1).double()
        size = torch.linalg.vector_norm(exact, dim=1).double()
        self.wrong += difference.square().sum().item()
        self.size += size.square().sum().item()
        self.worst = max(self.worst, (difference / size).max().item())
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
        self.loss += loss.item()
        self.tokens += len(ids) - 1

    @property
    def error(self) -> Error:
        """By norm over all logits, and of the worst token; raises WrongResult beyond the budget."""
        found = Error(math.sqrt(self.wrong / self.size), self.worst)
        if not found.within(self.allowed):
            raise WrongResult(f"logits: {found}, allowed {self.allowed}")
        return found

    @property
    def perplexity(self) -> float:
        """Of the text."""
        return math.exp(self.loss / self.tokens)


Answers = Callable[[Tensor], Tensor]


def our_logits(model: Llama) -> Answers:
    """(tokens, vocabulary) float32 of token ids, in a cache of their own."""

    def answer(ids: Tensor) -> Tensor:
        return model.prefill(ids, model.new_cache(1, len(ids)), logits="all").float()

    return answer


def their_logits(model: Any) -> Answers:
    """The same of ``transformers``."""

    @torch.no_grad()
    def answer(ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids[None]).logits[0]
        return logits.float()

    return answer


def judge(found: Quality) -> tuple[dict[str, Judged], dict[str, str]]:
    """Every candidate on every window, and what the failed ones raised; the reference among them."""
    models, failed = found.models, dict[str, str]()
    reference = their_logits(models.theirs(torch.float32))
    build: dict[str, Callable[[], Answers]] = {
        f"ours-{weights}": lambda weights=weights: our_logits(models.ours(weights))
        for weights in FORMATS
    }
    build["transformers-bf16"] = lambda: their_logits(models.theirs(torch.bfloat16))
    budgets = {name: allowed("fp8" if name == "ours-fp8" else "bf16") for name in build}
    seen = {name: Judged(budget) for name, budget in budgets.items()}
    seen["transformers-float32"] = Judged(Error(0.0, 0.0))
    answers: dict[str, Answers] = {}
    device = models.device
    for name, make in build.items():
        try:
            answers[name] = make()
            answers[name](torch.tensor(found.windows[0], device=device))
        except Exception as error:
            failed[name] = told(error)
    for window in found.windows:
        ids = torch.tensor(window, device=device)
        exact = reference(ids)
        seen["transformers-float32"].see(exact, exact, ids)
        for name in [name for name in answers if name not in failed]:
            try:
                seen[name].see(answers[name](ids), exact, ids)
            except Exception as error:
                failed[name] = told(error)
    return seen, failed


def quality_rows(found: Quality) -> list[Row]:
    """One row per format of weights."""
    seen, failed = judge(found)
    errors: dict[str, Error] = {}
    for name in [name for name in seen if name not in failed]:
        try:
            errors[name] = seen[name].error
        except WrongResult as error:
            failed[name] = told(error)
    rows = []
    for weights in FORMATS:
        names = {"ours": f"ours-{weights}"}
        names |= {name: name for name in ("transformers-float32", "transformers-bf16")}
        mine = errors.get(f"ours-{weights}")
        rows.append(
            Row(
                {**found.case, "weights": weights},
                None,
                0.0,
                error=mine.json() if mine else None,
                failed={n: failed[c] for n, c in names.items() if c in failed},
                errors={n: errors[n].json() for n in ("transformers-bf16",) if n in errors},
                perplexity={n: seen[c].perplexity for n, c in names.items() if c in errors},
            )
        )
    return rows


# --- time ---


@dataclass
class Prompt:
    """One prompt."""

    models: Models
    ids: list[int]

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case that every row of it has."""
        sizes = {"batch": 1, "length": len(self.ids)}
        return {"shape": self.models.config.shape.name, "cache": "bf16", **sizes}

    @property
    def tensor(self) -> Tensor:
        """(tokens,) int64 on the device."""
        return torch.tensor(self.ids, device=self.models.device)

    def floor_us(self, weights: str) -> float:
        """See FLOOR."""
        config = self.models.config
        head = config.vocabulary * config.shape.hidden
        head_us = max(2 * head / PEAK["bf16"], 2 * head / BANDWIDTH) * 1e6
        return config.layers * layer_floor(config.shape, (len(self.ids),), weights) + head_us


def ours(prompt: Prompt, weights: str) -> Run:
    """epicute's model as ``Llama.prefill`` runs it, its requests described beforehand."""
    model, ids = prompt.models.ours(weights), prompt.tensor
    count = len(ids)
    cache = model.new_cache(1, count)
    cache.reserve([count], [0])
    page = cache.spec.page_size
    requests = Requests.packed([count], page, cache.page_table[:1], device=model.device)
    last = torch.tensor([count - 1], device=model.device)

    @torch.no_grad()
    def run(copy: int) -> dict[str, Tensor]:
        x = model.backend.embed(ids)
        for layer in range(model.config.layers):
            x = model.backend.block(layer, x, requests, cache)
        return {"logits": model.backend.logits(x, last)}

    return run


def theirs(prompt: Prompt, compiled: bool) -> Run:
    """``transformers``' model in BF16, logits of the last token alone."""
    model, ids = prompt.models.theirs(torch.bfloat16), prompt.tensor[None]
    forward = torch.compile(model.forward, dynamic=False) if compiled else model.forward

    @torch.no_grad()
    def run(copy: int) -> dict[str, Tensor]:
        return {"logits": forward(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1]}

    return run


def time_rows(prompt: Prompt, session: Session) -> list[Row]:
    """One row per format of weights; all candidates share a session."""
    torch._dynamo.reset()  # its cache is per function and full after eight shapes
    exact = their_logits(prompt.models.theirs(torch.float32))(prompt.tensor)[-1:].double()

    def check(weights: str) -> Any:
        return checker({"logits": exact}, lambda _, x: x.double(), lambda _: allowed(weights))

    for weights in FORMATS:
        session.add(f"ours-{weights}", partial(ours, prompt, weights), check(weights))
    for name in ("transformers-compiled", "transformers-eager"):
        build = partial(theirs, prompt, compiled=name.endswith("compiled"))
        session.add(name, build, check("bf16"))
    session.measure(1, prompt.floor_us("fp8"))
    return [_time_row(prompt, weights, session) for weights in FORMATS]


def _time_row(prompt: Prompt, weights: str, session: Session) -> Row:
    names = ["transformers-compiled", "transformers-eager"]
    names += ["ours-bf16"] if weights == "fp8" else []
    case = {**prompt.case, "weights": weights}
    peers = {name: name for name in names}
    return session.row(case, f"ours-{weights}", peers, prompt.floor_us(weights))


# --- the table ---


def measure(found: Quality | Prompt, session: Session) -> list[Row]:
    """The rows of one case."""
    return quality_rows(found) if isinstance(found, Quality) else time_rows(found, session)


def cases(options: Options) -> Iterator[Quality | Prompt]:
    """The text's windows, and a prompt of every length that the model is made for."""
    assert options.checkpoint is not None  # the command line asks for it
    models = Models(options.checkpoint, options.device)
    ids: Sequence[int] = ()
    if options.text is not None:
        ids = models.encode(options.text)[:TOKENS]
        whole = [list(ids[at : at + WINDOW]) for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
        yield Quality(models, options.text.stem, whole or [list(ids)])
    for length in options.lengths:
        if length <= models.config.context:
            yield Prompt(
                models, list(ids[:length]) if len(ids) >= length else _random(models, length)
            )


def _random(models: Models, length: int) -> list[int]:
    random = torch.Generator().manual_seed(length)
    return torch.randint(models.config.vocabulary, (length,), generator=random).tolist()


def kernels(options: Options) -> Iterator[Any]:
    """None: a model compiles its kernels when it is loaded."""
    return iter(())


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case and write ``prefill-model.json`` into ``folder``."""
    path = folder / "prefill-model.json"
    protocol = options.protocol + PROTOCOL.format(window=WINDOW)
    found = Table("prefill-model", PAPER, protocol, FLOOR, source, path)
    left = options.progress.left(cases(options), len(FORMATS))
    return fill(found, left, measure, timer, options.rounds, options.progress)


def summary(content: Mapping[str, Any]) -> str:
    """Tokens per second of every timed row."""
    lines = []
    for row in content["rows"]:
        times = {"ours": row["ours_us"], **row["peers_us"]}
        said = [f"{n} {row['case']['length'] / t * 1e6:.0f}" for n, t in times.items() if t]
        if said:
            lines.append(f"tokens/s, {row['case']['weights']} {row['case']['length']}: {said}")
    return "\n".join(lines)
