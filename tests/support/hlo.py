"""Collectives counted in compiled programs."""

import re
from typing import Any, NamedTuple

import checks
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxzero


class Row(NamedTuple):
    """One collective.

    Attributes:
      kind: What it is.
      nbytes: The bytes of its full operand (of a reduce-scatter: all shares together).
      group: How many devices take part in each group.
      times: How often it runs; loops around it multiply.
      looped: Whether it stands in a loop.
    """

    kind: str
    nbytes: int
    group: int = 8
    times: int = 1
    looped: bool = False


def collectives(text: str) -> list[Row]:
    """All collectives of an optimized HLO text, those in loops and branches too."""
    return [Row(x.kind, x.nbytes, len(x.groups[0]), x.times, x.looped) for x in jaxzero.collectives(text)]


def count(rows: list[Row], kind: str, above: int = -1) -> int:
    """How many collectives of a kind have more than `above` bytes."""
    return sum(row.kind == kind and row.nbytes > above for row in rows)


def nbytes(rows: list[Row], kind: str, *, group: int | None = None, looped: bool | None = None, above: int = -1) -> int:
    """Bytes of all collectives of a kind, each as often as it runs."""
    return sum(
        row.nbytes * row.times
        for row in rows
        if row.kind == kind
        and row.nbytes > above
        and (group is None or row.group == group)
        and (looped is None or row.looped == looped)
    )


def instructions(text: str) -> int:
    """Instructions of all computations of an HLO text."""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", text, re.M))


def reduced_dtypes(lowered: Any, minimum: int) -> set[str]:
    """Element types of the reductions of at least `minimum` elements in a lowered, not yet optimized program."""
    found = set()
    operand = re.compile(r"stablehlo\.(?:reduce_scatter|all_reduce)\"?.*?:\s*\(tensor<([^>]*)>", re.S)
    for signature in operand.findall(lowered.as_text()):
        *dims, dtype = signature.split("x")
        if np.prod([int(d) for d in dims]) >= minimum:
            found.add(dtype)
    return found


def step_collectives(
    zero: jaxzero.Zero, inner: optax.GradientTransformation, params: Any, way: str = "apply"
) -> list[Row]:
    """The collectives of one training step in the global view."""
    return collectives(compiled_step(zero, inner, params, way).as_text())


def compiled_step(zero: jaxzero.Zero, inner: optax.GradientTransformation, params: Any, way: str = "apply") -> Any:
    tx = zero.optimizer(inner)
    params = checks.place(params, zero.mesh, P())
    state = jax.jit(tx.init)(params)
    batch = checks.place((jnp.zeros(16), jnp.zeros(16)), zero.mesh, P(zero.mesh.axis_names))

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = zero.value_and_grad(checks.quadratic)(params, batch)
        if way == "apply":
            return *zero.apply(tx, grads, state, params), value
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()
