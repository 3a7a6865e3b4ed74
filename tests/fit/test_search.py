"""The search for settings, with a compiler that is a formula: what it finds, and how few compiles that takes."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from jax.sharding import AbstractMesh

import jaxzero
from jaxzero._src.fit.search import Known, Measured, Search
from jaxzero._src.fit.ways import Way, faster, group_sizes, smaller, start_ways

GB = 10**9
REST = {1: lambda g: 16 + 96 / g, 2: lambda g: 16 + 96 / g, 3: lambda g: 112 / g}
WIRE = {1: 3.0, 2: 2.0, 3: 3.0}


class Compiler:
    """A model of 8 B parameters: memory is what rests and temporaries, time the larger of computing and sending."""

    def __init__(self, temporaries=40, busy=1.0):
        self.temporaries, self.busy, self.tried = temporaries, busy, []

    def known(self, way):
        rest = REST[way.stage](way.group) * GB
        kept = {(): 1.0, ("state",): 0.2, ("state", "params"): 0.0}[way.offload]
        return Known(int(rest * kept), 0.1 * WIRE[way.stage] * way.group / 8)

    def compile(self, way):
        self.tried.append(way)
        known = self.known(way)
        temporaries = self.temporaries * (0.1 if way.remat else 1.0) + (way.prefetch if way.stage == 3 else 8)
        busy = self.busy * (1.3 if way.remat else 1.0)
        exposed = 0.3 * known.wire * (0.5 if way.prefetch == 4 else 1.0)
        return Measured(int(known.rest + temporaries * GB), busy + exposed, busy, repr(dataclasses.astuple(way)))


def search(compiler, budget, *, remat=(False, True), offload=False, machine="h100:4x8", devices=32, most=12):
    lines = []
    found = Search(compiler.known, compiler.compile, budget * GB, most, lines.append)
    trials = found.run(start_ways(jaxzero.machine(machine), devices, remat), remat=True in remat, offload=offload)
    assert len(lines) == len(compiler.tried) <= most
    assert all(x.fits == (x.found is not None and x.found.total <= budget * GB) for x in trials)
    return found.best, trials


@pytest.mark.parametrize("budget", [25, 40, 60, 80])
def test_no_slower_than_a_full_grid(budget):
    """Within 5 % of the best of all stages, groups, losses and numbers of gathers that run ahead."""
    best, _ = search(Compiler(), budget)
    grid = Compiler()
    every = itertools.product((8, 16, 32), (1, 2, 3), (False, True), (0, 1, 2, 4))
    ways = [Way(32, 8, group, stage, remat, prefetch=ahead) for group, stage, remat, ahead in every]
    fitting = [x.seconds for x in map(grid.compile, ways) if x.total <= budget * GB]
    assert best.found.seconds <= 1.05 * min(fitting)


def test_bytes_at_rest_and_temporaries_rule_out_without_a_compile():
    compiler = Compiler()
    best, trials = search(compiler, 25, remat=(False,))
    ruled = {(x.way.stage, x.way.group): x.why for x in trials if not x.found and x.way.prefetch == 2}
    assert "28 GB at rest" in ruled[2, 8]
    assert best is None  # 40 GB of activations
    assert len(compiler.tried) < 4


def test_stage_one_is_not_compiled_where_stage_two_sends_no_more():
    compiler = Compiler()
    search(compiler, 80)
    assert {way.stage for way in compiler.tried} == {2, 3}


def test_the_smallest_group_first():
    compiler = Compiler()
    best, _ = search(compiler, 80)
    assert (best.way.group, best.way.remat) == (8, False)
    groups = [way.group for way in compiler.tried if way == Way(32, 8, way.group, way.stage, way.remat)]
    assert groups == sorted(groups)


def test_the_slower_loss_is_not_compiled_in_larger_groups():
    """Activations that take longer to read than to compute again: without remat only in groups of 8."""
    compiler = Compiler()
    one = compiler.compile
    compiler.compile = lambda way: dataclasses.replace(
        found := one(way), seconds=found.seconds * (1.0 if way.remat else 2.0)
    )
    best, trials = search(compiler, 80)
    assert best.way.remat
    assert {way.group for way in compiler.tried if not way.remat} == {8}
    assert any(x.why == "in groups of 8 slower than with remat" for x in trials)


def test_what_saves_memory_is_tried_where_nothing_fits():
    best, _ = search(Compiler(temporaries=3), 5.5, remat=(False,), offload=True)
    assert (best.way.stage, best.way.prefetch, best.way.offload) == (3, 0, ("state",))
    assert search(Compiler(temporaries=3), 5.5, remat=(False,))[0] is None


def test_options_around_the_best_way():
    """Four gathers ahead hide half: found, and the constructor says so."""
    best, _ = search(Compiler(), 30)
    assert best.way.prefetch == 4
    assert "prefetch=4" in best.way.constructor


def test_the_same_program_counts_once():
    compiler = Compiler()
    one = compiler.compile
    compiler.compile = lambda way: dataclasses.replace(one(way), program=f"{way.stage} {way.group} {way.remat}")
    lines = []
    found = Search(compiler.known, compiler.compile, 80 * GB, 12, lines.append)
    trials = found.run(start_ways(jaxzero.machine("h100:4x8"), 32, (False,)), remat=False, offload=False)
    same = [x for x in trials if x.why.startswith("the same program as")]
    assert same
    assert len(lines) == len(compiler.tried) - len(same)


@pytest.mark.parametrize(
    ("machine", "devices", "sizes"),
    [
        ("h100:1x8", 8, [8]),
        ("h100:4x8", 32, [8, 16, 32]),
        ("a100:3x8", 24, [8, 24]),
        ("v5e:4x4", 16, [4, 16]),
        ("v5p:4x4x4", 64, [4, 16, 64]),
    ],
)
def test_groups_are_whole_nodes_or_rows(machine, devices, sizes):
    assert group_sizes(jaxzero.machine(machine), devices) == sizes


@pytest.mark.parametrize("way", [Way(32, 8, g, s) for g in (8, 16, 32) for s in (1, 2, 3)], ids=str)
def test_constructors_are_valid_and_name_the_way(way):
    """Every neighbour too: `Zero` accepts it, on a mesh of all devices."""
    for each in (way, *faster(way), *smaller(way, remat=True, offload=True)):
        zero = each.zero()
        assert zero.mesh.size == 32
        assert (zero.stage, zero.prefetch, zero.regather) == (each.stage, each.prefetch, each.regather)
        here = {"jaxzero": jaxzero, "jax": SimpleNamespace(make_mesh=AbstractMesh)}
        assert eval(each.constructor, here) == zero
