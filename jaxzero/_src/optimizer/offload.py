"""Host offload: what is at rest in the host's memory, and its way to the device and back, bucket by bucket.

XLA starts every copy from the host as early as it can: then all of the state is on the device at once, and
nothing is saved. So a program is evaluated in stages, one for each bucket of leaves, and the copies of one stage
wait, in a barrier, until the results of the last stage but one are back on the host.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax

from ..jaxpr.compat import Literal
from ..jaxpr.flat import inlined
from ..jaxpr.trace import Jaxpr
from ..partition import evaluate as partition_evaluate
from ..partition.values import Context
from ..sharding.host import on_host, to_device

#: How many stages may be on the device at once: one computes while the next is fetched.
STAGES = 2


@dataclasses.dataclass(frozen=True)
class Held:
    """An input of a program that stays where it is until a stage needs it.

    Attributes:
      array: The array, on the host.
      load: From the array, on the device, to the value that the program takes.
    """

    array: Any
    load: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that travel together.

    Attributes:
      inputs: Positions of their arrays among the program's inputs, held or not.
      results: Positions of what becomes of them among its results.
    """

    inputs: list[int]
    results: list[int]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a program.

    Attributes:
      jaxpr: Its equations; its inputs and results are variables of the whole program.
      loads: Held inputs that are first needed here.
      results: Positions of the program's results that are known after it.
    """

    jaxpr: Jaxpr
    loads: list[int]
    results: list[int]


def join(groups: Iterable[tuple[Bucket, int]], bucket_bytes: int | None) -> list[Bucket]:
    """Small groups, each with its bytes, joined in order to buckets; large ones alone."""
    out: list[Bucket] = []
    size = 0
    for group, nbytes in groups:
        if out and bucket_bytes is not None and size + nbytes <= bucket_bytes:
            out[-1] = Bucket(out[-1].inputs + group.inputs, out[-1].results + group.results)
            size += nbytes
        else:
            out.append(group)
            size = nbytes
    return out


def stages(jaxpr: Any, held: Sequence[int], buckets: Sequence[Bucket]) -> list[Stage]:
    """Cuts a program: after each bucket's stage stand the results that need no later bucket's inputs.

    Its calls must be written out (`flat`). What depends on all buckets, such as a norm of all updates, comes last.
    """
    needs = _needs(jaxpr, held)
    bit = {position: 1 << i for i, position in enumerate(held)}
    maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    readers: dict[Any, list[int]] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        for v in _variables(eqn.invars):
            readers.setdefault(v, []).append(i)
    positions = {v: i for i, v in enumerate(jaxpr.invars)}
    made: set[int] = set()
    loaded: set[int] = set()
    waiting, known, out = [], 0, []
    kept = set(_variables(jaxpr.outvars))
    for bucket in buckets:
        known |= sum(bit.get(i, 0) for i in bucket.inputs)
        waiting += bucket.results
        ready = [r for r in waiting if not _mask(needs, jaxpr.outvars[r]) & ~known]
        waiting = [r for r in waiting if r not in set(ready)]
        eqns = _ancestors(jaxpr, maker, [jaxpr.outvars[r] for r in ready], made)
        made.update(eqns)
        here = {v for i in eqns for v in jaxpr.eqns[i].outvars}
        read = {v: None for i in eqns for v in _variables(jaxpr.eqns[i].invars)}
        read |= {v: None for r in ready for v in _variables([jaxpr.outvars[r]])}
        invars = [v for v in read if v not in here]
        outvars = [v for v in here if v in kept or any(i not in made for i in readers.get(v, ()))]
        loads = [positions[v] for v in invars if positions.get(v) in bit and positions[v] not in loaded]
        loaded.update(loads)
        out.append(Stage(Jaxpr([], invars, outvars, [jaxpr.eqns[i] for i in eqns]), loads, ready))
    assert not waiting, "a result in no bucket"
    return out


def evaluate(
    ctx: Context,
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    buckets: Sequence[Bucket],
    store: Callable[[list[int], list[Any]], list[Any]],
) -> dict[int, Any]:
    """Evaluates a program on shares, stage by stage.

    Args:
      ctx: As for `partition.run`.
      jaxpr: The program.
      consts: Its constants.
      inputs: Its inputs; `Held` ones are fetched where they are needed.
      buckets: What travels together, in order; all results that are wanted.
      store: Takes positions and values of results and returns the arrays at rest.

    Returns:
      The arrays at rest, by position.
    """
    held = [i for i, x in enumerate(inputs) if isinstance(x, Held)]
    jaxpr, env = flat(jaxpr, consts)
    env |= {v: x for v, x in zip(jaxpr.invars, inputs, strict=True) if not isinstance(x, Held)}
    out: dict[int, Any] = {}
    done: list[list[Any]] = []
    for stage in stages(jaxpr, held, buckets):
        arrays = [inputs[i].array for i in stage.loads]
        if arrays and len(done) >= STAGES and done[-STAGES]:
            arrays, _ = lax.optimization_barrier((arrays, done[-STAGES]))
        for i, x in zip(stage.loads, arrays, strict=True):
            env[jaxpr.invars[i]] = inputs[i].load(to_device(x))
        values = partition_evaluate.evaluate(ctx, stage.jaxpr, [], [env[v] for v in stage.jaxpr.invars])
        env.update(zip(stage.jaxpr.outvars, values, strict=True))
        stored = store(stage.results, [_read(env, jaxpr.outvars[r]) for r in stage.results])
        out.update(zip(stage.results, stored, strict=True))
        if stage.results:
            done.append([x for x in stored if on_host(x)])
    return out


def flat(jaxpr: Any, consts: Sequence[Any]) -> tuple[Jaxpr, dict[Any, Any]]:
    """The program without inner calls, and its constants by variable."""
    eqns, outs, known = inlined(jaxpr, consts)
    return Jaxpr(list(known), jaxpr.invars, outs, eqns), dict(known)


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else env[atom]  # type: ignore[attr-defined]


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _mask(needs: dict[Any, int], atom: Any) -> int:
    return 0 if isinstance(atom, Literal) else needs.get(atom, 0)


def _needs(jaxpr: Any, held: Sequence[int]) -> dict[Any, int]:
    """Which held inputs each variable depends on, as the bits of a number."""
    needs = {jaxpr.invars[position]: 1 << i for i, position in enumerate(held)}
    for eqn in jaxpr.eqns:
        mask = 0
        for v in eqn.invars:
            mask |= _mask(needs, v)
        if mask:
            needs.update((v, mask) for v in eqn.outvars)
    return needs


def _ancestors(jaxpr: Any, maker: dict[Any, int], atoms: Iterable[Any], made: set[int]) -> list[int]:
    """The equations that these variables need and that are not made yet, in order."""
    todo, found = _variables(atoms), set()
    while todo:
        i = maker.get(todo.pop())
        if i is not None and i not in made and i not in found:
            found.add(i)
            todo += _variables(jaxpr.eqns[i].invars)
    return sorted(found)
