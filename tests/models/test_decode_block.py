"""A layer's decode step without a GPU: its parts, what it gives with kernels evaluated here, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.attention.decode_build import decode_kernel_for
from epicute.attention.decode_schedule import SMEM
from epicute.attention.decode_spec import DecodeSpec, decode_unsupported
from epicute.attention.spec import HEAD_DIMS
from epicute.decode import kernel_for
from epicute.epilogues import RoPE
from epicute.errors import ArgumentError, UnsupportedError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.kv import Int4Cache, QK4PV8Cache
from epicute.layouts.qk4pv8 import QK4PV8Page
from epicute.models import LayerShape
from epicute.models.block_spec import PROJECTIONS, BlockSpec
from epicute.models.decode_block import DecodeBlock
from epicute.models.decode_block_spec import CARVEOUT, DecodeBlockSpec, chain_schedule
from epicute.models.decode_cache import CacheForm, DecodeCache
from epicute.models.decode_step import DecodeStep
from epicute.models.decode_weights import DecodeWeights
from epicute.models.kernels import GPU
from epicute.models.layer_weights import LayerWeights
from epicute.models.shapes import projections
from epicute.quant.int4 import Int4Grid
from epicute.testing import assert_equal_bits
from epicute.weights import QuantizedInt4, Weight
from tests.models.decode_blocks import Scene, block_spec
from tests.models.decode_kernels import step_kernels
from tests.models.layers import cache_of, inv_freq, state_of
from tests.models.one_thread import single as single

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SMALL = LayerShape(96, 160, 4, 2, 64, "small")
"""A hidden size that is no multiple of 64, so that the last partial sum has 32 columns."""

PLAIN = BlockSpec(SMALL, "bf16")
LENGTHS = (37, 0, 5, 1)


def mixed_form(page: int = 64, heads: int = 4, **options: Any) -> CacheForm:
    kind = QK4PV8Cache(3, 2, heads, QK4PV8Page(page, 64, "exact16"), **options)
    return CacheForm("qk4pv8", page, records=kind)


FORMS = {
    "bf16": CacheForm("bf16"),
    "fp8": CacheForm("fp8"),
    "int4": CacheForm("int4"),
    "int4, main": CacheForm("int4", main=True),
    "qk4pv8": mixed_form(),
    "qk4pv8, main": replace(mixed_form(), main=True),
}


# --- what a step is made of ---


def test_compositions() -> None:
    def titles(weights: str, form: str) -> dict[str, str]:
        spec = DecodeBlockSpec.of(PLAIN, FORMS[form], weights)
        return {name: chain.title for name, chain in spec.compositions.items()}

    plain = titles("bf16", "bf16")
    assert plain == {
        "qkv": "RowScale >> Columns(q: RoPE >> Store, k: RoPE >> PlaceKV, v: PlaceKV)",
        "o": "ResidualAdd >> KeepRows >> SumSquares >> Store",
        "gate_up": "RowScale >> SwiGLU >> Store",
        "down": "ResidualAdd >> SumSquares >> Store",
    }
    for form in ("fp8", "int4", "qk4pv8"):
        assert titles("int4", form) == plain
    both = "RowScale >> Columns(q: RoPE >> Store, k: RoPE >> PlaceKV >> Store, v: PlaceKV >> Store)"
    for form in ("int4, main", "qk4pv8, main"):
        assert titles("bf16", form)["qkv"] == both
    scaled = titles("fp8", "bf16")
    assert scaled == {name: f"Dequantize >> {title}" for name, title in plain.items()}


@st.composite
def blocks(draw: st.DrawFn) -> BlockSpec:
    dim = draw(st.sampled_from((64, 128)))
    kv_heads = draw(st.integers(1, 3))
    shape = LayerShape(
        16 * draw(st.integers(1, 40)),
        16 * draw(st.integers(1, 40)),
        kv_heads * draw(st.integers(1, 4)),
        kv_heads,
        dim,
        "drawn",
    )
    rope = draw(st.sampled_from((RoPE(dim), RoPE(dim, dim // 2), RoPE(dim, style="interleaved"))))
    return BlockSpec(
        shape, "bf16", bias=draw(st.booleans()), qk_norm=draw(st.booleans()), rope=rope
    )


@given(blocks())
@settings(max_examples=12)
def test_rows_stand_alike_beside_every_cache_and_in_prefill(block: BlockSpec) -> None:
    """So that one copy of the weights serves them all, and prefill expands what a step streams."""
    for name, (columns, _) in projections(block.shape).items():
        wanted = block.compositions[name].row_order(columns).physical()
        for form in (CacheForm("bf16"), CacheForm("fp8"), CacheForm("int4", main=True)):
            for weights in ("bf16", "fp8", "int4"):
                spec = DecodeBlockSpec.of(block, form, weights)
                order = spec.compositions[name].row_order(columns)
                assert (order.physical() == wanted).all(), (name, form.format, weights)


@given(
    st.sampled_from(HEAD_DIMS),
    st.integers(1, 8),
    st.integers(1, 40),
    st.sampled_from(("bf16", "fp8", "int4")),
    st.sampled_from((None, 16, 32, 64, 128)),
)
def test_attention_in_a_chain_has_the_chains_carveout(
    dim: int, kv_heads: int, group: int, cache: str, page: int | None
) -> None:
    spec = DecodeSpec(kv_heads * group, kv_heads, dim, cache, page=page)
    if decode_unsupported(spec, DEFAULT_TARGET) is not None:
        return
    found = chain_schedule(spec)
    found.check(spec)
    assert found.carveout == CARVEOUT
    assert found.shared_memory(spec) <= (SMEM if found.resident == 1 else SMEM // 2)


@pytest.mark.compile
def test_the_composed_epilogues_compile() -> None:
    """What no other test compiles: rows that are placed and stored, behind FP8 scales, with a gain on the way in."""
    at = Scene(replace(PLAIN, bias=True, qk_norm=True), "fp8", "int4", [3], mirror=True)
    spec = at.layer.spec
    kernel = kernel_for(spec.compositions["qkv"], at.layer.qkv, 8, gain=True, target=DEFAULT_TARGET)
    report = compile(kernel).report
    report.check(kernel.spec.name, DEFAULT_TARGET.smem_per_block)


@pytest.mark.gates
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_of_the_published_heads_compile(name: str, weights: str, rows: int) -> None:
    """Heads of 128 with all options, for every number of rows; a main copy beside INT4 records."""
    shape = LayerShape(1024, 1024, 8, 2, 128, "8:2 of 128")
    block = BlockSpec(shape, "bf16", bias=True, qk_norm=True)
    at = Scene(block, weights, "int4", [3], mirror=True)
    spec = at.layer.spec
    gain = spec.norm_gain and name in ("qkv", "gate_up")
    options = {"dtypes": {"residual": BF16}} if name in ("o", "down") else {}
    packed = getattr(at.layer, name)
    kernel = kernel_for(
        spec.compositions[name], packed, rows, gain=gain, target=DEFAULT_TARGET, **options
    )
    compile(kernel).report.check(kernel.spec.name, DEFAULT_TARGET.smem_per_block)


@pytest.mark.gates
@pytest.mark.parametrize("cache", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize(
    ("heads", "dim"),
    [
        *(((32, 8), 128), ((8, 8), 128), ((32, 1), 128), ((9, 3), 64), ((32, 1), 64)),
        *(((32, 8), 96), ((32, 8), 80), ((8, 4), 256)),
    ],
)
def test_attention_between_projections_compiles(
    cache: str, heads: tuple[int, int], dim: int
) -> None:
    """Without a spill, also where two CTAs are to share an SM's registers."""
    spec = DecodeSpec(*heads, dim, cache, page=64, prefetch=True)
    if decode_unsupported(spec, DEFAULT_TARGET) is not None:
        return
    kernel = decode_kernel_for(spec, target=DEFAULT_TARGET, schedule=chain_schedule(spec))
    compile(kernel).report.check(kernel.name, DEFAULT_TARGET.smem_per_block)


# --- what it gives ---


def scene(weights: str, cache: str, **options: Any) -> Scene:
    spec = options.pop("spec", PLAIN)
    lengths = options.pop("lengths", LENGTHS)
    made: list[str] = options.pop("made", [])
    return Scene(spec, weights, cache, lengths, kernels=step_kernels(made), **options)


@pytest.mark.parametrize("cache", ["bf16", "fp8", "int4", "int4 main"])
@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4"])
def test_a_step_is_the_layer_in_float64(weights: str, cache: str) -> None:
    made: list[str] = []
    at = scene(weights, cache.split()[0], mirror="main" in cache, made=made)
    block = at.plan()
    made.clear()
    at.check(block, at.run(block))
    assert len(made) == 5


@pytest.mark.parametrize(
    "spec",
    [
        BlockSpec(SMALL, "bf16", bias=True, qk_norm=True, gain_offset=1.0),
        BlockSpec(SMALL, "bf16", rope=RoPE(64, 32), window=7, softcap=20.0),
        BlockSpec(SMALL, "bf16", rope=RoPE(64, style="interleaved"), softmax_scale=0.3),
        BlockSpec(SMALL, "fp16", cache=FP16, qk_norm=True),
    ],
    ids=["bias, norms", "window, cap", "interleaved", "float16"],
)
@pytest.mark.parametrize("weights", ["as it is", "int4"])
def test_every_option(spec: BlockSpec, weights: str) -> None:
    weights = spec.format if weights == "as it is" else weights
    at = scene(weights, spec.format, spec=spec)
    block = at.plan()
    at.check(block, at.run(block))


@pytest.mark.parametrize("cache", ["bf16", "int4"])
def test_a_contiguous_cache(cache: str) -> None:
    at = scene("bf16", cache, page=None)
    block = at.plan()
    at.check(block, at.run(block))


def test_in_place() -> None:
    """The stream that leaves in the memory of the one that enters."""
    at = scene("int4", "bf16")
    block, x = at.plan(), at.stream()
    wanted = at.run(block)
    assert block.run(x, at.step(), at.cache, x) is x
    assert_equal_bits(x.values, wanted)


def test_iw_03_iw_06_imported_codes_with_zero_points_and_groups() -> None:
    """Asymmetric groups of 64 of q, k and v, of one scale a feature in ``down``: gains are operands beside them."""
    state = state_of(PLAIN)
    given = {}
    for part, group in (("q", 64), ("k", 64), ("v", 64)):
        name = f"self_attn.{part}_proj.weight"
        given[name] = Weight(state[name], name).quantize("int4", Int4Grid(group, symmetric=False))
    name = "mlp.down_proj.weight"
    given[name] = Weight(state[name], name).quantize("int4", Int4Grid(-1))
    at = scene("int4", "bf16", given=given)
    assert (at.layer.qkv.group, at.layer.down.group, at.layer.o.group) == (64, -1, 128)
    block = at.plan()
    at.check(block, at.run(block))


def test_fp8_codes_of_a_checkpoint_keep_gains_as_operands() -> None:
    spec = replace(block_spec(PLAIN, "fp8", "bf16"), gains="operand", last=True)
    layer = DecodeWeights.of(LayerWeights.build(state_of(PLAIN), spec))
    assert layer.spec.norm_gain
    at = scene("fp8", "bf16", page=64)
    at.layer = layer
    block = at.plan()
    at.check(block, at.run(block))


def test_kd_01_memory_of_nobody_reaches_nothing() -> None:
    """Scratch of NaN, and NaN in the row that takes no part."""
    at = scene("int4", "int4")
    block = at.plan()
    wanted = at.run(block)
    for x in (block.memory.q, block.memory.attended, block.memory.z, block.memory.new_k):
        x.fill_(torch.nan)
    stream = at.stream()
    stream.values[1] = torch.nan
    stream.sumsq[1] = torch.nan
    found = block.run(stream, at.step(), at.cache, at.out())
    assert_equal_bits(found.values, wanted)


def test_no_request() -> None:
    at = scene("bf16", "bf16")
    made: list[str] = []
    block = at.plan(kernels=step_kernels(made))
    step = DecodeStep.allocate(0, at.pages)
    x, out = at.stream().first(0), at.out().first(0)
    assert block.run(x, step, at.cache, out) is out
    assert made == []


def test_layers_share_kernels_and_memory() -> None:
    one, two = scene("int4", "int4"), scene("int4", "int4", seed=5)
    blocks = DecodeBlock.chain(
        [one.layer, two.layer],
        inv_freq(PLAIN),
        max_batch=4,
        max_len=96,
        kernels=step_kernels(),
    )
    assert blocks[0].projections is blocks[1].projections
    assert blocks[0].memory is blocks[1].memory
    for block, at in zip(blocks, (one, two), strict=True):
        at.check(block, at.run(block))
    text = str(blocks[0])
    assert "int4 weights, norm gains as operands, int4 cache, pages of 32" in text
    assert [line.split()[0] for line in text.splitlines()[2:]] == [
        *("qkv", "attention", "o", "gate_up", "down")
    ]


# --- weights ---


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8"])
def test_weights_of_a_prefill_keep_their_bits(format: str) -> None:
    spec = block_spec(replace(PLAIN, bias=True, qk_norm=True), format, "bf16")
    layer = LayerWeights.build(state_of(spec), spec)
    found = DecodeWeights.of(layer)
    assert found.spec.weights == format
    for name in PROJECTIONS:
        mine, right = getattr(found, name).unpack(), getattr(layer, name).unpack()
        assert_equal_bits(mine.codes, right.codes)
        if format == "fp8":
            assert_equal_bits(mine.scale, right.scale)
    assert found.bias is layer.bias
    assert found.q_gain is layer.q_gain
    moved = found.to("cpu")
    assert moved.nbytes == found.nbytes > 0
    assert found.reading(CacheForm("fp8")).qkv is found.qkv


def test_int4_weights_are_the_checkpoints_own_with_gains_beside_them() -> None:
    spec = replace(PLAIN, gain_offset=1.0)
    state = state_of(spec)
    found = DecodeWeights.int4(state, spec)
    assert found.spec.norm_gain
    gain = state["input_layernorm.weight"].float() + 1.0
    assert_equal_bits(found.x_gain, gain)
    name = "self_attn.v_proj.weight"
    right = Weight(state[name], name).quantize("int4")
    mine = found.qkv.unpack()
    assert isinstance(mine, QuantizedInt4)
    assert isinstance(right, QuantizedInt4)
    assert mine.gain_operand
    assert_equal_bits(mine.codes[-spec.shape.kv_width :], right.codes)
    assert_equal_bits(mine.scales[-spec.shape.kv_width :], right.scales)


class TestWeightsRefused:
    def test_names_shapes_and_values(self) -> None:
        state = state_of(PLAIN)
        with pytest.raises(ArgumentError, match=r"got no model\.layers\.0\.self_attn"):
            DecodeWeights.int4(state, PLAIN, prefix="model.layers.0.")
        for change, said in (
            ({"mlp.up_proj.weight": torch.zeros(3, 96)}, r"^mlp\.up_proj.*\(160, 96\)"),
            ({"self_attn.o_proj.weight": torch.full((96, 256), torch.inf)}, "non-finite"),
            ({"input_layernorm.weight": torch.zeros(96, dtype=torch.int32)}, "int32"),
        ):
            with pytest.raises(ArgumentError, match=said):
                DecodeWeights.int4(state | change, PLAIN)

    def test_codes_of_another_shape_or_of_two_groups(self) -> None:
        state = state_of(PLAIN)
        name = "self_attn.k_proj.weight"
        codes = Weight(state[name], name).quantize("int4", Int4Grid(32))
        with pytest.raises(ArgumentError, match=r"parts.*int4 alike"):
            DecodeWeights.int4(state, PLAIN, given={name: codes})
        with pytest.raises(
            ArgumentError, match=r"^given\['self_attn\.q_proj\.weight'\].*\(256, 96\)"
        ):
            DecodeWeights.int4(state, PLAIN, given={"self_attn.q_proj.weight": codes})

    def test_gains_that_are_missing(self) -> None:
        found = DecodeWeights.int4(state_of(PLAIN), PLAIN)
        with pytest.raises(ArgumentError, match=r"^x_gain: got None, expected \(96,\) float32"):
            replace(found, x_gain=None)
        spec = DecodeBlockSpec.of(PLAIN, CacheForm("bf16"), "int4", False)
        with pytest.raises(ArgumentError, match="codes that have not taken up the norm's gain"):
            replace(found, spec=spec, x_gain=None, x1_gain=None)

    def test_another_format(self) -> None:
        found = DecodeWeights.int4(state_of(PLAIN), PLAIN)
        with pytest.raises(ArgumentError, match=r"^qkv: got int4 .*expected bf16"):
            replace(found, spec=DecodeBlockSpec.of(PLAIN, CacheForm("bf16")))


# --- where tokens stand ---


@given(st.data())
@settings(max_examples=30)
def test_a_steps_places(data: st.DataObject) -> None:
    page = data.draw(st.sampled_from((16, 32, 64, 128)))
    lengths = data.draw(st.lists(st.integers(0, 3 * page), min_size=1, max_size=5))
    table = torch.randperm(3 * len(lengths)).reshape(-1, 3)
    found = DecodeStep.of(lengths, page, table)
    for row, length in enumerate(lengths):
        assert int(found.lengths[row]) == length
        assert int(found.positions[row]) == length - 1
        at = length - 1
        wanted = int(table[row, at // page]) * page + at % page if length else -1
        assert int(found.slots[row]) == wanted
    other = DecodeStep.allocate(len(lengths), 3)
    assert (other.slots == -1).all()
    assert other.copy_(found) is other
    for name in ("positions", "slots", "lengths", "page_table"):
        assert torch.equal(getattr(other, name), getattr(found, name))


class TestStepRefused:
    def test_lengths(self) -> None:
        for lengths in ([], [3, -1]):
            with pytest.raises(ArgumentError, match="^lengths"):
                DecodeStep.of(lengths, 16)
        with pytest.raises(ArgumentError, match="outside the page table"):
            DecodeStep.of([17], 16, torch.tensor([[3]]))

    def test_tables_and_vectors(self) -> None:
        with pytest.raises(ArgumentError, match=r"^page_table\.shape.*\(2, pages"):
            DecodeStep.of([1, 2], 16, torch.tensor([[3]]))
        good = DecodeStep.of([1, 2], 16, torch.tensor([[3], [4]]))
        for change, said in (
            ({"slots": good.slots.int()}, "^slots.*int32.*int64"),
            ({"lengths": good.lengths[:1]}, r"^lengths.*\(2,\)"),
            ({"page_table": good.page_table.long()}, "^page_table.*int32"),
        ):
            with pytest.raises(ArgumentError, match=said):
                replace(good, **change)
        with pytest.raises(ArgumentError, match="^other: got 3 requests"):
            good.copy_(DecodeStep.allocate(3, 1))


# --- what is refused ---


class TestRefused:
    def test_formats(self) -> None:
        with pytest.raises(ArgumentError, match="^weights: got 'nvfp4'"):
            DecodeBlockSpec.of(PLAIN, CacheForm(), "nvfp4")
        with pytest.raises(
            ArgumentError, match="^block.format: got 'bf16' activations beside fp16"
        ):
            DecodeBlockSpec(PLAIN, "fp16")
        with pytest.raises(ArgumentError, match="^cache.format: got fp16"):
            DecodeBlockSpec.of(PLAIN, CacheForm("fp16"))
        with pytest.raises(ArgumentError, match="^cache.format: got 'nvfp4'"):
            CacheForm("nvfp4")

    def test_forms_that_make_no_sense(self) -> None:
        for options, said in (
            ({"main": True}, "^cache.main"),
            ({"rotation": 64}, "^cache.rotation"),
            ({"format": "fp8", "values_folded": True}, "^cache.rotation"),
            ({"format": "qk4pv8"}, "^cache.records"),
            ({"format": "qk4pv8", "page": 32, "records": mixed_form().records}, "^cache.page"),
        ):
            with pytest.raises(ArgumentError, match=said):
                CacheForm(**options)

    def test_masks_that_the_kernel_over_qk4pv8_does_not_know(self) -> None:
        for option in ({"window": 9}, {"softcap": 20.0}):
            with pytest.raises(UnsupportedError, match=f"^{next(iter(option))}: .*QK4PV8"):
                DecodeBlockSpec.of(replace(PLAIN, **option), mixed_form())
        with pytest.raises(ArgumentError, match="^cache.records: got 2:2 heads"):
            DecodeBlockSpec.of(PLAIN, mixed_form(heads=2))

    def test_heads_that_int4_records_have_no_kernel_for(self) -> None:
        block = BlockSpec(LayerShape(128, 128, 2, 1, 256, "wide"), "bf16")
        spec = DecodeBlockSpec.of(block, CacheForm("int4"))
        with pytest.raises(UnsupportedError, match="64 or 128 for an INT4 cache"):
            GPU.decode(spec.attention(), chain_schedule(spec.attention()))

    @pytest.mark.parametrize(
        ("options", "error", "said"),
        [
            ({"max_batch": 0}, ArgumentError, "^max_batch: got 0"),
            ({"max_batch": 257}, UnsupportedError, "^max_batch: got 257.*prefills of one token"),
            ({"max_len": 0}, ArgumentError, "^max_len"),
            ({"max_len": 2**24 + 1}, ArgumentError, "^max_len.*float32"),
            ({"inv_freq": torch.zeros(3)}, ArgumentError, r"^inv_freq.*\(32,\) float32"),
        ],
    )
    def test_plans(self, options: dict[str, Any], error: type[Exception], said: str) -> None:
        at = scene("bf16", "bf16")
        frequencies = options.pop("inv_freq", inv_freq(PLAIN))
        given = {"max_batch": 4, "max_len": 96, "kernels": at.kernels} | options
        with pytest.raises(error, match=said):
            DecodeBlock.plan(at.layer, frequencies, **given)

    def test_memory_and_weights_of_another_layer(self) -> None:
        at, other = scene("bf16", "bf16"), scene("bf16", "int4")
        block = at.plan()
        with pytest.raises(ArgumentError, match="^memory: got 4 requests"):
            at.plan(memory=block.memory, max_batch=8)
        with pytest.raises(ArgumentError, match="^memory"):
            other.plan(memory=block.memory)
        with pytest.raises(ArgumentError, match="^weights: got .*int4 cache"):
            block.with_weights(other.layer)
        with pytest.raises(ArgumentError, match="^layers: got none"):
            DecodeBlock.chain([], inv_freq(PLAIN), max_batch=1, max_len=1)

    def test_a_schedule_for_a_qk4pv8_cache(self) -> None:
        at = scene("bf16", "qk4pv8")
        schedule = chain_schedule(DecodeSpec(4, 2, 64, page=64))
        with pytest.raises(ArgumentError, match="^schedule: .*QK4PV8"):
            at.plan(schedule=schedule)

    def test_runs(self) -> None:
        at, block = scene("bf16", "bf16"), scene("bf16", "bf16").plan()
        x, out, step = at.stream(), at.out(), at.step()
        small = at.plan(max_batch=2)
        with pytest.raises(ArgumentError, match="^x: got 4 rows, expected at most 2"):
            small.run(x, step, at.cache, out)
        with pytest.raises(ArgumentError, match="^step: got 2 requests, expected 4"):
            block.run(x, DecodeStep.allocate(2, 3), at.cache, out)
        with pytest.raises(ArgumentError, match="^cache: got int4 cache.*expected bf16 cache"):
            block.run(x, step, scene("bf16", "int4").cache, out)
        with pytest.raises(ArgumentError, match="^step.page_table: got none"):
            block.run(x, replace(step, page_table=None), at.cache, out)
        with pytest.raises(ArgumentError, match="^step.page_table: got room for 96.*at most 40"):
            at.plan(max_len=40).run(x, step, at.cache, out)
        with pytest.raises(ArgumentError, match="^out.values"):
            block.run(x, step, at.cache, out.first(3))
        here = replace(block, kernels=GPU)
        with pytest.raises(UnsupportedError, match="^weights: got a layer on the CPU"):
            here.run(x, step, at.cache, out)

    def test_main_copies_that_do_not_fit(self) -> None:
        kind = Int4Cache.create(8, 16, 2, 64)
        memory = kind.allocate()
        for main in (cache_of(PLAIN, 8, 32), cache_of(replace(PLAIN, cache=FP8), 8, 16)):
            with pytest.raises(ArgumentError, match="^main: got"):
                DecodeCache.int4(kind, memory, main)
        cache = QK4PV8Cache(3, 2, 4, QK4PV8Page(64, 64, "exact16"), 1)
        with pytest.raises(ArgumentError, match="^means: got None"):
            DecodeCache.qk4pv8(cache, cache.allocate())
