"""Splits a program over very many leaves into independent parts, each for a manual region of its own.

The compiler's time for one manual region grows with the square of the arrays that enter and leave it
(2,000 leaves of Adam are 14,000 arrays and take minutes). The parts of an elementwise optimizer touch
each other only through scalars such as the step count, so each can have its own region; what they share
is evaluated in each. A few scalars that are made of all leaves, such as the norm to clip by, are made in a region
of their own before. Numbers and storage do not change; each part gathers its own results, so there are at most
`MOST` times as many buckets.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from ..jaxpr.compat import Literal, open_program
from ..jaxpr.trace import Jaxpr
from ..partition.elementwise import is_elementwise

#: Arrays in and out of a program up to which one region is compiled; those of a part; the most parts.
ONE_REGION, PART, MOST = 4096, 768, 20
#: The most scalars, made of leaves, that a program may be cut at.
SCALARS = 8

_LOCAL = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims"}


@dataclasses.dataclass(frozen=True)
class Part:
    """One independent part of a program.

    Attributes:
      jaxpr: The equations that its results need.
      consts: Positions of its constants among the whole program's.
      inputs: Positions of its inputs.
      outputs: Positions of its results.
    """

    jaxpr: Jaxpr
    consts: list[int]
    inputs: list[int]
    outputs: list[int]


def parts(jaxpr: Any, leafy: Sequence[bool]) -> list[Part]:
    """The parts of a program; one where it is small, not elementwise, or hangs together.

    Args:
      jaxpr: An open program.
      leafy: For each input, whether it belongs to a leaf; the others (counts, rates) may be shared.

    Returns:
      Parts that together give every result once, in the order of their first results.
    """
    count = _arrays(jaxpr)
    one = [_part(jaxpr, range(len(jaxpr.outvars)))]
    if count <= ONE_REGION or not _elementwise(jaxpr.eqns):
        return one
    groups = _components(jaxpr, leafy)
    size = max(PART * len(jaxpr.outvars) // count, -(-len(jaxpr.outvars) // MOST))
    if max(len(g) for g in groups) > size:
        return one
    bins: list[list[int]] = [[]]
    for group in groups:
        if bins[-1] and len(bins[-1]) + len(group) > size:
            bins.append([])
        bins[-1] += group
    return [_part(jaxpr, sorted(b)) for b in bins]


def scalars(jaxpr: Any, leafy: Sequence[bool]) -> tuple[Part, Jaxpr] | None:
    """Cuts a large program at the few scalars through which its leaves hang together.

    Args:
      jaxpr: An open program.
      leafy: As for `parts`.

    Returns:
      The part whose results are the scalars, and the program that takes them as further inputs; `None` if there
      are none, too many, or if making them takes more than elementwise equations and reductions.
    """
    if _arrays(jaxpr) <= ONE_REGION:
        return None
    depend = {v for v, leaf in zip(jaxpr.invars, leafy, strict=True) if leaf}
    made: dict[Any, list[Any]] = {}  # scalar -> the scalars among `made` that it is made of; none if it takes more
    for eqn in jaxpr.eqns:
        takes = [v for v in eqn.invars if not isinstance(v, Literal) and v in depend]
        depend.update(eqn.outvars if takes else ())
        if takes and not any(v.aval.shape for v in eqn.outvars):
            again = len(eqn.outvars) == 1 and all(v in made for v in takes)
            made.update((v, takes if again else []) for v in eqn.outvars)
    read = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if read.intersection(eqn.outvars) and made.keys().isdisjoint(eqn.outvars):
            read.update(v for v in eqn.invars if not isinstance(v, Literal))
    cut = [v for v in made if v in read]
    for _ in range(SCALARS):
        if len(cut) > SCALARS:  # what each leaf makes of a few, such as casts of the norm, is made in every part
            cut = list(dict.fromkeys(u for v in cut for u in made[v] or [v]))
    first = _part(Jaxpr(jaxpr.constvars, jaxpr.invars, cut, jaxpr.eqns), range(len(cut)))
    if not 0 < len(cut) <= SCALARS or not _elementwise(first.jaxpr.eqns, reductions=True):
        return None
    others = [eqn for eqn in jaxpr.eqns if not set(cut).intersection(eqn.outvars)]
    rest = Jaxpr(jaxpr.constvars, [*jaxpr.invars, *cut], jaxpr.outvars, others)
    needed = _part(rest, range(len(jaxpr.outvars))).jaxpr.eqns
    return first, dataclasses.replace(rest, eqns=needed)


def _arrays(jaxpr: Any) -> int:
    return len(jaxpr.invars) + len(jaxpr.outvars)


def _elementwise(eqns: Iterable[Any], reductions: bool = False) -> bool:
    """Whether no equation mixes elements, other than into scalars, so that no result can come out gathered."""
    for eqn in eqns:
        name = eqn.primitive.name
        if name in ("jit", "pjit"):
            if not _elementwise(open_program(eqn.params["jaxpr"])[0].eqns, reductions):
                return False
        elif reductions and name.startswith("reduce_") and not any(v.aval.shape for v in eqn.outvars):
            continue
        elif reductions and name == "concatenate" and all(v.aval.size == 1 for v in eqn.invars):
            continue  # scalars of all leaves, to be reduced together
        elif not (name in _LOCAL or is_elementwise(eqn)):
            return False
    return True


def _components(jaxpr: Any, leafy: Sequence[bool]) -> list[list[int]]:
    """Results grouped by the leaves that they depend on, directly or through one another."""
    parent: dict[Any, Any] = {v: v for v, leaf in zip(jaxpr.invars, leafy, strict=True) if leaf}

    def root(v: Any) -> Any:
        while parent[v] is not v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for eqn in jaxpr.eqns:
        known = [v for v in eqn.invars if not isinstance(v, Literal) and v in parent]
        for v in known[1:]:
            parent[root(v)] = root(known[0])
        for v in eqn.outvars if known else ():
            parent[v] = known[0]
    groups: dict[Any, list[int]] = {}
    for i, v in enumerate(jaxpr.outvars):
        alone = isinstance(v, Literal) or v not in parent
        groups.setdefault(i if alone else root(v), []).append(i)
    return list(groups.values())


def _part(jaxpr: Any, outputs: Iterable[int]) -> Part:
    """The equations, inputs and constants that some results need."""
    outputs = list(outputs)
    outvars = [jaxpr.outvars[i] for i in outputs]
    needed = {v for v in outvars if not isinstance(v, Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            eqns.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    inputs = [i for i, v in enumerate(jaxpr.invars) if v in needed]
    consts = [i for i, v in enumerate(jaxpr.constvars) if v in needed]
    own = Jaxpr([jaxpr.constvars[i] for i in consts], [jaxpr.invars[i] for i in inputs], outvars, eqns[::-1])
    return Part(own, consts, inputs, outputs)
