"""The grid: every row of `optax_cases` on every mesh, at every stage, in every way, beside its unsharded run."""

import functools
import itertools
from typing import Any

import checks
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax_cases import CASES

import jaxzero

STEPS, RTOL, ATOL = 6, 2e-5, 2e-6  # the tolerance of the acceptance script; two steps more, for radam's second branch
BATCHES = checks.quadratic_batches(STEPS)
REPLICAS = ("replica", "shard")
MESHES = (
    {str(n): ((n,), ("data",)) for n in (1, 2, 3, 5, 8)}
    | {f"{r}x{n}": ((r, n), REPLICAS) for r, n in ((2, 4), (4, 2), (8, 1), (1, 8))}
    | {"2x2x2": ((2, 2, 2), ("replica", "node", "local"))}
)
STAGES = (1, 2, 3)
#: The whole product, and how `make grid` goes through it: each pass takes every mesh and stage, in another way.
CELLS = list(itertools.product(MESHES, STAGES, checks.WAYS))
PASS = len(MESHES) * len(STAGES)
GRID = [
    (mesh, stage, checks.WAYS[(i + turn) % len(checks.WAYS)])
    for turn in range(len(checks.WAYS))
    for i, (mesh, stage) in enumerate(itertools.product(MESHES, STAGES))
]


def odd_tree(kind="odd"):
    """Every layout on some mesh: rows and flat with padding, of an array and of each layer; a scalar; a 3-vector."""
    k = jax.random.split(jax.random.key(0), 5)
    tree = {
        "conv": jax.random.normal(k[0], (3, 3, 2, 4)) * 0.3,
        "emb": jax.random.normal(k[1], (13, 6)),
        "even": jax.random.normal(k[2], (40, 4)) * 0.2,
        "layers": jax.random.normal(k[3], (2, 6, 4)) * 0.3,
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


def stacked(path):
    return "layers" in jax.tree_util.keystr(path)


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
    """One cell: asserts that parameters, state and losses after `STEPS` steps are those of the unsharded run."""
    case, want = CASES[key], reference(key)
    mesh = helpers.make_mesh(*MESHES[world])
    inside = mesh.axis_names[1:]
    options: dict[str, Any] = (
        dict(shard_axis=inside[0] if len(inside) == 1 else inside, replica_axis="replica") if inside else {}
    )
    got = checks.train(
        jaxzero.Zero(mesh, stage=stage, stacked=stacked, **options),
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
