"""The roll of a whole group: what one site does alone, for all of them, in one launch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from epicute.errors import ArgumentError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.quant import NOT_RUN, SCALE_MAX, SCALE_MIN, DelayedScale, inverse, reference
from epicute.quant.group import DelayedGroup
from epicute.quant.roll import RollKernel, roll_sites
from epicute.testing import assert_equal_bits
from tests.quant.ptx import Emulated

NAMES = ("0.x", "0.attention", "0.x1", "0.z", "1.x")


def of(amax: float, count: int = 8) -> torch.Tensor:
    """A tensor of that amax."""
    return torch.linspace(-1, 1, count) * amax


def bits_of(state: DelayedScale | DelayedGroup) -> dict[str, torch.Tensor]:
    return state.state_dict()


def same(one: DelayedGroup, other: DelayedGroup) -> None:
    for name, tensor in bits_of(one).items():
        assert_equal_bits(bits_of(other)[name], tensor, name)


maxima = hnp.arrays(
    np.float32,
    len(NAMES),
    elements=st.floats(width=32, allow_nan=True) | st.sampled_from([NOT_RUN, 0.0, -0.0, 1e-40]),
)
"""``amax_next`` of all sites, sensible and otherwise."""


@given(st.lists(maxima, max_size=8), st.integers(1, 5), st.integers(0, 16))
def test_a_group_rolls_as_its_sites_do_alone(
    steps: list[np.ndarray], history: int, margin: int
) -> None:
    group = DelayedGroup.create(NAMES, history=history, margin=margin)
    alone = [DelayedScale.create(history=history, margin=margin) for _ in NAMES]
    for amax in steps:
        group.amax_next.copy_(torch.from_numpy(amax))
        for site, one in zip(alone, amax, strict=True):
            site.amax_next.fill_(float(one))
            site.roll()
        group.roll()
        for name, site in zip(NAMES, alone, strict=True):
            for key, tensor in bits_of(site).items():
                assert_equal_bits(bits_of(group[name])[key], tensor, f"{name}.{key}")


@given(
    st.lists(
        st.lists(
            st.none() | hnp.arrays(np.float32, 4, elements=st.floats(-1e4, 1e4, width=32)),
            min_size=2,
            max_size=2,
        ),
        max_size=8,
    ),
    st.integers(1, 4),
)
def test_any_sequence_agrees_with_the_reference(
    sequence: list[list[np.ndarray | None]], history: int
) -> None:
    group = DelayedGroup.create(("a", "b"), history=history)
    texts = [reference.DelayedReference(history) for _ in group]
    for invocation in sequence:
        group.roll()
        for name, text, x in zip(group, texts, invocation, strict=True):
            text.roll()
            assert group[name].scale_used.item() == text.scale
            if x is not None:
                codes, _ = group[name].quantize(torch.from_numpy(x))
                assert np.array_equal(codes.view(torch.uint8).numpy(), text.quantize(x))


def test_sites_are_views_of_the_groups_memory() -> None:
    group = DelayedGroup.create(NAMES, history=4)
    for i, name in enumerate(NAMES):
        group[name].quantize(of(float(i + 1)))
    assert group.amax_next.tolist() == [1, 2, 3, 4, 5]
    group.roll()
    for i, name in enumerate(NAMES):
        assert group[name].scale_used.item() == np.float32(np.float32(i + 1) / np.float32(448))
        assert group[name].history.data_ptr() == group.history[i].data_ptr()
    assert group["0.z"] is group["0.z"]
    assert list(group) == list(NAMES)
    assert len(group) == len(NAMES)


def test_no_value_is_read_and_no_tensor_is_replaced() -> None:
    group = DelayedGroup.create(NAMES)
    places = {name: getattr(group, name).data_ptr() for name in ("scale_used", "history", "cursor")}
    group.roll()
    assert {name: getattr(group, name).data_ptr() for name in places} == places
    # Tensors without memory: whatever reads a value raises.
    state = (group.scale_used, group.amax_next, group.history, group.cursor)
    roll_sites(*(x.to("meta") for x in state), margin=1)


def test_df_02_a_site_of_zeros_keeps_its_scale() -> None:
    group = DelayedGroup.create(("zero", "other"), initial=0.25)
    for _ in range(3):
        group["zero"].quantize(torch.zeros(3, 8))
        group["other"].quantize(of(7.0))
        group.roll()
    assert group.scale_used.tolist() == [0.25, 7 / 448]


@pytest.mark.parametrize("amax", [math.nan, math.inf, -math.inf, -2.0])
def test_df_03_a_maximum_that_is_no_magnitude_rolls_nobody(amax: float) -> None:
    group = DelayedGroup.create(("broken", "sound"), history=3)
    group.amax_next.copy_(torch.tensor([amax, 448.0]))
    group.roll()
    assert group.scale_used.tolist() == [1.0, 1.0]
    assert group.history.tolist() == [[0, 0, 0], [448, 0, 0]]
    assert group.cursor.tolist() == [0, 1]
    assert group.amax_next.tolist() == [NOT_RUN, NOT_RUN]


def test_df_04_only_sites_that_ran_are_rolled() -> None:
    group = DelayedGroup.create(("idle", "busy"), history=4)
    group["idle"].quantize(of(8.0))
    group.roll()
    before = bits_of(group["idle"])
    for step in range(10):
        group["busy"].quantize(of(float(step + 1)))
        group["idle"].quantize(torch.zeros(0, 32))
        group.roll()
    for name, tensor in bits_of(group["idle"]).items():
        assert_equal_bits(tensor, before[name], name)
    assert sorted(group["busy"].history.tolist()) == [7, 8, 9, 10]


def test_df_06_groups_do_not_share_unless_forked() -> None:
    a, b, alone = (DelayedGroup.create(NAMES, history=4) for _ in range(3))
    for step in range(6):
        x = of(1.0 + step / 8)
        for group in (a, b, alone):
            group.roll()
        for name in NAMES:
            a[name].quantize(x)
            b[name].quantize(of(400.0))
            alone[name].quantize(x)
    same(a, alone)
    heir = b.fork()
    a.roll()
    heir.roll()
    assert_equal_bits(heir.scale_used, b.scale_used)
    assert heir.counters.sum() == 0
    b.roll()
    heir["0.x"].quantize(of(1000.0))
    heir.roll()
    assert b["0.x"].scale_used.item() == np.float32(np.float32(400) / np.float32(448))
    assert heir["0.x"].scale_used.item() == np.float32(np.float32(1000) / np.float32(448))


def test_a_part_is_the_same_memory_and_rolls_alone() -> None:
    group = DelayedGroup.create(NAMES, history=3, margin=1)
    part = group.part(NAMES[1:4])
    assert (part.names, part.margin) == (NAMES[1:4], 1)
    group.amax_next.fill_(56.0)
    group.counters.fill_(7)
    part.roll()
    assert group.scale_used.tolist() == [1, 0.25, 0.25, 0.25, 1]
    assert group.history[:, 0].tolist() == [0, 56, 56, 56, 0]
    assert group.cursor.tolist() == [0, 1, 1, 1, 0]
    part[NAMES[1]].quantize(of(1e6, 2))
    part["0.z"].nans.add_(1)
    assert group.counters.tolist() == [[7, 9, 7, 7, 7], [7, 7, 7, 8, 7]]
    part.reset_counters()
    assert group.counters.tolist() == [[7, 0, 0, 0, 7], [7, 0, 0, 0, 7]]
    for names in ((), ("0.x", "0.x1"), ("0.x1", "0.attention"), ("2.x",), ("1.x", "0.x")):
        with pytest.raises(ArgumentError, match="^names.*neighbours"):
            group.part(names)


def test_df_08_a_saved_group_continues_bit_for_bit(tmp_path) -> None:
    group = DelayedGroup.create(NAMES, history=5, margin=1)
    data = [3.0, 9.0, 0.5, 700.0, 2.0, 4.0, 1.0]
    for amax in data:
        for i, name in enumerate(NAMES):
            group[name].quantize(of(amax * (i + 1)))
        group.roll()
    path = tmp_path / "scales.safetensors"
    group.save(path)
    again = DelayedGroup.load(path)
    assert (again.names, again.margin) == (group.names, 1)
    for amax in data:
        for name in NAMES:
            codes, other = (g[name].quantize(of(amax))[0] for g in (group, again))
            assert_equal_bits(other, codes)
        group.roll()
        again.roll()
        assert_equal_bits(again.scale_used, group.scale_used)
    assert_equal_bits(again.counters, group.counters)
    assert list(tmp_path.iterdir()) == [path]


def test_df_08_another_history_length_keeps_the_newest() -> None:
    long = DelayedGroup.create(("a", "b"), history=16)
    for amax in range(1, 21):
        long["a"].quantize(of(float(amax)))
        long.roll()
    short = DelayedGroup.create(("a", "b"), history=4)
    short.load_state_dict(long.state_dict())
    assert sorted(short["a"].history.tolist()) == [17, 18, 19, 20]
    assert_equal_bits(short.scale_used, long.scale_used)


def test_a_bad_state_changes_nothing() -> None:
    group, other = DelayedGroup.create(("a", "b")), DelayedGroup.create(("a", "b"))
    group["a"].quantize(of(5.0))
    state = group.state_dict()
    state["scale_used"][1] = math.nan
    with pytest.raises(ArgumentError, match=r"site 'b'.*scale_used"):
        other.load_state_dict(state)
    same(other, DelayedGroup.create(("a", "b")))
    with pytest.raises(ArgumentError, match="2 sites"):
        other.load_state_dict(DelayedGroup.create(NAMES).state_dict())
    with pytest.raises(ArgumentError, match="state_dict"):
        other.load_state_dict({"scale_used": torch.ones(2)})


def test_files_of_others_are_refused(tmp_path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(ArgumentError, match="state_version"):
        DelayedGroup.load(path)
    save_file({"x": torch.ones(1)}, path, {"state_version": "1"})
    with pytest.raises(ArgumentError, match=r"unreadable.*DelayedGroup\.save"):
        DelayedGroup.load(path)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"names": ()}, "names"),
        ({"names": ("a", "a")}, "names"),
        ({"names": "ab"}, "names"),
        ({"names": ("a",), "history": 0}, "history"),
        ({"names": ("a",), "initial": math.inf}, "initial"),
        ({"names": ("a",), "margin": 17}, "margin"),
    ],
)
def test_what_makes_no_group_is_refused(given: dict[str, object], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        DelayedGroup.create(**given)  # type: ignore[arg-type]


def test_an_unknown_site_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"'2\.x'.*0\.attention"):
        DelayedGroup.create(NAMES)["2.x"]


class TestFirstScales:
    def test_from_data(self) -> None:
        group = DelayedGroup.create(NAMES, margin=1)
        group.start_from({"0.x": of(56.0), "0.z": 112.0, "0.x1": torch.zeros(4).bfloat16()})
        assert group["0.x"].scale_used.item() == 0.25
        assert group["0.z"].scale_used.item() == 0.5
        assert group["0.x1"].scale_used.item() == 1.0
        assert group["1.x"].scale_used.item() == 1.0
        assert group.counters.sum() == 0
        assert (group.amax_next == NOT_RUN).all()

    def test_data_without_a_finite_value_changes_nothing(self) -> None:
        group = DelayedGroup.create(NAMES)
        with pytest.raises(ArgumentError, match=r"data\['0\.z'\].*none finite"):
            group.start_from({"0.x": of(3.0), "0.z": torch.tensor([math.nan, math.inf])})
        same(group, DelayedGroup.create(NAMES))

    def test_df_07_what_was_known_before_is_forgotten(self) -> None:
        group = DelayedGroup.create(("a",))
        group["a"].quantize(of(6000.0))
        group.roll()
        group.start_from({"a": of(6.0)})
        assert group["a"].scale_used.item() == np.float32(np.float32(6) / np.float32(448))
        codes, scale = group["a"].quantize(of(6.0))
        assert codes.float()[-1] * scale == 6.0

    @pytest.mark.parametrize("rolls", [False, True])
    def test_by_running_a_chain(self, rolls: bool) -> None:
        """Each site sees what the one before has clipped, until that one's scale fits."""
        group = DelayedGroup.create(("a", "b", "c", "unused"), initial=2.0**-10)
        x = torch.randn(64, generator=torch.Generator().manual_seed(0))

        def invoke() -> None:
            if rolls:
                group.roll()
            value = x
            for name in ("a", "b", "c"):
                codes, scale = group[name].quantize(value * 4)
                value = codes.float() * scale

        calls = group.calibrate(invoke)
        assert 3 <= calls <= 5
        peak = float(x.abs().max())
        for i, name in enumerate(("a", "b", "c")):
            assert group[name].scale_used.item() * 448 == pytest.approx(
                peak * 4 ** (i + 1), rel=0.1
            )
        assert group["unused"].scale_used.item() == 2.0**-10
        assert group.counters.sum() == 0
        assert (group.history[:3, 1:] == 0).all()

    def test_no_more_calls_than_asked_for(self) -> None:
        group = DelayedGroup.create(("a",))
        grown = iter((1.0, 10.0, 100.0, 1000.0))
        assert group.calibrate(lambda: group["a"].quantize(of(next(grown))), most=3) == 3
        with pytest.raises(ArgumentError, match="most"):
            group.calibrate(lambda: None, most=0)


def test_a_reader_tells_what_was_counted() -> None:
    group = DelayedGroup.create(("a", "b"))
    reader = group.reader()
    assert reader.newest() is None
    group["b"].quantize(torch.tensor([1000.0, math.nan, 1.0]))
    assert reader.request()
    found = reader.newest()
    assert found is not None
    assert (found.saturated, found.nans) == ({"a": 0, "b": 1}, {"a": 0, "b": 1})
    assert not found.clean
    group.reset_counters()
    assert reader.newest() == found  # a copy, until the next request
    assert reader.request()
    newest = reader.newest()
    assert newest is not None
    assert newest.clean


@pytest.mark.compile
class TestKernel:
    kernel = RollKernel(DEFAULT_TARGET)

    def test_no_spills(self) -> None:
        report = compile(self.kernel).report
        assert report.problems(0) == []
        assert report.registers is not None
        assert report.registers <= 32

    @pytest.mark.parametrize("history", [1, 5, 16, 32, 33, 70])
    def test_the_compiled_code_rolls_to_the_bit(self, history: int, roll: Emulated) -> None:
        names = tuple(map(str, range(9)))  # two blocks and a warp
        here = DelayedGroup.create(names, history=history, margin=history % 4)
        there = here.fork()
        random = np.random.default_rng(history)
        odd = [NOT_RUN, math.nan, math.inf, -2.0, 0.0, -0.0, 1e-40, 3e38]
        for step in range(2 * history + 3 if history < 16 else 20):
            amax = np.exp2(random.uniform(-120, 120, 9)).astype(np.float32)
            amax[step % 9], amax[(step + 4) % 9] = odd[step % 8], NOT_RUN
            for group in (here, there):
                group.amax_next.copy_(torch.from_numpy(amax))
            here.roll()
            state = (there.scale_used, there.amax_next, there.history, there.cursor)
            roll.launch(there._plan.bind(there), *state)
            same(there, here)

    @pytest.mark.parametrize("margin", [0, 3])
    def test_the_compiled_code_chooses_scales_that_hold_their_peak(
        self, margin: int, roll: Emulated
    ) -> None:
        names = tuple(map(str, range(200)))
        here = DelayedGroup.create(names, history=1, margin=margin)
        there = here.fork()
        random = np.random.default_rng(margin)
        peaks = torch.from_numpy(np.exp2(random.uniform(-149, 128, 200)).astype(np.float32))
        peaks[0], peaks[1] = float(np.finfo(np.float32).max), 1e-45
        for group in (here, there):
            group.amax_next.copy_(peaks)
        here.roll()
        state = (there.scale_used, there.amax_next, there.history, there.cursor)
        roll.launch(there._plan.bind(there), *state)
        same(there, here)
        held = (peaks * inverse(here.scale_used) <= 448) | (peaks > 448 * SCALE_MAX)
        assert held.all()
        plain = peaks / 448 * 2.0**margin
        assert ((here.scale_used > plain) & (here.scale_used > SCALE_MIN)).sum() > 20


@pytest.fixture(scope="module")
def roll() -> Emulated:
    return Emulated(RollKernel(DEFAULT_TARGET))


def test_a_state_that_is_no_file_and_a_negative_maximum_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="DelayedGroup.save"):
        DelayedGroup.load(tmp_path / "nowhere.safetensors")
    (tmp_path / "bad").write_bytes(b"no tensors")
    with pytest.raises(ArgumentError, match="DelayedGroup.save"):
        DelayedGroup.load(tmp_path / "bad")
    with pytest.raises(ArgumentError, match="not negative"):
        DelayedGroup.create(["a"]).start_from({"a": -3.0})
