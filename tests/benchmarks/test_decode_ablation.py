"""Table ``decode-ablation``: its rows on the CPU at a tiny size, its variants on the emulated GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decode_ablation
from benchmarks.ablations.attention import VARIANTS, SeparateRow
from benchmarks.ablations.step import (
    CONVERSIONS,
    STEPS,
    AblatedStep,
    described,
    kernels_for,
    kernels_of_variant,
    spec_of,
    variants_of,
)
from benchmarks.decode_ablation import Case, Projections
from benchmarks.decode_layer_ours import Layers, kernels_of
from benchmarks.decode_layer_step import Step
from benchmarks.harness import Options, Session
from benchmarks.provenance import Provenance
from benchmarks.resume import Progress
from benchmarks.table import validate
from benchmarks.timing import Timer
from epicute.models.decode_block import DecodeBlock
from epicute.models.decode_block_spec import chain_schedule
from epicute.models.shapes import SHAPES, LayerShape
from tests.models.decode_kernels import step_kernels
from tests.models.one_thread import single as single
from tests.ptx.device import emulated_device

TINY = LayerShape(128, 128, 2, 1, 64, "tiny")
WIDE = LayerShape(1024, 1024, 8, 4, 128, "wide")


@pytest.fixture
def options() -> Options:
    return Options(("8B", "70B"), device="cpu", rounds=2, check_rows=3)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Blocks on stand-ins of all kernels; what they launch."""
    launches: list[str] = []
    chain = DecodeBlock.chain

    def stood_in(*given: Any, **how: Any) -> list[DecodeBlock]:
        return chain(*given, **{**how, "kernels": step_kernels(launches)})

    monkeypatch.setattr(DecodeBlock, "chain", staticmethod(stood_in))
    return launches


def valid(row: dict[str, Any], source: Provenance) -> None:
    head = dict.fromkeys(["paper", "protocol", "floor"], "said")
    validate({"table": "decode-ablation", **head, **vars(source), "rows": [row]})


@pytest.mark.usefixtures("on_the_cpu", "single")
def test_a_row_of_a_step(options: Options, timer: Timer, source: Provenance) -> None:
    case = Case(TINY, 2, 70, options, copies=2)
    (row,) = (row.json() for row in decode_ablation.measure(case, Session(timer, rounds=2)))
    valid(row, source)
    assert "failed" not in row
    assert tuple(row["peers_us"]) == case.variants == STEPS
    assert set(row["errors"]) == set(STEPS)
    assert row["error"]["norm"] < 0.01
    lines = decode_ablation.columns({"rows": [row]})[1]
    assert [line[2] for line in lines] == list(STEPS)
    assert all(len(line) == len(decode_ablation.HEADS) for line in lines)


@pytest.mark.usefixtures("on_the_cpu", "single")
def test_a_variant_that_is_wrong_is_not_timed(
    options: Options, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = AblatedStep.runner

    def wrong(self: AblatedStep) -> Any:
        run = right(self)
        if self.variant != "table":
            return run

        def scaled(copy: int) -> dict[str, torch.Tensor]:
            return {name: x.mul_(1.2) for name, x in run(copy).items()}

        return scaled

    monkeypatch.setattr(AblatedStep, "runner", wrong)
    case = Case(TINY, 2, 70, options, copies=1)
    (row,) = (row.json() for row in decode_ablation.measure(case, Session(timer, rounds=2)))
    assert set(row["failed"]) == {"table"}
    assert "WrongResult" in row["failed"]["table"]
    assert "table" not in row["peers_us"]
    assert row["ours_us"]


def test_a_row_of_projections(options: Options, timer: Timer, source: Provenance) -> None:
    case = Projections(WIDE, 3, options, copies=2)
    (row,) = (row.json() for row in decode_ablation.measure(case, Session(timer, rounds=2)))
    valid(row, source)
    assert "failed" not in row
    assert set(row["peers_us"]) == {"skinny"}
    assert row["error"]["norm"] < 0.003
    assert row["errors"]["skinny"]["norm"] < 0.003
    assert row["floor_us"] == pytest.approx(case.bytes / 4.8e6)
    assert case.bytes >= 2 * WIDE.weights


# --- which kernels ---


def test_what_differs_from_ours_by_the_number_of_requests() -> None:
    """For few requests ours makes integers of activations, for more it makes numbers of codes itself."""
    assert variants_of(SHAPES["8B"], 1) == STEPS
    for batch in (8, 32):
        assert set(STEPS) - set(variants_of(SHAPES["8B"], batch)) == {"registers"}


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("variant", STEPS)
def test_every_variant_has_code_of_its_own(variant: str, batch: int) -> None:
    shape = SHAPES["8B"]
    if variant not in variants_of(shape, batch):
        return
    ours = {kernel.key.digest for kernel in kernels_of(shape, batch, "int4", "int4")}
    mine = list(kernels_of_variant(shape, batch, variant))
    assert mine
    assert not ours & {kernel.key.digest for kernel in mine}
    if variant in CONVERSIONS:
        schedules = [kernel.spec.schedule for kernel in mine]
        assert len(schedules) == 4
        assert {s.conversion for s in schedules} == {CONVERSIONS[variant]}
        assert {s.mma for s in schedules} == {"sync"}
        assert {s.rows for s in schedules} == {8 if batch == 1 else 32}


def test_a_conversion_changes_nothing_else_where_it_can() -> None:
    """Where ours multiplies by mma.sync, its schedule is kept."""
    shape = SHAPES["8B"]
    ours = [kernel.spec.schedule for kernel in described(shape, 8)]
    mine = [kernel.spec.schedule for kernel in kernels_of_variant(shape, 8, "bias-mma")]
    assert mine == [replace(schedule, conversion="bias") for schedule in ours]
    planned = {kernel.key.digest for kernel in kernels_of(shape, 8, "int4", "int4")}
    assert {kernel.key.digest for kernel in described(shape, 8)} <= planned


def test_kernels_are_known_without_data(options: Options) -> None:
    found = list(decode_ablation.kernels(replace(options, shapes=("8B",), M=(1,))))
    assert len(found) == len({kernel.key.digest for kernel in found})
    names = {kernel.key.kernel for kernel in found}
    wanted = {"decode.hopper", "attention.decode", "benchmarks.decode", "benchmarks.skinny"}
    assert names == wanted | {"kv.append"}


def test_attention_is_that_of_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.ablations import step

    made: list[tuple[str, Any, Any]] = []
    monkeypatch.setattr(
        step, "GPU", replace(step.GPU, decode=lambda *given: made.append(("library", *given)))
    )
    monkeypatch.setattr(
        step, "plan_ablated", lambda spec, name, how: made.append((name, spec, how))
    )
    monkeypatch.setattr(step, "SeparateRow", lambda *given: made.append(("row", *given[:2])))
    spec = spec_of(SHAPES["8B"]).attention(prefetch=True)
    schedule = chain_schedule(spec)
    slots = torch.zeros(1, dtype=torch.int64)
    for variant in (*VARIANTS, "table", "row-kernel", "no-rotation"):
        kernels_for(variant, slots).decode(spec, schedule)
    assert [name for name, *_ in made] == [*VARIANTS, "library", "row", "library"]
    unpack = [how.unpack for _, _, how in made]
    assert unpack == ["arithmetic"] * 3 + ["table", "arithmetic", "arithmetic"]


def test_row_kernel_takes_specs_that_append_alone() -> None:
    spec = spec_of(SHAPES["8B"]).attention()
    with pytest.raises(ValueError, match="append"):
        SeparateRow(replace(spec, append=False), None, torch.zeros(1, dtype=torch.int64))


# --- cases ---


def test_cases_are_those_of_the_paper_first(options: Options) -> None:
    found = [case.case for case in decode_ablation.cases(options)]
    steps = [(c["shape"], c["batch"], c["context"]) for c in found if "batch" in c]
    assert set(steps[:4]) == {("8B", 1, 1024), ("8B", 8, 1024), ("8B", 32, 4096), ("70B", 1, 1024)}
    assert [(c["shape"], c["M"]) for c in found if "M" in c] == [("8B", 1), ("8B", 8), ("8B", 32)]
    assert len(steps) == 6


def test_cases_by_name(options: Options) -> None:
    def told(**changes: Any) -> list[dict[str, Any]]:
        return [c.case for c in decode_ablation.cases(replace(options, **changes))]

    assert {c["shape"] for c in told(shapes=("70B",))} == {"70B"}
    assert {c.get("batch", c.get("M")) for c in told(M=(32,))} == {32}
    assert {c["context"] for c in told(lengths=(4096,))} == {4096}
    assert len(told(M=(2048,))) == 9


def test_what_was_measured_is_not_measured_again(options: Options) -> None:
    whole = [case.case for case in decode_ablation.cases(options)]
    rows = [{"case": case} for case in whole[:3]]
    rows += [{"case": whole[3], "failed": {"table": "CompileError"}}, {"case": whole[5]}]
    found = decode_ablation.cases(replace(options, progress=Progress(rows)))
    assert [case.case for case in found] == [whole[3], whole[4], *whole[6:]]


@pytest.mark.usefixtures("on_the_cpu", "single")
def test_a_table_file(
    options: Options,
    timer: Timer,
    source: Provenance,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(decode_ablation.SHAPES, "tiny", TINY)
    monkeypatch.setattr(decode_ablation, "CASES", (("tiny", 1, 65),))
    monkeypatch.setattr(decode_ablation, "PROJECTIONS", ())
    monkeypatch.setattr("benchmarks.decode_layer_step.copies_for", lambda _: 1)
    table = decode_ablation.table(replace(options, shapes=("tiny",)), timer, source, tmp_path)
    assert (tmp_path / "decode-ablation.json").exists()
    (row,) = table.rows
    assert "failed" not in row
    shown = decode_ablation.summary(table.content)
    assert all(name in shown for name in STEPS)


# --- on the emulated GPU ---

LAUNCHES = {
    **dict.fromkeys(VARIANTS, ("decode.hopper", "benchmarks.decode")),
    "row-kernel": ("decode.hopper", "kv.append", "attention.decode"),
}


def emulate(*variants: str) -> None:
    """Steps against float64, launch after launch, each of which may begin before the one in front has ended."""
    with emulated_device(multiprocessors=2, seed=1) as gpu:
        step = Step(TINY, 2, 70, Options((), device="cuda"), copies=1)
        layers = Layers(step)
        for variant in variants:
            mine = AblatedStep(layers, "int4", "int4", variant=variant)
            run = mine.runner()
            run(0)  # what is made at the first call
            torch.cuda.synchronize()  # attention reads its page before it waits for the kernel in front
            gpu.launches.clear()
            assert mine.check(run).norm < 0.006
            first = LAUNCHES.get(variant, ("decode.hopper", "attention.decode"))
            assert [x.name for x in gpu.launches] == [*first, *["decode.hopper"] * 3]
            assert all(x.programmatic for x in gpu.launches)


@pytest.mark.compile
def test_ge_14_a_row_that_a_kernel_in_front_stores_is_waited_for() -> None:
    emulate("row-kernel")


@pytest.mark.gates
def test_kd_15_every_variant_is_the_layer_in_float64() -> None:
    emulate(*STEPS)
