"""INT4 weights on the CPU: the values that a kernel's records hold, gains beside them, and codes that are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from epicute.epilogues import Store, compose
from epicute.errors import ArgumentError
from epicute.models.config import ModelConfig
from epicute.models.folder import Folder
from epicute.models.llama import Llama
from epicute.models.reference_weights import PARTS, read_layer
from epicute.quant.gptq import Hessian, quantize_gptq
from epicute.quant.int4 import Int4Codes, Int4Grid, quantize_int4
from epicute.testing import Budget, assert_within
from epicute.weights import QuantizedInt4
from tests.models.folders import FAMILIES, random_model, save
from tests.models.one_thread import single as single

UP = "model.layers.1.mlp.up_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hidden 96 and an MLP of 192: neither is a multiple of a group."""
    return save(random_model(FAMILIES["llama"]), tmp_path_factory.mktemp("llama"))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(160, (length,), generator=generator).tolist()


@pytest.mark.parametrize("name", PARTS)
def test_iw_07_values_are_those_of_the_records_that_kernels_stream(name: str, folder: Path) -> None:
    """Packed in fragments, K padded to whole records, and unpacked again: bit for bit."""
    config, tensors = ModelConfig.from_folder(folder), Folder(folder)
    layer = read_layer(config, tensors, 1, "int4", {}, resident=False)
    found, store = layer.matrix(name), compose(Store(torch.bfloat16))
    rows = []
    for part in layer.weights[name]:
        assert isinstance(part, QuantizedInt4)
        packed = part.pack_fragments(store.row_order(part.codes.shape[0]), tiles=4)
        assert packed.records.width > part.codes.shape[1]
        rows.append(packed.unpack().dequantize())
    assert torch.equal(found, torch.cat(rows).double())
    assert layer.scale(name) is None


def test_they_are_rounded_to_nearest_in_groups_of_128(folder: Path) -> None:
    config, tensors = ModelConfig.from_folder(folder), Folder(folder)
    layer = read_layer(config, tensors, 1, "int4", {}, resident=False)
    for name, parts in PARTS.items():
        weights = [tensors[f"model.layers.1.{part}.weight"] for part in parts]
        right = [quantize_int4(w, Int4Grid(128)).dequantize() for w in weights]
        assert torch.equal(layer.matrix(name), torch.cat(right).double())


def on_grid(theirs: Any) -> Any:
    """The model with projections whose values INT4 holds exactly, and gains that spoil a grid they are folded into."""
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "_proj" in name:
                parameter.copy_(quantize_int4(parameter).dequantize())
            elif name.endswith("layernorm.weight"):
                parameter.copy_(0.2 + torch.rand_like(parameter) * 2)
    return theirs


def test_gains_are_an_operand(tmp_path: Path) -> None:
    """Weights lose nothing, so all that is left is the rounding of activations to BF16."""
    folder = save(on_grid(random_model(FAMILIES["llama"])), tmp_path)
    exact, int4 = (
        Llama.from_folder(folder, device="cpu", weights=form) for form in ("exact", "int4")
    )
    ids = prompt(40)
    right = exact.prefill(ids, exact.new_cache(1, 64), logits="all")
    found = int4.prefill(ids, int4.new_cache(1, 64), logits="all")
    assert_within(found, right, Budget(0.02, 0.06))
    folded = Folder(folder)["model.layers.0.self_attn.q_proj.weight"]
    folded = folded * Folder(folder)["model.layers.0.input_layernorm.weight"]
    lost = quantize_int4(folded).dequantize() - folded
    assert float(lost.norm() / folded.norm()) > 0.05  # what folding first would have cost


def test_ge_10_offset_gains_are_an_operand_too(tmp_path: Path) -> None:
    """Gemma stores gain - 1."""
    folder = save(random_model(FAMILIES["gemma with SiLU"]), tmp_path)
    exact, int4 = (
        Llama.from_folder(folder, device="cpu", weights=form) for form in ("exact", "int4")
    )
    codes = {
        name: quantize_int4(tensor, Int4Grid(32))
        for name, tensor in Folder(folder).items()
        if "_proj" in name
    }
    fine = Llama.from_folder(folder, device="cpu", weights="int4", int4=codes)
    ids = prompt(20)
    right = exact.prefill(ids, exact.new_cache(1, 32), logits="all")
    errors = []
    for model in (int4, fine):
        found = model.prefill(ids, model.new_cache(1, 32), logits="all")
        assert_within(found, right, Budget(0.5, 0.9))
        errors.append(float((found - right).norm()))
    assert errors[1] < errors[0]


def calibrated(folder: Path) -> dict[str, Any]:
    tensors, found = Folder(folder), {}
    for name in (UP, DOWN):
        hessian = Hessian(tensors[name].shape[1])
        hessian.add(torch.randn(400, tensors[name].shape[1]))
        found[name] = quantize_gptq(tensors[name], hessian.matrix)
    return found


def test_codes_that_are_given_are_used_and_the_others_rounded(folder: Path) -> None:
    """GPTQ results, bare codes, and quantised weights."""
    given = calibrated(folder)
    given[UP] = given[UP].codes
    tensors, config = Folder(folder), ModelConfig.from_folder(folder)
    plain = read_layer(config, tensors, 1, "int4", {}, resident=False)
    for kind in (given, {n: QuantizedInt4.of(_codes(x), n) for n, x in given.items()}):
        layer = read_layer(config, tensors, 1, "int4", kind, resident=False)
        assert torch.equal(layer.matrix("down"), _codes(given[DOWN]).dequantize().double())
        assert torch.equal(layer.matrix("gate_up")[192:], _codes(given[UP]).dequantize().double())
        for name, rows in (("gate_up", slice(192)), ("qkv", slice(None)), ("o", slice(None))):
            assert torch.equal(layer.matrix(name)[rows], plain.matrix(name)[rows])
        assert not torch.equal(layer.matrix("down"), plain.matrix("down"))
    model = Llama.from_folder(folder, device="cpu", weights="int4", int4=given)
    other = Llama.from_folder(folder, device="cpu", weights="int4")
    logits = [m.prefill(prompt(9), m.new_cache(1, 16)) for m in (model, other)]
    assert not torch.equal(*logits)


def _codes(given: Any) -> Int4Codes:
    return given if isinstance(given, Int4Codes) else given.codes


def _refuse(folder: Path, named: str, **options: Any) -> None:
    with pytest.raises(ArgumentError, match=named):
        Llama.from_folder(folder, device="cpu", **options)


def test_codes_that_belong_to_nothing_are_refused(folder: Path) -> None:
    codes = quantize_int4(Folder(folder)[UP])
    known, other = {UP: codes}, {"model.layers.7.mlp.up_proj.weight": codes}
    _refuse(folder, "^int4: got codes of 1 weights beside weights='bf16'", int4=known)
    _refuse(folder, r"^int4: got \['model\.layers\.7", weights="int4", int4=other)
    _refuse(folder, r"^int4: got \['lm_head", weights="int4", int4={"lm_head.weight": codes})
    wrong = {DOWN: codes}
    _refuse(folder, r"^int4\['.*down_proj.weight'\]: got \(192, 96\)", weights="int4", int4=wrong)


def test_matrices_are_kept_where_that_is_asked_for(folder: Path) -> None:
    config, tensors = ModelConfig.from_folder(folder), Folder(folder)

    def addresses(resident: bool) -> tuple[Tensor, Tensor]:
        layer = read_layer(config, tensors, 0, "fp8", {}, resident)
        scale = layer.scale("qkv")
        assert scale is not None
        assert scale.shape == (layer.matrix("qkv").shape[0],)
        return layer.matrix("o"), layer.matrix("o")

    kept, made = addresses(True), addresses(False)
    assert kept[0] is kept[1]
    assert made[0] is not made[1]
    assert torch.equal(kept[0], made[0])
