"""Table ``prefill-model`` on a small random checkpoint: epicute's references and ``transformers``."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import prefill_model
from benchmarks.harness import Options, Session
from benchmarks.prefill_model import Models, Prompt, Quality, cases
from benchmarks.provenance import Provenance
from benchmarks.readme import Results, whole
from benchmarks.table import validate
from benchmarks.timing import Timer

folders = pytest.importorskip("tests.models.folders", reason="needs transformers, extra `hf`")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of three layers."""
    model = folders.random_model(folders.FAMILIES["llama"])
    return Path(folders.save(model, tmp_path_factory.mktemp("model")))


@pytest.fixture
def models(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Models:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return Models(checkpoint, "cpu")


def windows(count: int, length: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    return torch.randint(160, (count, length), generator=random).tolist()


def table_of(rows: list[Any], source: Provenance) -> dict[str, Any]:
    head = dict.fromkeys(["paper", "protocol", "floor"], "said")
    found = {"table": "prefill-model", **head, **vars(source)}
    found["rows"] = [row.json() for row in rows]
    validate(found)
    return found


def test_quality(models: Models, timer: Timer, source: Provenance) -> None:
    found = Quality(models, "words", windows(2, 24))
    rows = table_of(prefill_model.measure(found, Session(timer, rounds=1)), source)["rows"]
    assert [row["case"]["weights"] for row in rows] == ["bf16", "fp8"]
    for row, most in zip(rows, (0.03, 0.25), strict=True):
        assert "failed" not in row, row["failed"]
        assert row["ours_us"] is None
        assert [*row["perplexity"]] == ["ours", "transformers-float32", "transformers-bf16"]
        assert 1e-4 < row["error"]["norm"] < most
        assert row["perplexity"]["ours"] == pytest.approx(
            row["perplexity"]["transformers-float32"], rel=most
        )
        assert row["case"]["M"] == 48
    assert rows[0]["error"]["norm"] < rows[1]["error"]["norm"]


def test_perplexity_by_hand(models: Models) -> None:
    """Of next tokens within a window, never of the first or across windows."""
    (seen, failed) = prefill_model.judge(Quality(models, "words", windows(2, 24)))
    assert failed == {}
    model, loss = models.theirs(torch.float32), 0.0
    for window in windows(2, 24):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([window])).logits[0].double().log_softmax(dim=1)
        loss -= sum(logits[at, token].item() for at, token in enumerate(window[1:]))
    wanted = math.exp(loss / 46)
    assert seen["transformers-float32"].perplexity == pytest.approx(wanted, rel=1e-5)


def test_time(models: Models, timer: Timer, source: Provenance) -> None:
    prompt = Prompt(models, windows(1, 40)[0])
    rows = table_of(prefill_model.measure(prompt, Session(timer, rounds=2)), source)["rows"]
    bf16, fp8 = rows
    for row in rows:
        assert "failed" not in row, row["failed"]
        assert row["floor_us"] > 0
    assert [*bf16["peers_us"]] == ["transformers-compiled", "transformers-eager"]
    assert [*fp8["peers_us"]] == [*bf16["peers_us"], "ours-bf16"]
    assert fp8["peers_us"]["ours-bf16"] == bf16["ours_us"]
    assert bf16["error"]["norm"] < fp8["error"]["norm"]


def test_a_model_that_answers_otherwise_has_failed(
    models: Models, monkeypatch: pytest.MonkeyPatch, timer: Timer, source: Provenance
) -> None:
    backend = models.ours("bf16").backend
    right = backend.logits
    monkeypatch.setattr(backend, "logits", lambda x, rows: right(x, rows).roll(1, dims=1))
    found = Quality(models, "words", windows(1, 24))
    bf16, fp8 = table_of(prefill_model.measure(found, Session(timer, rounds=1)), source)["rows"]
    assert bf16["failed"]["ours"].startswith("WrongResult")
    assert "ours" not in bf16["perplexity"]
    assert fp8["perplexity"]["ours"]
    prompt = Prompt(models, windows(1, 24)[0])
    bf16, fp8 = table_of(prefill_model.measure(prompt, Session(timer, rounds=1)), source)["rows"]
    assert bf16["failed"]["ours"].startswith("WrongResult")
    assert "ours-bf16" in fp8["failed"]
    assert fp8["ours_us"]


def test_cases(
    models: Models, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = Options((), device="cpu", lengths=(16, 64, 4096), checkpoint=checkpoint)
    prompts = list(cases(options))
    assert [len(p.ids) for p in prompts if isinstance(p, Prompt)] == [16, 64]  # context 512
    assert len(prompts) == 2
    ids = windows(1, 50)[0]
    monkeypatch.setattr(Models, "encode", lambda self, text: ids)
    monkeypatch.setattr(prefill_model, "WINDOW", 20)
    quality, short, long = cases(replace(options, text=tmp_path / "1960.txt"))
    assert isinstance(quality, Quality)
    assert isinstance(short, Prompt)
    assert isinstance(long, Prompt)
    assert quality.windows == [ids[:20], ids[20:40]]
    assert quality.case["variant"] == "perplexity of 1960"
    assert short.ids == ids[:16]
    assert len(long.ids) == 64


def test_both_kinds_of_rows_are_rendered(
    models: Models, timer: Timer, source: Provenance, tmp_path: Path
) -> None:
    session = Session(timer, rounds=1)
    rows = prefill_model.measure(Quality(models, "words", windows(1, 24)), session)
    rows += prefill_model.measure(Prompt(models, windows(1, 24)[0]), Session(timer, rounds=1))
    content = table_of(rows, source)
    (tmp_path / "prefill-model.json").write_text(json.dumps(content))
    said = whole("prefill-model")(Results(tmp_path))
    assert "| perplexity: case | ours | transformers-float32 | transformers-bf16 |" in said
    assert "tokens/s" in said
    assert "transformers-bf16: norm" in said
    assert "failed" not in said
    assert "tokens/s, fp8 24" in prefill_model.summary(content)
