"""Configurations: what transformers reads, read alike; what no block carries, refused by its key."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from epicute.epilogues import RoPE
from epicute.errors import ArgumentError, UnsupportedError
from epicute.models.config import ConfigError, ModelConfig
from epicute.models.rope import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}

# Llama-3.1-8B's configuration, as it lies on the hub.
LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


def written(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def changed(**values: Any) -> dict[str, Any]:
    return {**LLAMA_3_1, **values}


class TestFields:
    def test_llama(self, tmp_path: Path) -> None:
        config = ModelConfig.from_folder(written(tmp_path, LLAMA_3_1))
        shape = config.shape
        assert (shape.hidden, shape.intermediate) == (4096, 14336)
        assert (shape.heads, shape.kv_heads, shape.head_dim) == (32, 8, 128)
        assert shape.name == tmp_path.name
        assert (config.layers, config.vocabulary, config.context) == (32, 128256, 131072)
        assert (config.eps, config.gain_offset) == (1e-5, 0.0)
        flags = (config.tied, config.bias, config.qk_norm, config.scaled_embedding)
        assert flags == (False,) * 4
        assert config.window is None
        assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("llama3", 5e5, 8.0)

    @pytest.mark.parametrize(
        ("made", "expected"),
        [
            (Qwen2Config(), {"bias": True, "tied": False}),
            (Qwen3Config(tie_word_embeddings=True), {"qk_norm": True, "tied": True}),
            (MistralConfig(sliding_window=None), {"window": None}),
            (MistralConfig(sliding_window=4096), {"window": 4096}),
            (
                GemmaConfig(hidden_act="silu"),
                {"gain_offset": 1.0, "tied": True, "scaled_embedding": True},
            ),
            (Qwen2Config(use_sliding_window=True, max_window_layers=0), {"window": 4096}),
            (Qwen2Config(use_sliding_window=True, max_window_layers=32), {"window": None}),
            (LlamaConfig(head_dim=64, num_key_value_heads=4), {}),
            (LlamaConfig(rope_parameters={"rope_theta": 5e5, **LLAMA3}), {}),
            (LlamaConfig(rope_parameters={"rope_theta": 1e6, **YARN}), {}),
        ],
    )
    def test_families_with_and_without_transformers(
        self, made: Any, expected: dict[str, Any], tmp_path: Path
    ) -> None:
        """What transformers saves is read the same through its class and from the plain file."""
        made.save_pretrained(tmp_path)
        through = ModelConfig.from_folder(tmp_path)
        plain = json.loads((tmp_path / "config.json").read_text())
        assert ModelConfig.from_dict(plain, tmp_path.name) == through
        assert {name: getattr(through, name) for name in expected} == expected

    def test_a_family_implies_what_the_file_leaves_out(self) -> None:
        gemma = changed(model_type="gemma", rope_scaling=None)
        del gemma["tie_word_embeddings"]
        assert ModelConfig.from_dict(gemma).tied
        assert ModelConfig.from_dict(gemma).shape.head_dim == 256
        qwen = ModelConfig.from_dict(changed(model_type="qwen3"))
        assert qwen.shape.head_dim == 128

    def test_without_transformers(self, tmp_path: Path) -> None:
        """In a process where it cannot be imported."""
        text = "import sys; sys.modules['transformers'] = None\n"
        text += "from epicute.models.config import ModelConfig\n"
        text += f"print(ModelConfig.from_folder({str(written(tmp_path, LLAMA_3_1))!r}))"
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == str(ModelConfig.from_folder(tmp_path))

    def test_what_the_kernels_are_planned_for(self) -> None:
        config = ModelConfig.from_dict({**Qwen3Config().to_dict(), "rms_norm_eps": 1e-5})
        spec = config.block("fp8", torch.float8_e4m3fn, "row")
        assert (spec.shape, spec.format, spec.scaling) == (config.shape, "fp8", "row")
        assert (spec.cache, spec.eps, spec.qk_norm, spec.bias) == (
            torch.float8_e4m3fn,
            1e-5,
            True,
            False,
        )
        assert spec.rope == RoPE(128)


class TestRefused:
    @pytest.mark.parametrize(
        ("values", "named"),
        [
            ({"model_type": "mixtral", "num_local_experts": 8}, "^num_local_experts.*MoE"),
            ({"model_type": "qwen3_moe", "num_experts": 64}, "^num_experts.*MoE"),
            ({"model_type": "phi3"}, "^model_type"),
            ({"model_type": None}, "^model_type"),
            ({"hidden_act": "gelu"}, "^hidden_act"),
            (
                {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"},
                "^hidden_activation",
            ),
            ({"attention_bias": True}, "^attention_bias"),
            ({"mlp_bias": True}, "^mlp_bias"),
            ({"final_logit_softcapping": 30.0}, "^final_logit_softcapping"),
            ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "^rope_type"),
            ({"rope_scaling": {"type": "longrope"}}, "^rope_type"),
            ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "^rope_parameters"),
            (
                {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
                "^layer_types",
            ),
            ({"layer_types": ["linear_attention"]}, "^layer_types"),
            (
                {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 8},
                "^layer_types",
            ),
        ],
    )
    def test_what_no_block_carries(self, values: dict[str, Any], named: str) -> None:
        with pytest.raises(UnsupportedError, match=named):
            ModelConfig.from_dict(changed(**values))

    def test_before_transformers_is_asked(self, tmp_path: Path) -> None:
        """A family that transformers does not know either is named here, not in its words."""
        with pytest.raises(UnsupportedError, match="^model_type: got 'brand_new'"):
            ModelConfig.from_folder(written(tmp_path, changed(model_type="brand_new")))

    @pytest.mark.parametrize(
        ("values", "named"),
        [
            ({"hidden_size": None}, "^hidden_size"),
            ({"vocab_size": 0}, "^vocab_size"),
            ({"num_hidden_layers": "32"}, "^num_hidden_layers"),
            ({"model_type": "qwen2", "num_key_value_heads": None}, "^num_key_value_heads"),
            ({"num_key_value_heads": 5}, "^kv_heads"),
            ({"rms_norm_eps": None}, "^rms_norm_eps"),
            ({"rms_norm_eps": 0.0}, "^rms_norm_eps"),
            ({"rope_scaling": {"type": "linear"}}, r"^rope_parameters\['factor'\]"),
            ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
            ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
            ({"rope_theta": -1.0}, "rope_theta"),
            ({"partial_rotary_factor": 1.5}, "^partial_rotary_factor"),
            (
                {"layer_types": ["sliding_attention"] * 32, "sliding_window": None},
                "^sliding_window",
            ),
        ],
    )
    def test_what_makes_no_sense(self, values: dict[str, Any], named: str) -> None:
        with pytest.raises(ArgumentError, match=named):
            ModelConfig.from_dict(changed(**values))

    @pytest.mark.parametrize("text", [None, "{", "[]"])
    def test_no_configuration(self, text: str | None, tmp_path: Path) -> None:
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises((ConfigError, ArgumentError), match=r"config\.json"):
            ModelConfig.from_folder(tmp_path)


class TestRope:
    @pytest.mark.parametrize("dim", [64, 128])
    @pytest.mark.parametrize(
        "scaling",
        [
            LLAMA3,
            {**LLAMA3, "factor": 32.0},
            {"rope_type": "linear", "factor": 2.5},
            YARN,
            {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
            {**YARN, "partial_rotary_factor": 0.5},
            {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
            {**YARN, "original_max_position_embeddings": 32, "factor": 1.0},
        ],
    )
    @pytest.mark.parametrize("theta", [1e4, 5e5])
    def test_against_transformers(self, scaling: dict[str, Any], dim: int, theta: float) -> None:
        made = LlamaConfig(
            hidden_size=8 * dim,
            num_attention_heads=8,
            head_dim=dim,
            max_position_embeddings=32768,
            rope_parameters={"rope_theta": theta, **scaling},
        )
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](made, "cpu")
        found = ModelConfig.from_dict(made.to_dict()).rope
        # transformers computes in float32, each power to a few units of the last place.
        torch.testing.assert_close(found.inv_freq, frequencies, rtol=1e-6, atol=0)
        assert found.magnitude == pytest.approx(magnitude, abs=1e-12)

    @pytest.mark.parametrize("spelling", ["type", "rope_type"])
    @pytest.mark.parametrize(
        ("dim", "factor", "kept", "blended"), [(128, 8.0, 29, 6), (64, 32.0, 15, 3)]
    )
    def test_kv_06_bands_of_llama_3(
        self, spelling: str, dim: int, factor: float, kept: int, blended: int
    ) -> None:
        scaling = {k: v for k, v in LLAMA3.items() if k != "rope_type"}
        scaling |= {spelling: "llama3", "factor": factor}
        rope = ModelConfig.from_dict(changed(head_dim=dim, rope_scaling=scaling)).rope
        plain = Rope(dim, dim, 5e5).inv_freq.double()
        share = plain / rope.inv_freq.double()
        torch.testing.assert_close(share[:kept], torch.ones(kept).double(), rtol=1e-6, atol=0)
        between = share[kept : kept + blended]
        assert (between > 1 + 1e-4).all()
        assert (between < factor - 1e-4).all()
        slow = share[kept + blended :]
        torch.testing.assert_close(slow, torch.full_like(slow, factor), rtol=1e-6, atol=0)

    @pytest.mark.parametrize(
        ("factor", "given", "expected"),
        [(128.0, 1.4852, 1.4852), (64.0, 1.0, 1.0), (64.0, None, 1.4159), (4.0, None, 1.1386)],
    )
    def test_kv_05_the_magnitude_of_yarn_is_a_final_value(
        self, factor: float, given: float | None, expected: float
    ) -> None:
        scaling = {**YARN, "factor": factor, "attention_factor": given}
        rope = ModelConfig.from_dict(changed(rope_scaling=scaling)).rope
        assert rope.magnitude == pytest.approx(expected, abs=1e-4)
        assert rope.policy.magnitude == rope.magnitude

    def test_kv_01_partial_rotation(self) -> None:
        config = ModelConfig.from_dict(changed(partial_rotary_factor=0.5, rope_scaling=None))
        assert config.rope.rotary_dim == 64
        assert config.inv_freq.shape == (32,)
        assert config.rope.policy == RoPE(128, 64)
        expected = 5e5 ** -(torch.arange(32, dtype=torch.float64) / 32)
        assert torch.equal(config.inv_freq, expected.float())

    def test_kv_07_frequencies_are_rounded_once_to_float32(self) -> None:
        found = Rope(128, 128, 1e6).inv_freq
        assert found.dtype == torch.float32
        exact = [math.exp(-2 * j / 128 * math.log(1e6)) for j in range(64)]
        assert torch.equal(found, torch.tensor(exact, dtype=torch.float64).float())


def test_a_window_that_a_family_does_not_heed_is_none() -> None:
    """transformers' Llama ignores the key."""
    assert ModelConfig.from_dict(changed(sliding_window=16)).window is None
    assert ModelConfig.from_dict(changed(model_type="mistral", sliding_window=16)).window == 16
