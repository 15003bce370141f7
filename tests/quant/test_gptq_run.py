"""A run over many linears: streamed, interrupted, continued, and never mixed with another."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from epicute.errors import ArgumentError
from epicute.quant import (
    ClipSearch,
    GptqConfig,
    GptqRun,
    Hessian,
    Int4Codes,
    Int4Grid,
    Linear,
    Progress,
    ProgressBar,
    gptq_run,
    quantize_gptq,
)

NAMES = [f"model.layers.{i}.mlp/down proj" for i in range(4)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower with more, most of all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weight_of(i: int) -> torch.Tensor:
    return torch.randn(10 + i, 75, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16)


def batches_of(i: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + i)
    mix = torch.randn(20, 75, generator=generator)
    return [torch.randn(2, 30, 20, generator=generator) @ mix for _ in range(3)]


class Model:
    """Four linears that count what is asked of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.asked: list[str] = []
        self.fail_at = fail_at

    def _batches(self, i: int) -> Iterator[torch.Tensor]:
        if i == self.fail_at:
            raise KeyboardInterrupt
        for batch in batches_of(i):
            self.asked.append(NAMES[i])
            yield batch

    def linears(self) -> Iterator[Linear]:
        for i, name in enumerate(NAMES):
            yield Linear(name, lambda i=i: weight_of(i), lambda i=i: self._batches(i))


def run(folder: Path, config: GptqConfig | None = None, **arguments: object) -> GptqRun:
    arguments = {"calibration": "random", **arguments}
    return GptqRun(folder, config, **arguments)  # type: ignore[arg-type]


def same(a: Int4Codes, b: Int4Codes) -> None:
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scale, b.scale)
    assert a.scale.dtype == b.scale.dtype
    assert (a.zero is None) == (b.zero is None)
    if a.zero is not None and b.zero is not None:
        assert torch.equal(a.zero, b.zero)
    assert (a.group, a.name) == (b.group, b.name)


CONFIGS = [
    GptqConfig(),
    GptqConfig(Int4Grid(32, False, torch.bfloat16), 0.05, ClipSearch(steps=3)),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_results_are_those_of_each_linear_alone(tmp_path: Path, config: GptqConfig) -> None:
    found = dict(run(tmp_path, config).stream(Model().linears()))
    assert list(found) == NAMES
    for i, name in enumerate(NAMES):
        hessian = Hessian(75)
        for batch in batches_of(i):
            hessian.add(batch)
        alone = quantize_gptq(weight_of(i), hessian.matrix, config)
        assert torch.equal(found[name].codes.codes, alone.codes.codes)
        assert (found[name].error, found[name].nearest) == (alone.error, alone.nearest)
        assert found[name].codes.name == name
        assert found[name].error < found[name].nearest


@pytest.mark.parametrize("config", CONFIGS)
def test_an_interrupted_run_goes_on_and_is_the_same(tmp_path: Path, config: GptqConfig) -> None:
    whole = dict(run(tmp_path / "a", config).stream(Model().linears()))
    first = Model(fail_at=2)
    with pytest.raises(KeyboardInterrupt):
        list(run(tmp_path / "b", config).stream(first.linears()))
    assert len(list((tmp_path / "b").glob("*.safetensors"))) == 2
    again, steps = Model(), []
    second = dict(run(tmp_path / "b", config, progress=steps.append).stream(again.linears()))
    assert set(again.asked) == set(NAMES[2:]), "inputs of finished linears are not asked for"
    assert [s.resumed for s in steps] == [True, True, False, False]
    for name in NAMES:
        same(second[name].codes, whole[name].codes)
        assert second[name].error == whole[name].error


def test_one_linear_at_a_time_and_results_before_the_next(tmp_path: Path) -> None:
    """A generator may make the next linear's inputs from the last one's codes."""
    taken: list[str] = []

    def linears() -> Iterator[Linear]:
        for i, name in enumerate(NAMES):
            assert taken == NAMES[:i]
            yield Linear(name, lambda i=i: weight_of(i), lambda i=i: batches_of(i))

    for name, _ in run(tmp_path).stream(linears()):
        taken.append(name)
    assert taken == NAMES


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"calibration": "other"}, "calibration: got 'random', expected 'other'"),
        ({"precision": torch.float32}, "precision: got 'float64', expected 'float32'"),
        ({"config": GptqConfig(damping=0.02)}, "damping: got 0.01, expected 0.02"),
        ({"config": GptqConfig(Int4Grid(64))}, "group: got 128, expected 64"),
        ({"config": GptqConfig(Int4Grid(symmetric=False))}, "symmetric: got True, expected False"),
        ({"config": GptqConfig(clip=ClipSearch())}, "clip: got None, expected {"),
        (
            {"config": GptqConfig(Int4Grid(scale_dtype=torch.bfloat16))},
            "scale_dtype: got 'float16', expected 'bfloat16'",
        ),
    ],
)
def test_another_configuration_is_refused(tmp_path: Path, change: dict, named: str) -> None:
    list(run(tmp_path).stream(Model().linears()))
    with pytest.raises(ArgumentError, match=rf"manifest\.json: {named}"):
        run(tmp_path, **change)


def test_the_block_is_no_part_of_the_manifest(tmp_path: Path) -> None:
    run(tmp_path, GptqConfig(block=64))
    run(tmp_path, GptqConfig(block=128))


def test_another_weight_under_the_same_name_is_refused(tmp_path: Path) -> None:
    with run(tmp_path) as first:
        first.linear(Linear("w", lambda: weight_of(0), lambda: batches_of(0)))
    for other in (weight_of(1), weight_of(0) * 2, weight_of(0).float(), weight_of(0)[:5]):
        with pytest.raises(ArgumentError, match=r"w-.*\.safetensors: weight: got"):
            run(tmp_path).linear(Linear("w", lambda o=other: o, lambda: batches_of(0)))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    linear = Linear("w", lambda: weight_of(0), lambda: batches_of(0))
    run(tmp_path).linear(linear)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ArgumentError, match=r"Fix: delete the file"):
        run(tmp_path).linear(linear)
    file.unlink()
    run(tmp_path).linear(linear)


def test_a_folder_that_no_run_has_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"model\.safetensors.* without a manifest"):
        run(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"manifest\.json: got .*expected JSON"):
        run(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 0}))
    with pytest.raises(ArgumentError, match=r"manifest\.json: calibration"):
        run(tmp_path)


def test_nothing_unfinished_is_left_behind(tmp_path: Path) -> None:
    list(run(tmp_path).stream(Model().linears()))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 5
    assert names[0] == "manifest.json"
    assert all(n.startswith("model.layers.") and n.endswith(".safetensors") for n in names[1:])


def test_names_that_look_alike_have_files_of_their_own(tmp_path: Path) -> None:
    with run(tmp_path) as made:
        for name in ("a/b", "a b", "a_b"):
            made.linear(Linear(name, lambda: weight_of(0), lambda: batches_of(0)))
        assert len(list(tmp_path.glob("*.safetensors"))) == 3
        with pytest.raises(ArgumentError, match="^name: got 'a b'"):
            made.linear(Linear("a b", lambda: weight_of(0), lambda: batches_of(0)))


@pytest.mark.parametrize(
    ("weight", "batches", "named"),
    [
        (torch.ones(4, 8), [torch.full((2, 8), torch.nan)], "w: x: got 2 rows"),
        (torch.ones(4, 8), [], "w: activations: got no rows"),
        (torch.ones(4, 8), [torch.ones(2, 9)], r"w: x\.shape"),
        (torch.full((4, 8), torch.inf), [torch.ones(2, 8)], "w: values: got 32 non-finite"),
        (torch.ones(8), [torch.ones(2, 8)], r"w: weight\.shape"),
    ],
)
def test_errors_name_the_linear_and_leave_no_file(
    tmp_path: Path, weight: torch.Tensor, batches: Iterable[torch.Tensor], named: str
) -> None:
    with pytest.raises(ArgumentError, match=f"^{named}"):
        run(tmp_path).linear(Linear("w", lambda: weight, lambda: batches))
    assert list(tmp_path.glob("*.safetensors")) == []


def test_calibration_has_to_be_said(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="^calibration: got ' '"):
        GptqRun(tmp_path, calibration=" ")


def test_progress_counts(tmp_path: Path) -> None:
    steps: list[Progress] = []
    list(run(tmp_path, total=4, progress=steps.append).stream(Model().linears()))
    assert [(s.name, s.done, s.total) for s in steps] == [
        (name, i + 1, 4) for i, name in enumerate(NAMES)
    ]
    assert all(s.seconds > 0 and 0 < s.error < s.nearest for s in steps)


@pytest.mark.parametrize("tqdm", [True, False])
def test_the_bar_is_drawn_with_and_without_tqdm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tqdm: bool
) -> None:
    if not tqdm:
        monkeypatch.setattr(gptq_run.importlib.util, "find_spec", lambda name: None)
    else:
        pytest.importorskip("tqdm")
    out = io.StringIO()
    bar = ProgressBar(out)
    with run(tmp_path, total=4, progress=bar) as made:
        list(made.stream(Model().linears()))
    text = out.getvalue()
    assert "gptq" in text
    assert "4/4" in text
    assert NAMES[3] in text
    assert "nearest" in text
