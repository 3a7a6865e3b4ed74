"""Which equations of a program belong to one leaf alone, and after how many exchanges between leaves they come.

Two values belong together if an equation mixes them as arrays: gradient, moments and parameter of a leaf do, a
concatenation of leaves makes them one. Scalars do not tie leaves together (the step count, a norm to clip by), but they
have an order: what reads a scalar that other leaves had a part in comes one *level* after them. So the equations of
different leaves on one level never need one another, whatever stands between.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ..jaxpr.compat import Literal

#: A leaf, by the number of its first value, and a level.
Place = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Apart:
    """The result of `apart`.

    Attributes:
      places: For each equation its place; `None` for one that belongs to no leaf, or to several.
      arrays: For each equation whether it reads arrays of its leaf, and not only scalars.
      held: The variables that hold arrays of leaves.
    """

    places: list[Place | None]
    arrays: list[bool]
    held: Collection[Any]


def apart(eqns: Sequence[Any], inputs: Iterable[Any]) -> Apart:
    """Finds leaf and level of each equation.

    Args:
      eqns: Equations in order, without inner calls.
      inputs: The variables that hold a part of a leaf each; all others are equal on all devices.

    Returns:
      The places of the equations.
    """
    node: dict[Any, int] = {v: i for i, v in enumerate(inputs)}
    parent = list(range(len(node)))
    scalars: dict[Any, frozenset[int]] = {}
    root = _root_of(parent)
    for eqn in eqns:
        arrays = [node[v] for v in _variables(eqn) if v in node]
        for other in arrays[1:]:
            parent[root(other)] = root(arrays[0])
        made_of = frozenset(arrays[:1]).union(*(scalars.get(v, ()) for v in _variables(eqn) if not arrays))
        for v in eqn.outvars:
            if arrays and v.aval.size > 1:
                node[v] = arrays[0]
            elif made_of:
                scalars[v] = made_of
    return _levels(eqns, {v: root(i) for v, i in node.items()}, {v: {*map(root, s)} for v, s in scalars.items()})


def _levels(eqns: Sequence[Any], leaf: Mapping[Any, int], scalars: Mapping[Any, set[int]]) -> Apart:
    levels: dict[Any, int] = {}
    found = Apart([], [], leaf.keys())
    for eqn in eqns:
        arrays = [v for v in _variables(eqn) if v in leaf]
        others = [v for v in _variables(eqn) if v in scalars]
        own = {leaf[arrays[0]]} if arrays else set().union(*(scalars[v] for v in others))
        after = [levels[v] + (bool(arrays) and not scalars[v] <= own) for v in others]
        level = max([*(levels.get(v, 0) for v in arrays), *after], default=0)
        levels.update((v, level) for v in eqn.outvars if v in leaf or v in scalars)
        found.places.append((min(own), level) if len(own) == 1 else None)
        found.arrays.append(bool(arrays))
    return found


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _root_of(parent: list[int]) -> Callable[[int], int]:
    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    return root


def between(eqns: Sequence[Any], places: Sequence[Place | None], chosen: set[int]) -> dict[Place, list[int]]:
    """For each place with chosen equations, these and all that stand on a way from one of them to another.

    Args:
      eqns: Equations in order.
      places: Their places.
      chosen: Numbers of equations.

    Returns:
      Numbers of equations by place, in order. No way leads out of such a group and back into it.
    """
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    before = [[maker[v] for v in _variables(eqn) if v in maker] for eqn in eqns]
    after, towards = set(), set(chosen)
    for i in range(len(eqns)):
        if i in chosen or any(j in after and places[j] == places[i] for j in before[i]):
            after.add(i)
    for i in reversed(range(len(eqns))):
        if i in towards:
            towards.update(j for j in before[i] if places[j] == places[i])
    groups: dict[Place, list[int]] = {}
    for i in sorted(after & towards):
        place = places[i]
        if place is not None:
            groups.setdefault(place, []).append(i)
    return groups
