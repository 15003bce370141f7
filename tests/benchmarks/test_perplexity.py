"""The table of perplexities: every format on a small random model, against losses by hand and transformers' own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import packaged_folder, perplexity
from benchmarks.__main__ import main, options_of, parse
from benchmarks.gptq_model import gptq_codes
from benchmarks.harness import Options
from benchmarks.perplexity import CONTEXT, WINDOW, Bench, Kind, kinds, measure, recovered, summary
from benchmarks.provenance import Provenance
from benchmarks.readme import Results, whole
from benchmarks.table import Row, Table, validate
from benchmarks.texts import HELD_OUT, speech
from benchmarks.transformers_model import transformers_model
from epicute.errors import ArgumentError, EpicuteError
from epicute.models.config import ModelConfig
from epicute.models.folder import Folder, tensors_of
from epicute.models.smollm2 import Checkpoint
from epicute.quant import quantize_int4
from tests.models.folders import SIZES, random_model, save
from tests.models.one_thread import single as single

LONG, SHORT = 96, 48


def results_of(folder: Path) -> Results:
    """Of a folder that holds ``cpu``."""
    return Results(folder / "h200")


@pytest.fixture(scope="module")
def theirs() -> Any:
    config = LlamaConfig(
        **{**SIZES, "num_attention_heads": 4, "num_hidden_layers": 2},
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = random_model(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(theirs, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Windows of 96 and 48 tokens of random text."""
    monkeypatch.setattr(perplexity, "CONTEXT", LONG)
    monkeypatch.setattr(perplexity, "WINDOW", SHORT)
    monkeypatch.setattr(perplexity, "TOKENS", {LONG: LONG, SHORT: 2 * SHORT})
    monkeypatch.setattr(perplexity, "PLAIN_TOKENS", 3 * SHORT)
    monkeypatch.setattr(perplexity, "SLICE", 40)
    config, stored = ModelConfig.from_folder(folder), Folder(folder)
    random = torch.Generator().manual_seed(0)
    text, others = torch.randint(160, (2, 200), generator=random).tolist()
    return Bench(config, {n: stored[n].bfloat16() for n in tensors_of(config)}, text, others)


def losses_of(model: Any, windows: list[list[int]]) -> torch.Tensor:
    """By hand: minus the log of each next token's share."""
    found = []
    for window in windows:
        with torch.no_grad():
            shares = model(torch.tensor([window])).logits[0].double().log_softmax(1)
        found += [-shares[i, token] for i, token in enumerate(window[1:])]
    return torch.stack(found)


def test_bf16_beside_transformers(bench: Bench, theirs: Any) -> None:
    """The same tokens in the same windows; its float32 is that of the checkpoint's own class."""
    row = measure(bench, Kind(SHORT))
    windows = [bench.text[at : at + SHORT] for at in (0, SHORT, 2 * SHORT)]
    right = losses_of(theirs, windows)
    assert row.case["M"] == len(right) == 3 * (SHORT - 1)
    assert row.perplexity["transformers-float32"] == pytest.approx(math.exp(right.mean()), rel=1e-5)
    for name in ("ours", "transformers-bf16"):
        assert row.perplexity[name] == pytest.approx(math.exp(right.mean()), rel=0.02)
    assert 0 < row.standard_error["transformers-float32"] < 0.05
    mine = bench.row_losses(Kind(SHORT), 3 * SHORT)
    error = float((mine - right).std() / len(right) ** 0.5)
    assert row.standard_error["transformers-float32"] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("length", [LONG, SHORT])
def test_every_kind_of_row(length: int, bench: Bench) -> None:
    """All formats run; each changes something and stays near, and its baseline is of its own tokens."""
    found = {}
    for kind in kinds(length):
        row = measure(bench, kind)
        found[json.dumps(kind.case)] = row
        if kind == Kind(length):
            continue
        base = bench.baseline(length)
        assert row.case["M"] == len(base)
        assert row.perplexity["ours-bf16"] == pytest.approx(math.exp(float(base.mean())))
        ratio = row.perplexity["ours"] / row.perplexity["ours-bf16"]
        assert 0.5 < ratio < 2
        assert ratio != 1
        assert row.standard_error["ours-bf16"] > 0
    assert len(found) == len(list(kinds(length)))
    backend = next(iter(bench._models.values())).backend
    assert (backend.attention, backend.as_decoded) == ("bf16/bf16", False)


def test_kinds_are_those_that_the_issue_names() -> None:
    at_context = [kind.case for kind in kinds(CONTEXT)]
    assert [c.get("smoothing", c["cache"]) for c in at_context] == [
        "bf16", "none", "sequence", "static", "fp8",
    ]  # fmt: skip
    short = {(k.weights, k.cache, k.extra.get("variant")) for k in kinds(WINDOW)}
    assert {("bf16", "int4", v) for v in ("rotated", "not rotated")} < short
    assert {("int4", "bf16", v) for v in ("rounded to nearest", "GPTQ")} < short
    assert ("fp8", "bf16", "delayed scales") in short


def test_int4_caches_are_read_as_a_decode_does(bench: Bench) -> None:
    """Token by token the same losses, from the second on: the first of a prefill is no step."""
    kind = Kind(SHORT, cache="int4", extra={"variant": "rotated"})
    found = bench.row_losses(kind)
    model = bench.model("bf16")
    model.backend.as_decoded = True
    cache, ids = model.new_cache(1, SHORT, dtype="int4"), bench.windows(SHORT)[0]
    logits = [model.prefill(ids[:1], cache)]
    model.backend.as_decoded = False
    logits += [model.decode([token], cache) for token in ids[1:-1]]
    right = torch.nn.functional.cross_entropy(
        torch.cat(logits).double(), torch.tensor(ids[1:]), reduction="none"
    )
    assert torch.allclose(found[: SHORT - 1], right, atol=0.02)
    assert float((found[: SHORT - 1] - right).abs().median()) < 1e-4


def test_gptq_goes_layer_by_layer(bench: Bench, tmp_path: Path, monkeypatch: Any) -> None:
    """Codes of every projection; their error over the inputs is below that of rounding to nearest."""
    codes = gptq_codes(bench.config, bench.tensors, [bench.calibration[:64]], tmp_path)
    assert set(codes) == {
        f"model.layers.{i}.{part}_proj.weight"
        for i in range(2)
        for part in (*(f"self_attn.{n}" for n in "qkvo"), *(f"mlp.{n}" for n in ("gate", "up", "down")))
    }  # fmt: skip
    assert sum(c.error < c.nearest for c in codes.values()) >= 12
    name = "model.layers.0.self_attn.q_proj.weight"
    nearest = quantize_int4(bench.tensors[name].float()).dequantize()
    assert not torch.equal(codes[name].codes.dequantize(), nearest)


def row(smoothing: str, ours: float, qk: str = "exact16") -> dict[str, Any]:
    case = {"cache": "qk4pv8", "qk": qk, "smoothing": smoothing, "length": 8192}
    found = Row(case, None, 0.0, perplexity={"ours": ours, "ours-bf16": 20.0})
    return found.json()


def test_what_smoothing_gives_back() -> None:
    """Of the mean log-loss: all, half, more than there was; and nothing is said without the unsmoothed row."""
    e = math.exp
    rows = [row("none", 20 * e(0.1)), row("sequence", 20 * e(0.05)), row("static", 20 * e(-0.01))]
    found = recovered([*rows, row("static", 21.0, "fast8")])
    assert found == {
        (8192, "exact16", "sequence"): pytest.approx(0.5),
        (8192, "exact16", "static"): pytest.approx(1.1),
    }
    said = summary({"rows": rows})
    assert "smoothing sequence, exact16, 8192 tokens: gives back 50% of what QK4PV8 loses" in said


def test_the_file_and_its_rendering(
    bench: Bench, tmp_path: Path, source: Provenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One length of windows; a row that fails says so, and the others stand."""
    monkeypatch.setattr(Bench, "create", staticmethod(lambda options: bench))
    right = Bench.row_losses

    def broken(self: Bench, kind: Kind, most: int | None = None) -> torch.Tensor:
        if kind.cache == "fp8":
            raise RuntimeError("no such codes")
        return right(self, kind, most)

    monkeypatch.setattr(Bench, "row_losses", broken)
    options = Options(shapes=(), lengths=(LONG,))
    found = perplexity.table(options, None, source, tmp_path / "cpu")
    assert isinstance(found, Table)
    content = json.loads((tmp_path / "cpu" / "perplexity.json").read_text())
    validate(content)
    assert content["backend"] == "reference"
    assert "no such codes" in content["rows"][-1]["failed"]["ours"]
    said = whole("perplexity")(results_of(tmp_path))
    assert "| perplexity: case | ours | ours-bf16 |" in said
    assert "standard error of the difference of log-losses to that of: case" in said
    assert "gives back" in said


def test_the_command_line_asks_for_no_gpu(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "create", staticmethod(lambda options: bench))
    monkeypatch.setattr(perplexity, "kinds", lambda length: iter([Kind(length)]))
    given = ["perplexity", "--lengths", str(LONG), "--out", str(tmp_path), "--allow-dirty"]
    monkeypatch.setenv("EPICUTE_COMMIT", "0123456789abcdef")
    assert main(given) == 0
    content = json.loads((tmp_path / "perplexity.json").read_text())
    assert (content["device"], content["driver"], content["backend"]) == (
        "CPU",
        "none",
        "reference",
    )
    assert not (tmp_path / "perplexity.svg").exists()
    assert options_of(parse(["perplexity"]), "perplexity").lengths == (8192, 2048)


@pytest.mark.parametrize("wrong", [{"backend": "gpu"}, {"backend": None}], ids=str)
def test_backends_that_are_none(wrong: dict[str, Any], source: Provenance, tmp_path: Path) -> None:
    table = Table("perplexity", "p", "q", "f", source, tmp_path / "x.json", **wrong)
    if wrong["backend"] is None:
        validate(table.content)
        assert "backend" not in table.content
        return
    with pytest.raises(ArgumentError, match="^backend: got 'gpu'"):
        validate(table.content)


def test_standard_errors_are_of_peers(source: Provenance, tmp_path: Path) -> None:
    table = Table("perplexity", "p", "q", "f", source, tmp_path / "x.json", backend="reference")
    for error in ({"ours": 0.1}, {"nobody": 0.1}, {"ours-bf16": -0.1}):
        both = {"ours": 2.0, "ours-bf16": 2.0}
        with pytest.raises(ArgumentError, match="standard_error"):
            table.add(Row({}, None, 0.0, perplexity=both, standard_error=error))


def test_other_models_are_refused(bench: Bench) -> None:
    from dataclasses import replace

    with pytest.raises(ArgumentError, match="^config: got qwen2"):
        transformers_model(replace(bench.config, family="qwen2"), bench.tensors, torch.float32)
    few = {n: x for n, x in bench.tensors.items() if "layers.1" not in n}
    with pytest.raises(ArgumentError, match="^tensors"):
        transformers_model(bench.config, few, torch.float32)


def test_speeches_come_from_a_kept_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    from benchmarks import texts

    monkeypatch.setenv("EPICUTE_MODEL_DIR", str(tmp_path))
    monkeypatch.setattr(texts.importlib.util, "find_spec", lambda name: None)
    with zipfile.ZipFile(tmp_path / texts.WHEEL, "w") as archive:
        archive.writestr(f"{texts.INSIDE}/{HELD_OUT}.txt", "My fellow citizens")
    assert speech(HELD_OUT) == "My fellow citizens"
    with pytest.raises(EpicuteError, match="^speech: got 'nobody'"):
        speech("nobody")


@pytest.mark.gates
def test_the_packaged_folder_is_the_checkpoint(tmp_path: Path) -> None:
    """269 MB: what is read from it has the names, the values, the tokens and the configuration of the package."""
    from dataclasses import replace

    folder = packaged_folder.write(Checkpoint.open(), tmp_path)
    read, packed = (Bench.create(Options(shapes=(), checkpoint=f)) for f in (folder, None))
    shape = packed.config.shape
    assert replace(read.config, shape=shape) == packed.config
    assert (read.text, read.calibration) == (packed.text, packed.calibration)
    assert set(read.tensors) == set(packed.tensors)
    assert all(torch.equal(x, read.tensors[name]) for name, x in packed.tensors.items())
