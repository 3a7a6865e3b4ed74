"""Every Optax optimizer, sharded, equals the unsharded run.

The names are discovered from Optax's namespaces, so a new one fails here until it is classified in
`optax_cases.py`. A short run gives every optimizer one cell of the grid (some a second) and visits every mesh, stage
and way to run; `-m slow` runs the whole product. Run as a script, this file writes `docs/optimizers.md`.
"""

import functools
import itertools
import pathlib
import sys

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_cases import CASES, EXCLUDED, GROUPS, Case, public_names

import jaxzero

STEPS, RTOL, ATOL = 6, 2e-5, 2e-6  # the tolerance of the acceptance script; two steps more, for radam's second branch
PAGE = pathlib.Path(__file__).parents[2] / "docs/optimizers.md"
BEGIN, END = "<!-- optimizers:begin -->", "<!-- optimizers:end -->"

REPLICAS = ("replica", "shard")
MESHES = (
    {n: ((n,), ("data",)) for n in (1, 2, 3, 5, 8)}
    | {f"{r}x{n}": ((r, n), REPLICAS) for r, n in ((2, 4), (4, 2), (8, 1), (1, 8))}
    | {"2x2x2": ((2, 2, 2), ("replica", "node", "local"))}
)
STAGES = (1, 2, 3)
GRID = list(itertools.product(MESHES, STAGES, checks.WAYS))
BATCHES = checks.quadratic_batches(STEPS)


def odd_tree(kind="odd"):
    """Nothing but "even" divides: 13 rows, a scalar, a 3-vector, a convolution kernel."""
    k = jax.random.split(jax.random.key(0), 5)
    tree = {
        "conv": jax.random.normal(k[0], (3, 3, 2, 4)) * 0.3,
        "emb": jax.random.normal(k[1], (13, 6)),
        "even": jax.random.normal(k[2], (40, 4)) * 0.2,
        "scale": jnp.float32(2.0),
        "tiny": jnp.array([0.5, -1.0, 2.0]),
    }
    if kind == "complex":
        tree["tiny"] = tree["tiny"] + 1j * jnp.array([1.0, 0.25, -0.5])
    if kind == "arrays":
        del tree["scale"]  # sm3 takes no scalars
    if kind == "matrix":
        return tree["emb"]  # scale_by_muon takes matrices only, and of trees only a bare array
    if kind == "lookahead":
        return optax.LookaheadParams(fast=tree, slow=jax.tree.map(jnp.copy, tree))
    return tree


def extra_arguments(case):
    """What `update` of this optimizer takes beyond gradients, state and parameters; functions see the whole batch."""

    def extra(value, grads, batch):
        every = dict(
            value=value,
            grad=grads,
            value_fn=lambda p: checks.quadratic(p, batch),
            obj_fn=lambda p: checks.quadratic(p, batch),
            grad_fn=lambda p, _: jax.grad(checks.quadratic)(p, batch),
        )
        return {name: every[name] for name in case.needs}

    return extra


def trained(params):
    return params.fast if isinstance(params, optax.LookaheadParams) else params


@functools.cache
def reference(key):
    """Parameters, state and losses of the unsharded run, on one device."""
    case = CASES[key]
    start = odd_tree(case.params)
    run = checks.reference(case.make(), start, checks.quadratic, BATCHES, extra=extra_arguments(case), trained=trained)
    moved = [jnp.max(jnp.abs(a - b)) for a, b in zip(jax.tree.leaves(run.params), jax.tree.leaves(start), strict=True)]
    assert max(moved) > 1e-4, "the unsharded optimizer does not move the parameters: nothing is compared"
    return run


def check(key, world, stage, way):
    case, want = CASES[key], reference(key)
    mesh = helpers.make_mesh(*MESHES[world])
    inside = mesh.axis_names[1:]
    options = dict(shard_axis=inside[0] if len(inside) == 1 else inside, replica_axis="replica") if inside else {}
    got = checks.train(
        jaxzero.Zero(mesh, stage=stage, **options),
        case.make(),
        odd_tree(case.params),
        checks.quadratic,
        BATCHES,
        way,
        extra=extra_arguments(case),
        trained=trained,
        grows=case.grows,
    )
    checks.assert_params_equal(got.params, want.params, RTOL, ATOL)
    checks.assert_state_equal(got.state, want.state, RTOL)
    np.testing.assert_allclose(got.losses, want.losses, rtol=RTOL)


def sampled():
    """A cell per row, in turn in the global view and inside.

    One row in nine runs on one device too.
    """
    outside, inside = ([c for c in GRID if c[0] != 1 and c[2].startswith("inside") == b] for b in (False, True))
    alone = [c for c in GRID if c[0] == 1]
    for i, key in enumerate(CASES):
        cells = outside if i % 2 else inside
        yield key, *cells[7 * (i // 2) % len(cells)]
        if i % 9 == 0:
            yield key, *alone[(i // 9) % len(alone)]


SAMPLED = list(sampled())


def test_every_public_name_is_classified():
    """A new Optax optimizer fails here until it has a row or a reason."""
    names = public_names()
    classified = {case.name for case in CASES.values()} | set(EXCLUDED)
    assert names - classified == set(), "new in Optax: add a row or a reason to tests/support/optax_cases.py"
    assert classified - names == set(), "no longer in Optax: remove from tests/support/optax_cases.py"
    assert not {case.name for case in CASES.values()} & set(EXCLUDED)
    assert len(CASES) == sum(map(len, GROUPS.values())), "two rows have one key"
    assert all(EXCLUDED.values())


def test_discovery_sees_more_than_annotations():
    """`dog` is not annotated, `nadam` is a partial, `MultiSteps` a class: the discovery must find them all."""
    assert {"optax.nadam", "contrib.dog", "optax.MultiSteps", "optax.scale_by_factored_rms"} <= public_names()


def test_sample_covers_every_case_mesh_stage_and_way():
    for position, values in enumerate((CASES, MESHES, STAGES, checks.WAYS)):
        assert {cell[position] for cell in SAMPLED} == set(values)
    assert {(c[1], c[2]) for c in SAMPLED} == set(itertools.product(MESHES, STAGES))
    assert {(c[2], c[3]) for c in SAMPLED} == set(itertools.product(STAGES, checks.WAYS))
    assert {(c[1], c[3]) for c in SAMPLED} == set(itertools.product(MESHES, checks.WAYS))


@pytest.mark.parametrize(("key", "world", "stage", "way"), SAMPLED)
def test_equals_unsharded(key, world, stage, way):
    check(key, world, stage, way)


@pytest.mark.slow
@pytest.mark.parametrize("key", CASES)
@pytest.mark.parametrize(("world", "stage", "way"), GRID)
def test_whole_product_equals_unsharded(key, world, stage, way):
    check(key, world, stage, way)


@pytest.mark.parametrize("expression", ["dpsgd", "differentially_private_aggregate"])
def test_per_example_gradients_are_refused(mesh8, expression):
    """The excluded optimizers are refused by name, not averaged into something else."""
    if expression == "dpsgd":
        with pytest.warns(DeprecationWarning, match="seed"):  # of Optax's own call
            made = optax.contrib.dpsgd(0.1, 1.0, 0.1, 0)
    else:
        made = optax.contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0))
    params = {"w": jnp.ones((16, 2))}
    tx = jaxzero.Zero(mesh8).optimizer(made)
    with pytest.raises(ValueError, match=r"(?s)w\b.*\(4, 16, 2\).*\(16, 2\)"):
        tx.update({"w": jnp.ones((4, 16, 2))}, tx.init(params), params)


def table():
    """The table: what is tested, as it is called, and what is left out."""
    lines = [
        f"{len(CASES)} rows, each equal to the unsharded run on worlds {', '.join(map(str, MESHES))}",
        "at stages 1, 2 and 3,",
    ]
    lines += ["in the global view and inside a user's own `shard_map`.", ""]
    for group, cases in GROUPS.items():
        lines += [f"| {group} | tested as | `update` also takes |", "|---|---|---|"]
        lines += [f"| {row_name(c)} | `{c.expression}` | {', '.join(f'`{n}`' for n in c.needs)} |" for c in cases]
        lines += [""]
    lines += ["Not in the table:", ""]
    lines += [f"- `{name}`: {reason}." for name, reason in EXCLUDED.items()]
    return "\n".join(lines)


def row_name(case: Case):
    name, _, variant = case.key.partition(", ")
    return f"`{name}`" + (f", {variant}" if variant else "")


def with_table(text):
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def test_table_is_up_to_date():
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1, f"the page needs one {BEGIN} and one {END}"
    assert text == with_table(text), "run: python tests/optimizer/test_optax_grid.py"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    sys.exit(0)
