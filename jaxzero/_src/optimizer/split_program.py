"""Splits a program over very many leaves into independent parts, each for a manual region of its own.

The compiler's time for one manual region grows with the square of the arrays that enter and leave it (2,000 leaves of
Adam are 14,000 arrays and take minutes; seen with jax 0.10.2 and 0.12.0.1, where one region of elementwise equations
takes 6 s and 5 s of CPU time for 2,000 arrays, 25 s and 16 s for 4,000). This file can go when the time grows with the
number of arrays. The programs of an elementwise optimizer's leaves share only scalars such as
the step count, so they can be compiled apart; what they share is computed in each part. A few scalars that are computed
from all leaves, such as the norm to clip by, get a region of their own before. Numbers and storage do not change; each
part gathers its own results, so there are at most `MOST` times as many buckets.

For example `scale_by_adam` after `clip_by_global_norm` over 2,000 leaves of f32[8, 4]: inputs are 2,000 gradients, an
int32[] count, 2,000 each of `mu` and `nu`, and 2,000 parameters; results are 2,000 parameters, the count, `mu`, `nu`.

    cut_at_scalars   (2,000 gradients) -> f32[], the norm; the rest takes it as one more input
    _components      unites the results that depend on a common leaf: 2,000 groups of 3 (new parameter, `mu`, `nu`),
                     and the count, which depends on no leaf, alone
    independent_parts  packs groups into parts of about `ARRAYS` arrays: 19 parts of at most 109 leaves;
                     each computes `count + 1` and the bias corrections for itself, from the count it takes
"""

import dataclasses
from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn, Var

from ..jaxpr import primitives as p
from ..jaxpr.calls import called_program
from ..jaxpr.compat import Literal, aval
from ..jaxpr.needed import needed, needed_equations, variables
from ..jaxpr.trace import AnyJaxpr, JaxprPart
from ..partition.elementwise import is_elementwise

#: Arrays in and out of a program up to which one region is compiled; those of a part; the most parts.
ONE_REGION, ARRAYS, MOST = 4096, 768, 20
#: The most scalars, computed from leaves, that a program may be cut at.
SCALARS = 8

_RELABELLING = {p.BROADCAST, p.RESHAPE, p.SQUEEZE}


@dataclasses.dataclass(frozen=True)
class IndependentPart:
    """A part of a program that needs no result of another part.

    Attributes:
      jaxpr: The equations that its results need.
      consts: Positions of its constants among the whole program's.
      inputs: Positions of its inputs.
      outputs: Positions of its results.
    """

    jaxpr: JaxprPart
    consts: list[int]
    inputs: list[int]
    outputs: list[int]


def independent_parts(jaxpr: AnyJaxpr, of_leaf: Sequence[bool]) -> list[IndependentPart]:
    """The parts of a program; one where it is small, not elementwise, or where all leaves depend on each other.

    Args:
      jaxpr: An open program.
      of_leaf: For each input, whether it belongs to a leaf; the others (counts, rates) may be shared.

    Returns:
      Parts that together give every result once, in the order of their first results.
    """
    count = _arrays(jaxpr)
    one = [_part(jaxpr, range(len(jaxpr.outvars)))]
    if count <= ONE_REGION or not _elementwise(jaxpr.eqns):
        return one
    groups = _components(jaxpr, of_leaf)
    size = max(ARRAYS * len(jaxpr.outvars) // count, -(-len(jaxpr.outvars) // MOST))
    if max(len(g) for g in groups) > size:
        return one
    bins: list[list[int]] = [[]]
    for group in groups:
        if bins[-1] and len(bins[-1]) + len(group) > size:
            bins.append([])
        bins[-1] += group
    return [_part(jaxpr, sorted(b)) for b in bins]


def cut_at_scalars(jaxpr: AnyJaxpr, of_leaf: Sequence[bool]) -> tuple[IndependentPart, JaxprPart] | None:
    """Cuts a large program at the few scalars through which its leaves depend on each other.

    Args:
      jaxpr: An open program.
      of_leaf: As for `independent_parts`.

    Returns:
      The part whose results are the scalars, and the program that takes them as further inputs; `None` if there
      are none, too many, or if computing them takes more than elementwise equations and reductions.
    """
    if _arrays(jaxpr) <= ONE_REGION:
        return None
    scalars = _scalars_of_leaves(jaxpr, of_leaf)
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    behind = lambda v: variables(maker[v].invars) if v in maker and v not in scalars else ()
    read = needed(variables(jaxpr.outvars), behind)
    cut = [v for v in scalars if v in read]
    for _ in range(SCALARS):
        if len(cut) > SCALARS:  # what leaves compute from a few, such as casts of the norm, each part computes
            cut = list(dict.fromkeys(u for v in cut for u in scalars[v] or [v]))
    first = _part(JaxprPart(jaxpr.constvars, jaxpr.invars, [*cut], jaxpr.eqns), range(len(cut)))
    if not 0 < len(cut) <= SCALARS or not _elementwise(first.jaxpr.eqns, reductions=True):
        return None
    others = [eqn for eqn in jaxpr.eqns if not set(cut).intersection(eqn.outvars)]
    eqns, _ = needed_equations(others, jaxpr.outvars)
    return first, JaxprPart(jaxpr.constvars, [*jaxpr.invars, *cut], jaxpr.outvars, eqns)


def _scalars_of_leaves(jaxpr: AnyJaxpr, of_leaf: Sequence[bool]) -> dict[Var, list[Var]]:
    """The scalars that are computed from leaves; of each the scalars among them that it takes, if it takes no more."""
    depend = {v for v, leaf in zip(jaxpr.invars, of_leaf, strict=True) if leaf}
    found: dict[Var, list[Var]] = {}
    for eqn in jaxpr.eqns:
        takes = [v for v in variables(eqn.invars) if v in depend]
        depend.update(eqn.outvars if takes else ())
        if takes and not any(aval(v).shape for v in eqn.outvars):
            again = len(eqn.outvars) == 1 and all(v in found for v in takes)
            found.update((v, takes if again else []) for v in eqn.outvars)
    return found


def _arrays(jaxpr: AnyJaxpr) -> int:
    return len(jaxpr.invars) + len(jaxpr.outvars)


def _elementwise(eqns: Iterable[JaxprEqn], reductions: bool = False) -> bool:
    """Whether no equation mixes elements, other than into scalars, so that no result can come out gathered."""
    for eqn in eqns:
        name = eqn.primitive.name
        called = called_program(eqn) if name == p.JIT else None
        if called is not None:
            if not _elementwise(called[0].eqns, reductions):
                return False
        elif reductions and name in p.REDUCTIONS and not any(aval(v).shape for v in eqn.outvars):
            continue
        elif reductions and name == p.CONCATENATE and all(aval(v).size == 1 for v in eqn.invars):
            continue  # scalars of all leaves, to be reduced together
        elif not (name in _RELABELLING or is_elementwise(eqn)):
            return False
    return True


def _components(jaxpr: AnyJaxpr, of_leaf: Sequence[bool]) -> list[list[int]]:
    """Results grouped by the leaves that they depend on, directly or through one another."""
    parent = {v: v for v, leaf in zip(jaxpr.invars, of_leaf, strict=True) if leaf}

    def root(v: Var) -> Var:
        while parent[v] is not v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for eqn in jaxpr.eqns:
        known = [v for v in variables(eqn.invars) if v in parent]
        for v in known[1:]:
            parent[root(v)] = root(known[0])
        parent.update(dict.fromkeys(eqn.outvars, known[0]) if known else {})
    groups: dict[Var | int, list[int]] = {}
    for i, result in enumerate(jaxpr.outvars):
        group = i if isinstance(result, Literal) or result not in parent else root(result)
        groups.setdefault(group, []).append(i)
    return list(groups.values())


def _part(jaxpr: AnyJaxpr, outputs: Iterable[int]) -> IndependentPart:
    """The equations, inputs and constants that some results need."""
    outputs = list(outputs)
    outvars = [jaxpr.outvars[i] for i in outputs]
    eqns, found = needed_equations(jaxpr.eqns, outvars)
    inputs = [i for i, v in enumerate(jaxpr.invars) if v in found]
    consts = [i for i, v in enumerate(jaxpr.constvars) if v in found]
    own = JaxprPart([jaxpr.constvars[i] for i in consts], [jaxpr.invars[i] for i in inputs], outvars, eqns)
    return IndependentPart(own, consts, inputs, outputs)
