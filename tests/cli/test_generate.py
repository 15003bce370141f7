"""``epicute generate`` over a small random folder, and over the packaged checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from epicute import cli
from epicute.cli import generate
from epicute.cli.generate import Spoken, one_thread
from epicute.models.llama import Llama
from tests.models.folders import SIZES, random_model, save
from tests.models.one_thread import single as single
from tests.models.words import save_words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, so that an INT4 cache has records for them; token 7 is the word w7."""
    config = LlamaConfig(**{**SIZES, "num_attention_heads": 4}, head_dim=64)
    folder = save(random_model(config), tmp_path_factory.mktemp("llama"))
    return save_words(folder, 160, 9999)


def words(text: str) -> list[int]:
    return [int(word) for word in re.findall(r"w(\d+)", text)]


@pytest.mark.parametrize("cache", generate.CACHES)
@pytest.mark.parametrize("weights", generate.WEIGHTS)
def test_every_form_speaks(
    weights: str, cache: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt and its tokens on standard output, what ran and how fast beside it."""
    options = ["--tokens", "5", "--weights", weights, "--cache", cache, "--device", "cpu"]
    assert cli.main(["generate", str(folder), "w3 w4 w5", *options]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("w3 w4 w5w")
    assert out.endswith("\n")
    assert len(words(out)) == 8
    assert f"3 layers of 96, {weights} weights, {cache} cache, on the float64 references" in err
    assert re.search(r"^5 tokens, the first after [\d.]+ s, then [\d.]+ tokens/s$", err, re.M)


def test_tokens_are_the_models_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(folder), "w3 w4 w5", "--tokens", "6"]) == 0
    found = words(capsys.readouterr().out)
    model = Llama.from_folder(folder, device="cpu", weights="bf16")
    logits = model.prefill(found[:-1], model.new_cache(1, 16), logits="all")
    assert logits[2:].argmax(1).tolist() == found[3:]


def test_it_ends_where_the_checkpoint_says(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(folder), "w3 w4 w5", "--tokens", "6"]) == 0
    found = words(capsys.readouterr().out)[3:]
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {found[2]}}}')
    assert cli.main(["generate", str(tmp_path), "w3 w4 w5", "--tokens", "6"]) == 0
    assert words(capsys.readouterr().out)[3:] == found[: found.index(found[2]) + 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["only one"], "arguments: got ['only one'], expected a folder and a prompt"),
        ([], "arguments: got [], expected a folder and a prompt"),
        (["--demo", "FOLDER", "w1"], "with --demo, expected a prompt alone"),
        (["FOLDER", "w1", "--tokens", "0"], "--tokens: got 0, expected at least 1"),
        (
            ["FOLDER", "w1", "--tokens", "512"],
            "--tokens: got 512 behind a prompt of 1, expected at",
        ),
        (["FOLDER", "", "--tokens", "2"], "prompt: got '', expected at least one token"),
        (["nowhere", "w1"], "config.json: got"),
        (["FOLDER", "w1", "--device", "tpu"], "--device: got tpu, expected cpu, or cuda"),
        (["FOLDER", "w1", "--device", "meta"], "--device: got meta"),
    ],
)
def test_mistakes_are_one_line_that_says_how_to_mend_them(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(folder) if word == "FOLDER" else word for word in arguments]
    assert cli.main(["generate", *given]) == 1
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert line.startswith("epicute generate: ")
    assert said in line
    assert "Fix: " in line
    assert out == ""


def test_a_folder_without_a_tokenizer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    assert cli.main(["generate", str(tmp_path), "w1"]) == 1
    assert "got no tokenizer" in capsys.readouterr().err


def test_one_token_has_no_rate() -> None:
    assert str(Spoken([3], "w3", 0.5, 0.0)) == "1 token, the first after 0.50 s"
    assert str(Spoken([3, 4, 5], "w3", 0.5, 4.0)) == (
        "3 tokens, the first after 0.50 s, then 0.5 tokens/s"
    )


def test_a_small_model_runs_in_one_thread_and_gives_the_others_back() -> None:
    torch.set_num_threads(2)
    with one_thread(generate.SMALL + 1):
        assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), one_thread(1000):
        assert torch.get_num_threads() == 1
        _ = 1 / 0
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_the_packaged_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """30 layers with INT4 weights and an INT4 cache still speak English."""
    options = ["--weights", "int4", "--cache", "int4", "--tokens", "4", "--device", "cpu"]
    assert cli.main(["generate", "--demo", "Once upon a time, there was a little", *options]) == 0
    out, err = capsys.readouterr()
    assert out == "Once upon a time, there was a little girl named Lily,\n"
    assert "SmolLM2: 30 layers of 576, int4 weights, int4 cache" in err
