"""Checkpoints in safetensors, whole or in shards; what does not fit the configuration is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from epicute.models.config import ModelConfig
from epicute.models.folder import EMBEDDING, HEAD, INDEX, NORM, SINGLE, Folder, tensors_of
from epicute.models.smollm2 import CheckpointError
from tests.models.folders import FAMILIES, random_model, save

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return save(random_model(FAMILIES["qwen2"]), tmp_path / "whole")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return save(random_model(FAMILIES["qwen2"]), tmp_path / "shards", "200KB")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Folder:
    """The folder of a single file, with other tensors."""
    tensors = {name: x.clone() for name, x in load_file(folder / SINGLE).items()}
    change(tensors)
    save_file(tensors, folder / SINGLE)
    return Folder(folder)


def reindex(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_tensors_that_transformers_saves(family: str, tmp_path: Path) -> None:
    model = random_model(FAMILIES[family])
    folder = Folder(save(model, tmp_path))
    config = ModelConfig.from_folder(tmp_path)
    folder.check(config)
    assert set(folder) == set(tensors_of(config))
    state = model.state_dict()
    for name in folder:
        assert torch.equal(folder[name], state[name])
    assert torch.equal(folder.head(config), state[HEAD])


def test_shards_hold_what_one_file_holds(whole: Path, shards: Path) -> None:
    one, many = Folder(whole), Folder(shards)
    assert len(set(many.files.values())) > 3
    assert set(one) == set(many)
    assert len(one) == len(many)
    for name in one:
        assert torch.equal(one[name], many[name])
        assert many.header(name) == (tuple(one[name].shape), "F32")
    assert set(many.layer(2)) == {n[15:] for n in one if n.startswith("model.layers.2.")}
    many.check(ModelConfig.from_folder(shards))


def test_old_buffers_are_passed_by(whole: Path) -> None:
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = rewrite(whole, lambda t: t.update({old: torch.ones(8)}))
    folder.check(ModelConfig.from_folder(whole))
    assert old[15:] not in folder.layer(0)


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda t: t.pop(Q), f"^{Q}: got missing: {Q}, expected"),
            (lambda t: t.pop(NORM), f"^{NORM}: got missing"),
            (
                lambda t: [t.pop(n) for n in list(t) if ".layers.2." in n],
                r"got missing: .* and 9 more",
            ),
            (
                lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2, 2)}),
                r"^model\.layers\.3\.mlp.*: got unexpected",
            ),
            (
                lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(96)}),
                r"o_proj\.bias: got unexpected",
            ),
            (lambda t: t.update({Q: t[Q].T.contiguous()[:, :5].clone()}), rf"^{Q}\.shape"),
            (lambda t: t.update({EMBEDDING: torch.ones(161, 96)}), rf"^{EMBEDDING}\.shape"),
            (lambda t: t.update({HEAD: torch.ones(161, 96)}), rf"^{HEAD}\.shape"),
            (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), rf"^{Q}\.dtype.*F8_E4M3"),
            (lambda t: t.update({Q: t[Q].to(torch.float64)}), rf"^{Q}\.dtype"),
        ],
    )
    def test_tensors_that_do_not_fit(
        self, change: Callable[[dict[str, torch.Tensor]], object], named: str, whole: Path
    ) -> None:
        config = ModelConfig.from_folder(whole)
        with pytest.raises(CheckpointError, match=named):
            rewrite(whole, change).check(config)

    def test_ge_07_a_model_with_bias_and_a_checkpoint_without(self, whole: Path) -> None:
        name = "model.layers.0.self_attn.k_proj.bias"
        folder = rewrite(whole, lambda t: t.pop(name))
        with pytest.raises(CheckpointError, match=f"^{name}: got missing"):
            folder.check(ModelConfig.from_folder(whole))

    def test_a_tied_model_with_another_head(self, whole: Path) -> None:
        config = ModelConfig.from_folder(whole)
        same = rewrite(whole, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
        same.check(config)
        assert torch.equal(same.head(config), same[EMBEDDING])
        other = rewrite(whole, lambda t: t.update({HEAD: t[EMBEDDING] + 1}))
        other.check(config)
        with pytest.raises(CheckpointError, match=f"^{HEAD}.*tie_word_embeddings"):
            other.head(config)

    def test_no_weights_or_two_sets(self, shards: Path, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="got neither"):
            Folder(tmp_path)
        save_file({"x": torch.ones(1)}, shards / SINGLE)
        with pytest.raises(CheckpointError, match="got both"):
            Folder(shards)

    def test_a_shard_too_few_or_broken(self, shards: Path) -> None:
        shard = Folder(shards).files[Q]
        content = shard.read_bytes()
        shard.write_bytes(content[:-10])
        with pytest.raises(CheckpointError, match=shard.name):
            Folder(shards)
        shard.unlink()
        with pytest.raises(CheckpointError, match=shard.name):
            Folder(shards)

    def test_a_tensor_in_two_shards(self, shards: Path) -> None:
        files = Folder(shards).files
        other = next(file for file in files.values() if file != files[Q])
        tensors = {name: x.clone() for name, x in load_file(other).items()}
        save_file({**tensors, Q: torch.ones(96, 96)}, other)
        with pytest.raises(CheckpointError, match=f"^{Q}: got in .* and in "):
            Folder(shards)

    def test_an_index_that_is_not_true(self, shards: Path) -> None:
        files = Folder(shards).files
        other = next(file for file in files.values() if file != files[Q]).name
        reindex(shards, lambda m: m.update({Q: other}))
        with pytest.raises(CheckpointError, match=f"^{Q}: got {other} does not hold it"):
            Folder(shards)
        reindex(shards, lambda m: m.pop(Q))
        with pytest.raises(CheckpointError, match=f"^{Q}: got .* the index does not name it"):
            Folder(shards)
        reindex(shards, lambda m: m.update({Q: "../elsewhere.safetensors"}))
        with pytest.raises(CheckpointError, match="shards beside the index"):
            Folder(shards)

    @pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": []}'])
    def test_a_broken_index(self, text: str, tmp_path: Path) -> None:
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(CheckpointError, match="weight_map"):
            Folder(tmp_path)
