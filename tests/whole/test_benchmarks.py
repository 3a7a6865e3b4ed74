"""The traffic table, and the cost model of MiCS."""

import argparse
import re

import formulas
import mics_model
import pytest
import traffic
from formulas import GATHER, REDUCE, SCATTER

pytestmark = pytest.mark.grid(5)

M, N, P, R, K, S = 3e9, 64, 16, 4, 8, 5

#: Bytes per device and step as the papers' table has them: all-gather, reduce-scatter, all-reduce.
TABLE = {
    "replicated": (formulas.replicated(M, N), 0, 0, 2 * M * (N - 1) / N),
    "ZeRO-1": (formulas.zero1(M, N), M * (N - 1) / N, 0, 2 * M * (N - 1) / N),
    "ZeRO-2": (formulas.zero2(M, N, S), M * (N - 1) / N, S * M * (N - 1) / N, 0),
    "ZeRO-3": (formulas.zero3(M, N, S), 2 * S * M * (N - 1) / N, S * M * (N - 1) / N, 0),
    "MiCS": (formulas.mics(M, P, R, S), 2 * S * M * (P - 1) / P, S * M * (P - 1) / P, 2 * (M / P) * (R - 1) / R),
    "MiCS in hops": (
        formulas.mics_hierarchical(M, P, R, K, S),
        2 * S * M * (P - 1) / P,
        S * M * (P - 1) / P,
        2 * (M / P) * (R - 1) / R,
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_formulas_are_those_of_the_table(name):
    rows, *want = TABLE[name]
    assert [formulas.total(rows, kind) for kind in (GATHER, SCATTER, REDUCE)] == pytest.approx(want)


@pytest.mark.parametrize("name", TABLE)
def test_printed_formulas_are_the_ones_computed(name):
    values = dict(M=M, n=N, p=P, r=R, k=K, e=P // K, s=S)
    for row in TABLE[name][0]:
        text = re.sub(r"(?<=[\w)])(?=[A-Za-z(])", "*", row.formula)
        assert eval(text, values) == pytest.approx(row.nbytes)


def test_bytes_into_a_node():
    """Two nodes of 8: 46.6 % less; and the hop between nodes is what the devices of a node send together."""
    flat, hops = (formulas.into_a_node(M, 16, 8, h) for h in (False, True))
    assert 1 - hops / flat == pytest.approx(0.4667, abs=1e-4)
    across = next(r for r in formulas.mics_hierarchical(M, 16, 1, 8) if (r.axis, r.kind) == ("node", GATHER))
    assert 8 * across.nbytes / 2 == hops  # gathered forward and backward


# --- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", traffic.schedules(), ids=lambda s: s.name)
def test_counts_are_as_promised(schedule):
    rows = traffic.rows(schedule)
    assert [row for row in rows if not row.ok] == []
    assert len(rows) == len(schedule.formula)


def test_a_count_that_nobody_promised_shows():
    schedule = traffic.schedules()[1]._replace(formula=formulas.zero2(traffic.M, 8))
    assert [(row.kind, row.ok) for row in traffic.rows(schedule)] == [
        ("all-gather", True),
        ("reduce-scatter", False),
        ("all-reduce", False),
    ]


def test_table_of_traffic(monkeypatch, capsys):
    some = traffic.schedules()[1:2]
    monkeypatch.setattr(traffic, "schedules", lambda: some)
    assert traffic.main() == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("schedule", "axis", "promised", "counted", "M(n-1)/n", "2 of 2 within 1 %"))
    monkeypatch.setattr(traffic, "schedules", lambda: [some[0]._replace(formula=[])])
    assert traffic.main() == 1
    assert "off by more than 1 %" in capsys.readouterr().out


# --- the model -----------------------------------------------------------------------------------


def given(*arguments: str) -> argparse.Namespace:
    return mics_model.assumptions(arguments)


def test_output_says_that_it_is_a_model_and_has_its_columns(capsys):
    assert mics_model.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("THIS IS A MODEL")
    for word in ("network", "model", "GPUs", "p", "ZeRO-3 s/step", "MiCS s/step", "speed-up", "weak scaling %"):
        assert word in mics_model.COLUMNS
    assert mics_model.COLUMNS in out
    table = [text for text in out.splitlines() if re.match(r"\d+ Gb/s", text)]
    assert len(table) == len(mics_model.rows(given()))
    assert {len(text) for text in table} == {len(mics_model.COLUMNS)}
    assert re.search(r"published: speed-up .* 2\.89", out)
    assert re.search(r"published: weak scaling, 512 GPUs +99\.4%", out)
    assert re.search(r"model: +speed-up", out)
    assert all(f"  {name.replace('_', '-')} " in out for name in vars(given()))


def test_models_have_the_sizes_in_their_names():
    for model in mics_model.MODELS:
        assert model.parameters / 1e9 == pytest.approx(int(model.name[:-1]), rel=0.02)


def test_groups_hold_the_state():
    for cluster in mics_model.CLUSTERS:
        for model in mics_model.MODELS:
            p = mics_model.group(model, cluster, given())
            assert p % 8 == 0
            assert 16 * model.parameters / p <= 0.7 * cluster.memory < 16 * model.parameters / (p / 2) or p == 8


def test_time_is_bytes_over_speed_plus_latency():
    """By hand, for 10 B parameters on 64 GPUs of 8: groups of 8 stay in their node."""
    cluster, model = mics_model.CLUSTERS[0], mics_model.MODELS[0]
    options = given("--links", "1", "--micro-steps", "2", "--latency-network", "1e-3", "--latency-local", "1e-4")
    M = 2 * model.parameters
    zero3 = mics_model.zero3_time(model, cluster, 64, options)
    assert zero3.micro == pytest.approx(3 * 2 * M * 63 / 64 / 12.5e9 + 3 * 2 * 127 * 63 * 1e-3)
    mics = mics_model.mics_time(model, cluster, 64, options)
    assert mics.micro == pytest.approx(3 * 2 * M * 7 / 8 / 150e9 + 3 * 2 * 127 * 7 * 1e-4)
    assert mics.boundary == pytest.approx(8 * 2 * (M / 8) * 7 / 8 / 12.5e9 + 127 * 2 * 7 * 1e-3)
    assert zero3.compute == mics.compute == pytest.approx(8 * model.parameters * 4096 * 2 / 62.5e12)
    assert mics.exposed == mics.compute + mics.micro + mics.boundary
    assert mics.hidden == max(mics.compute, mics.micro) + mics.boundary


def test_hops_carry_the_bytes_into_a_node():
    """15 B parameters on 100 Gb/s: two nodes of 8 in a group."""
    cluster, model = mics_model.CLUSTERS[0], mics_model.MODELS[1]
    options = given("--links", "1", "--micro-steps", "1", "--latency-network", "0", "--latency-local", "0")
    assert mics_model.group(model, cluster, options) == 16
    M = 2 * model.parameters
    got = mics_model.mics_time(model, cluster, 16, options)
    assert got.micro == pytest.approx(3 * (formulas.into_a_node(M, 16, 8, True) / 12.5e9 + M * 7 / 8 / 150e9))
    assert got.boundary == 0


def test_on_free_links_both_are_one():
    free = given("--links", "1e12", "--latency-network", "0", "--latency-local", "0")
    for row in mics_model.rows(free):
        assert (*row.speed_up, *row.scaling) == pytest.approx((1.0,) * 4)


def test_more_devices_never_scale_better_and_favour_small_groups():
    table = mics_model.rows(given())
    for before, after in zip(table, table[1:], strict=False):
        if (before.network, before.model) == (after.network, after.model):
            assert before.devices < after.devices
            assert all(a <= b for a, b in zip(after.scaling, before.scaling, strict=True))
            assert after.speed_up[0] > before.speed_up[0]
