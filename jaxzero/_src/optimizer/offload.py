"""Host offload: arrays that are stored in the host's memory, brought to the device and back segment by segment.

XLA starts every copy from the host as early as it can: then all of the state is on the device at once, and
nothing is saved. So a program is evaluated in segments, one for each group of leaves, and the copies of one segment
wait, in a barrier, until the results of the last segment but one are back on the host.

For example SGD with momentum over two leaves of 1 GB each, `bucket_bytes` of 4 MB: a group for each leaf, of its
parameter, its momentum (held on the host) and what becomes of both. Segment 0 fetches momentum 0, computes parameter 0
and momentum 0 and stores them; segment 1 does the same for leaf 1; a third leaf would be fetched behind a barrier with
what segment 0 stored. So at most `SEGMENTS_AHEAD` momenta are on the device at a time.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Var

from ..jaxpr.compat import Literal, literal_value
from ..jaxpr.flat import inlined
from ..jaxpr.needed import needed, variables
from ..jaxpr.trace import AnyJaxpr, JaxprPart
from ..partition.evaluate import evaluate
from ..partition.values import Context, Value
from ..sharding.host import on_host, to_device

#: How many segments may be on the device at once: one computes while the next is fetched.
SEGMENTS_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Held:
    """An input of a program that stays on the host until a segment needs it.

    Attributes:
      array: The array, on the host.
      load: From the array, on the device, to the value that the program takes.
    """

    array: jax.Array
    load: Callable[[jax.Array], Value]


@dataclasses.dataclass(frozen=True)
class LeafGroup:
    """Leaves that are fetched and stored together.

    Attributes:
      inputs: Positions of their arrays among the program's inputs, held or not.
      results: Positions of what becomes of them among its results.
    """

    inputs: list[int]
    results: list[int]


@dataclasses.dataclass(frozen=True)
class Segment:
    """The equations of a program that are evaluated for one group.

    Attributes:
      jaxpr: The equations; their inputs and results are variables of the whole program.
      loads: Held inputs that are first needed here.
      results: Positions of the program's results that are computed here.
    """

    jaxpr: JaxprPart
    loads: list[int]
    results: list[int]


def join(groups: Iterable[tuple[LeafGroup, int]], bucket_bytes: int | None) -> list[LeafGroup]:
    """Small groups, each given with its bytes, joined in order up to `bucket_bytes`; large ones alone."""
    out: list[LeafGroup] = []
    size = 0
    for group, nbytes in groups:
        if out and bucket_bytes is not None and size + nbytes <= bucket_bytes:
            out[-1] = LeafGroup(out[-1].inputs + group.inputs, out[-1].results + group.results)
            size += nbytes
        else:
            out.append(group)
            size = nbytes
    return out


def segments(jaxpr: AnyJaxpr, held: Sequence[int], groups: Sequence[LeafGroup]) -> list[Segment]:
    """Cuts a program: the segment of a group computes the results that need no held input of a later group.

    Its calls must be written out (`flat`). What depends on all groups, such as a norm of all updates, comes last.
    """
    needs = _needs(jaxpr, held)
    bit = {position: 1 << i for i, position in enumerate(held)}
    cutter = _Cutter(jaxpr, set(held))
    waiting: list[int] = []
    known = 0
    out = []
    for group in groups:
        known |= sum(bit.get(i, 0) for i in group.inputs)
        waiting += group.results
        ready = [r for r in waiting if not _mask(needs, jaxpr.outvars[r]) & ~known]
        waiting = [r for r in waiting if r not in set(ready)]
        out.append(cutter.segment(ready))
    assert not waiting, "a result in no group"
    return out


class _Cutter:
    """Takes the equations of a program, segment by segment; each is in the first segment that needs it."""

    def __init__(self, jaxpr: AnyJaxpr, held: set[int]) -> None:
        self.jaxpr, self.held = jaxpr, held
        self.positions = {v: i for i, v in enumerate(jaxpr.invars)}
        self.maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.readers: dict[Var, list[int]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for v in variables(eqn.invars):
                self.readers.setdefault(v, []).append(i)
        self.results = set(variables(jaxpr.outvars))
        self.made: set[int] = set()
        self.loaded: set[int] = set()

    def segment(self, results: list[int]) -> Segment:
        """The segment that computes these results."""
        jaxpr = self.jaxpr
        outs = variables(jaxpr.outvars[r] for r in results)
        numbers = self._not_made(outs)
        self.made.update(numbers)
        eqns = [jaxpr.eqns[i] for i in numbers]
        made_here = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
        read = dict.fromkeys([*(v for eqn in eqns for v in variables(eqn.invars)), *outs])
        invars = [v for v in read if v not in made_here]
        later = lambda v: any(i not in self.made for i in self.readers.get(v, ()))
        outvars = [v for v in made_here if v in self.results or later(v)]
        inputs = [self.positions[v] for v in invars if v in self.positions]
        loads = [i for i in inputs if i in self.held and i not in self.loaded]
        self.loaded.update(loads)
        return Segment(JaxprPart([], invars, [*outvars], eqns), loads, results)

    def _not_made(self, results: Iterable[Var]) -> list[int]:
        """The numbers of the equations that results need and that no segment before has, in order."""

        def reads(v: Var) -> list[Var]:
            i = self.maker.get(v)
            return [] if i is None or i in self.made else variables(self.jaxpr.eqns[i].invars)

        numbers = {self.maker[v] for v in needed(results, reads) if v in self.maker}
        return sorted(numbers - self.made)


def evaluate_by_group(
    ctx: Context,
    jaxpr: AnyJaxpr,
    consts: Sequence[jax.Array],
    inputs: Sequence[Value | Held],
    groups: Sequence[LeafGroup],
    store: Callable[[list[int], list[Value]], list[jax.Array]],
) -> dict[int, jax.Array]:
    """Evaluates a program on shares, segment by segment.

    Args:
      ctx: As for `partition.evaluate`.
      jaxpr: The program.
      consts: Its constants.
      inputs: Its inputs; `Held` ones are fetched where they are needed.
      groups: The leaves that are fetched and stored together, in order; all results that are wanted.
      store: Takes positions and values of results and returns the arrays to store.

    Returns:
      The stored arrays, by position.
    """
    held = [i for i, x in enumerate(inputs) if isinstance(x, Held)]
    jaxpr, env = flat(jaxpr, consts)
    env |= {v: x for v, x in zip(jaxpr.invars, inputs, strict=True) if not isinstance(x, Held)}
    read = lambda atom: literal_value(atom) if isinstance(atom, Literal) else env[atom]
    out: dict[int, jax.Array] = {}
    done: list[list[jax.Array]] = []
    for segment in segments(jaxpr, held, groups):
        loads = [(i, x) for i in segment.loads if isinstance(x := inputs[i], Held)]
        arrays = [x.array for _, x in loads]
        if arrays and len(done) >= SEGMENTS_AHEAD and done[-SEGMENTS_AHEAD]:
            arrays, _ = lax.optimization_barrier((arrays, done[-SEGMENTS_AHEAD]))
        for (i, x), array in zip(loads, arrays, strict=True):
            env[jaxpr.invars[i]] = x.load(to_device(array))
        values = evaluate(ctx, segment.jaxpr, [], [env[v] for v in segment.jaxpr.invars])
        env.update(zip(segment.jaxpr.outvars, values, strict=True))
        stored = store(segment.results, [read(jaxpr.outvars[r]) for r in segment.results])
        out.update(zip(segment.results, stored, strict=True))
        if segment.results:
            done.append([x for x in stored if on_host(x)])
    return out


def flat(jaxpr: AnyJaxpr, consts: Sequence[jax.Array]) -> tuple[JaxprPart, dict[Any, Any]]:
    """The program without inner calls, and its constants by variable."""
    eqns, outs, known = inlined(jaxpr, consts)
    variables_: list[Any] = list(known)
    return JaxprPart(variables_, jaxpr.invars, outs, eqns), dict(known)


def _mask(needs: dict[Var, int], atom: Var | Literal) -> int:
    return 0 if isinstance(atom, Literal) else needs.get(atom, 0)


def _needs(jaxpr: AnyJaxpr, held: Sequence[int]) -> dict[Var, int]:
    """Which held inputs each variable depends on, as the bits of a number."""
    needs = {jaxpr.invars[position]: 1 << i for i, position in enumerate(held)}
    for eqn in jaxpr.eqns:
        mask = 0
        for v in eqn.invars:
            mask |= _mask(needs, v)
        if mask:
            needs.update((v, mask) for v in eqn.outvars)
    return needs
