"""The model of time, on schedules written by hand whose times follow from round figures."""

import dataclasses

import pytest
from jax.sharding import AbstractMesh

import jaxzero
from jaxzero._src.analysis.machine import Machine, figures_of
from jaxzero._src.analysis.network import INSIDE, OUTSIDE, transfer

#: A node of 4: products of 64x64x64 take 0.5 s, 4096 bytes of memory 1 s, 1024 bytes inside a node 1 s.
ROUND = Machine(
    name="round",
    bf16=2 * 64**3,
    f32=4 * 64**3,
    f64=64**3,
    memory=1e9,
    bandwidth=4096,
    per_node=4,
    local=1024,
    network=1024,
    local_latency=0,
    network_latency=0,
    launch=1e-12,
    products_reach=1,
    memory_reach=1,
    links_reach=1,
)
FAST = dataclasses.replace(ROUND, bandwidth=1e30)
MESH = AbstractMesh((2, 4), ("node", "local"))
HEAD = "HloModule m, is_scheduled=true, num_partitions=8\n"
INNER = "replica_groups={{0,1,2,3},{4,5,6,7}}"
ACROSS = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
DOT = "f32[64,64]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
#: 4096 bytes gathered inside a node: each device sends 3072, 3 s. Across: each sends 2048 over a quarter of 1024: 8 s.
GATHER = "(f32[256]{0}, f32[1024]{0}) all-gather-start(%x), " + INNER + ", dimensions={0}"


def program(*lines, more=""):
    """A program of 8 devices with one array of 64x64 and one of 256."""
    given = ["%w = f32[64,64]{1,0} parameter(0)", "%x = f32[256]{0} parameter(1)", *lines]
    return HEAD + more + "ENTRY %main (w: f32[64,64], x: f32[256]) -> f32[] {\n  " + "\n  ".join(given) + "\n}\n"


def predicted(text, machine=FAST, **options):
    return jaxzero.predict(text, machine, MESH, **options)


def test_products_count_their_operations():
    """Two for each element and index: 2 * 64^3 at 4 * 64^3 per second; inside a fusion too, and in bfloat16."""
    assert predicted(program(f"%d = {DOT}")).seconds == pytest.approx(0.5)
    fused = f"%f (w: f32[64,64]) -> f32[64,64] {{\n  %w = f32[64,64]{{1,0}} parameter(0)\n  ROOT %d = {DOT}\n}}\n"
    found = predicted(program("%a = f32[64,64]{1,0} fusion(%w), kind=kCustom, calls=%f", more=fused), tokens=10)
    assert (found.seconds, found.busy, found.operations) == pytest.approx((0.5, 0.5, 2 * 64**3))
    assert (found.share_of_peak, found.tokens_per_second) == pytest.approx((1.0, 20.0))
    half = program(f"%d = {DOT}").replace("f32[64,64]", "bf16[64,64]")
    assert predicted(half).seconds == pytest.approx(1.0)


def test_memory_counts_where_it_takes_longer():
    """Two operands and a result of 16384 bytes at 4096 bytes per second."""
    assert predicted(program(f"%d = {DOT}"), ROUND).seconds == pytest.approx(12.0)
    assert predicted(program("%t = f32[64,64]{1,0} add(%w, %w)"), ROUND).seconds == pytest.approx(12.0)


def test_only_the_slice_of_a_stack_counts():
    """A fusion that reads one layer of 100, and one that writes one: 2 x 256 bytes each, at 4096 bytes per second."""
    read = """\
%f (s: f32[100,64], i: s32[]) -> f32[64] {
  %s = f32[100,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %d = f32[1,64]{1,0} dynamic-slice(%s, %i, %i), dynamic_slice_sizes={1,64}
  ROOT %b = f32[64]{0} bitcast(%d)
}
"""
    write = """\
%g (s: f32[100,64], u: f32[1,64], i: s32[]) -> f32[100,64] {
  %s = f32[100,64]{1,0} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[100,64]{1,0} dynamic-update-slice(%s, %u, %i, %i)
}
"""
    given = ["%s = f32[100,64]{1,0} parameter(2)", "%i = s32[] parameter(3)", "%u = f32[1,64]{1,0} parameter(4)"]
    for more, line in (
        (read, "%r = f32[64]{0} fusion(%s, %i), kind=kLoop, calls=%f"),
        (write, "%r = f32[100,64]{1,0} fusion(%s, %u, %i), kind=kLoop, calls=%g"),
    ):
        assert predicted(program(*given, line, more=more), ROUND).seconds == pytest.approx(512 / 4096, rel=0.02)


def test_a_collective_waits_only_for_what_is_not_hidden():
    """3 s on the wire, 0.5 s of a product behind: 2.5 s exposed. Without a start of its own all 3 s are."""
    done = "%h = f32[1024]{0} all-gather-done(%g)"
    found = predicted(program(f"%g = {GATHER}", f"%d = {DOT}", done))
    assert (found.seconds, found.busy, found.exposed) == pytest.approx((3.0, 0.5, 2.5))
    (row,) = found.rows
    assert (row.kind, row.axes, row.wire, row.exposed) == ("all-gather", ("local",), 3.0, pytest.approx(2.5))
    (one,) = found.collectives
    assert one.exposed == pytest.approx(2.5)
    for line in (
        f"%g = f32[1024]{{0}} all-gather(%x), {INNER}, dimensions={{0}}",
        f'%g = {GATHER}, backend_config={{"is_sync":true}}',
    ):
        assert predicted(program(line, f"%d = {DOT}")).seconds == pytest.approx(3.5)
    assert jaxzero.collectives(program(line))[0].exposed is None


def test_networks_run_side_by_side_and_each_one_in_order():
    inside = f"%g = {GATHER}"
    across = f"%k = (f32[256]{{0}}, f32[512]{{0}}) all-gather-start(%x), {ACROSS}, dimensions={{0}}"
    ends = ["%h = f32[1024]{0} all-gather-done(%g)", "%l = f32[512]{0} all-gather-done(%k)"]
    assert predicted(program(inside, across, *ends)).seconds == pytest.approx(max(3.0, 1024 / 256))
    again = inside.replace("%g", "%k"), "%h = f32[1024]{0} all-gather-done(%g)", "%l = f32[1024]{0} all-gather-done(%k)"
    assert predicted(program(inside, *again)).seconds == pytest.approx(6.0)


LOOP = """\
%body (p: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %w = f32[64,64]{1,0} constant({...})
  %g = GATHER
  %d = DOT
  ROOT %h = f32[1024]{0} all-gather-done(%g)
}
""".replace("GATHER", GATHER).replace("DOT", DOT)


@pytest.mark.parametrize("times", [1, 2, 50])
def test_loops_take_their_trip_count(times):
    count = f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}'
    found = predicted(program(f"%l = f32[256] while(%x), condition=%c, body=%body, {count}", more=LOOP))
    assert (found.seconds, found.busy, found.exposed) == pytest.approx((3.0 * times, 0.5 * times, 2.5 * times))
    assert found.operations == times * 2 * 64**3
    assert found.collectives[0].exposed == pytest.approx(2.5 * times)


def test_of_branches_the_longest_counts():
    more = f"%one (p: f32[64,64]) -> f32[] {{\n  %w = f32[64,64]{{1,0}} parameter(0)\n  %d = {DOT}\n}}\n"
    two = more.replace("%one", "%two").replace("%d =", f"%e = {DOT}\n  %d =")
    line = "%c = f32[] conditional(%i, %w, %w), branch_computations={%one, %two}"
    assert predicted(program(line, more=more + two)).seconds == pytest.approx(1.0)


# --- networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "network", "seconds"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), INSIDE, 1.0),  # the link of each device
        (((0, 4), (1, 5), (2, 6), (3, 7)), OUTSIDE, 4.0),  # four groups share the cards of a node
        ((tuple(range(8)),), OUTSIDE, 1.0),  # one ring has all of them
        (((0, 1, 4, 5), (2, 3, 6, 7)), OUTSIDE, 2.0),
    ],
)
def test_groups_share_the_cards_of_a_node(groups, network, seconds):
    assert transfer(ROUND, groups, 1024) == (network, pytest.approx(seconds))
    slow = dataclasses.replace(ROUND, local_latency=1, network_latency=10)
    steps = {1.0: 3, 4.0: 10, 2.0: 2 + 10}[seconds] if len(groups) > 1 else 2 * 3 + 10
    assert transfer(slow, groups, 1024).seconds == pytest.approx(seconds + steps)


def test_a_torus_has_links_in_each_dimension():
    """Open dimensions carry data in one direction at a time, closed ones in both."""
    chips = jaxzero.machine("v5e:4x4", links_reach=1, local_latency=0)
    row, everything = ((0, 1, 2, 3),), (tuple(range(16)),)
    assert transfer(chips, row, 45e9).seconds == pytest.approx(1.0)
    assert transfer(chips, everything, 45e9).seconds == pytest.approx(0.5)
    closed = dataclasses.replace(chips, ring=4)
    assert transfer(closed, everything, 45e9).seconds == pytest.approx(0.25)


# --- machines ------------------------------------------------------------------------------------


def test_machines_are_those_of_topology():
    assert [jaxzero.machine(name).per_node for name in ("h100:4x8", "a100:2x4", "h200", "v5e:4x4")] == [8, 4, 8, 16]
    assert jaxzero.machine("h100:4x8").network == 400e9
    assert figures_of("network=1e9, links_reach=0.5") == {"network": 1e9, "links_reach": 0.5}


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: jaxzero.machine("h10"), "no known machine.*did you mean 'h100'"),
        (lambda: jaxzero.machine("h100", netwrk=1.0), "unknown figure 'netwrk'.*did you mean network="),
        (lambda: jaxzero.machine("h100", network=0.0), r"network=0.0. Expected a positive number. Fix"),
        (lambda: jaxzero.machine("h100", network=float("nan")), r"network=nan"),
        (lambda: figures_of("network"), "--figures network: expected NAME=NUMBER"),
        (lambda: jaxzero.predict("no program", "h100"), "predict: found a text that is no compiled program"),
        (lambda: jaxzero.predict(program(), "h100", AbstractMesh((2,), ("x",))), "predict: mesh is one of 2 devices"),
    ],
)
def test_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_prints_its_assumptions():
    text = str(predicted(program(f"%g = {GATHER}", "%h = f32[1024]{0} all-gather-done(%g)"), tokens=5))
    for word in ("predicted, not measured", "exposed", "share of peak", "tokens per second", "assumed: a collective"):
        assert word in text
