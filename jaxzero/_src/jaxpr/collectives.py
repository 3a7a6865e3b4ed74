"""The collectives of a traced program, read equation by equation: bytes sent, by mesh axes and kind.

Bytes are those that each device sends when a ring carries the collective: `(g-1)/g` of the full operand of a
gather or reduce-scatter over `g` devices, twice that for an all-reduce. An equation in a `scan` counts once per
iteration; in a `while_loop`, whose number of iterations is not known, once; each branch of a `cond` as if taken.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping

from jax.extend.core import JaxprEqn, Literal, Var

from . import primitives as p
from .calls import inner_programs, nbytes
from .compat import aval
from .trace import AnyJaxpr

GATHER, SCATTER, REDUCE, PERMUTE = "all-gather", "reduce-scatter", "all-reduce", "collective-permute"
EXCHANGE = "all-to-all"
_KINDS = {
    p.ALL_GATHER: GATHER,
    p.ALL_GATHER_INVARIANT: GATHER,
    p.REDUCE_SCATTER: SCATTER,
    p.PSUM: REDUCE,
    p.PSUM_INVARIANT: REDUCE,
    p.PMAX: REDUCE,
    p.PMIN: REDUCE,
    p.ALL_TO_ALL: EXCHANGE,
    p.PPERMUTE: PERMUTE,
}


@dataclasses.dataclass(frozen=True)
class Sent:
    """What each device sends in one step over some mesh axes, in collectives of one kind.

    Attributes:
      phase: ``"gradient"`` (forward and backward pass) or ``"update"`` (the optimizer).
      axes: The mesh axes, outer first.
      kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ...
      nbytes: Bytes that each device sends in all of them.
      calls: How many collectives there are; a compiler may join some.
    """

    phase: str
    axes: tuple[str, ...]
    kind: str
    nbytes: int
    calls: int


def total(phase: str, jaxpr: AnyJaxpr, sizes: Mapping[str, int]) -> tuple[Sent, ...]:
    """The collectives of an open program, joined by axes and kind.

    Args:
      phase: What the program is.
      jaxpr: The program; its collectives are over axes of `sizes`.
      sizes: Devices along each mesh axis, in the mesh's order.

    Returns:
      One entry for each pair of axes and kind, in order of first use; none for axes of one device.

    Examples:
      >>> import jax
      >>> program = jax.make_jaxpr(lambda x: jax.lax.psum(x, "data"), axis_env=[("data", 8)])(jax.numpy.ones(8))
      >>> total("update", program.jaxpr, {"data": 8})
      (Sent(phase='update', axes=('data',), kind='all-reduce', nbytes=56, calls=1),)
    """
    found: dict[tuple[tuple[str, ...], str], tuple[float, int]] = {}
    for axes, kind, size, times in _collectives(jaxpr, sizes, 1):
        before, calls = found.get((axes, kind), (0.0, 0))
        found[axes, kind] = before + times * size, calls + times
    return tuple(Sent(phase, *key, round(size), calls) for key, (size, calls) in found.items())


def _collectives(
    jaxpr: AnyJaxpr, sizes: Mapping[str, int], times: int
) -> Iterator[tuple[tuple[str, ...], str, float, int]]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _KINDS:
            over = set(p.collective_axes(eqn))
            axes = tuple(a for a in sizes if a in over and sizes[a] > 1)
            if axes:
                yield axes, _KINDS[name], _sent(_KINDS[name], eqn, math.prod(sizes[a] for a in axes)), times
            continue
        trip_count = times * eqn.params["length"] if name == p.SCAN else times
        for inner in inner_programs(eqn):
            yield from _collectives(inner, sizes, trip_count)


def _sent(kind: str, eqn: JaxprEqn, devices: int) -> float:
    full = _bytes(eqn.outvars if kind == GATHER else eqn.invars)
    if kind == PERMUTE:
        return full
    return full * (devices - 1) / devices * (2 if kind == REDUCE else 1)


def _bytes(atoms: Iterable[Var | Literal]) -> int:
    return sum(nbytes(aval(v).shape, aval(v).dtype) for v in atoms)
