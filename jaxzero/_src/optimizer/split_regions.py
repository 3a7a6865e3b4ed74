"""Opens manual regions around a traced call: one, or one for each independent part of a large program.

A part takes some of the program's inputs and gives some of its results; a region takes and gives the flat lists of the
call's arguments. The way from one to the other is one pytree of positions, laid out once in the order of the program:
for an update of 3 gradients, 2 arrays of state, 3 parameters and 1 extra array, `_origins` is

    [(0, 0), (0, 1), (0, 2),  (1, 0), (1, 1),  (2, 0), (2, 1), (2, 2),  (3, 0)]

pairs of (argument of the call, position in it), one for each input of the program. A part with inputs 1, 4 and 6 takes
`origins[1], origins[4], origins[6]`: of the gradients number 1, of the state number 1, of the parameters number 1. The
positions by argument, here `([1], [1], [1], [])`, select the arrays that enter the region and their specs alike.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from ..jaxpr.compat import aval
from ..jaxpr.trace import Program
from ..sharding.leaves import Leaf, Leaves, StateLeaf
from ..sharding.regions import open_region
from .split_program import IndependentPart, cut_at_scalars, independent_parts
from .step import Init, Update

T = TypeVar("T")
#: Positions of the arrays that enter a region, for each argument of the call.
Positions = tuple[list[int], ...]
Arrays = list[jax.Array]
_GRADS, _STATE, _PARAMS, _EXTRA = range(4)


def around(call: Init | Update) -> Callable[..., Any]:
    """The call as a function of global arrays (flat lists); its parts are found once."""
    return _init(call) if isinstance(call, Init) else _update(call)


def _open(call: Init | Update) -> Callable[..., Any]:
    return open_region(call.options.mesh, call.axes, call, call.in_specs, call.out_specs)


def _take(values: Sequence[T], positions: Sequence[int]) -> list[T]:
    return [values[i] for i in positions]


def _take_each(arguments: Sequence[Sequence[T]], positions: Positions) -> list[list[T]]:
    return [_take(x, at) for x, at in zip(arguments, positions, strict=True)]


# --- init ----------------------------------------------------------------------------------------


def _init(call: Init) -> Callable[[Arrays, Arrays], Arrays]:
    parts = independent_parts(call.program.jaxpr, [True] * len(call.params))
    regions = [(_open(_init_part(call, part)), part) for part in parts]

    def run_regions(params: Arrays, consts: Arrays) -> Arrays:
        state: dict[int, jax.Array] = {}
        for region, part in regions:
            results = region(_take(params, part.inputs), _take(consts, part.consts))
            state.update(zip(part.outputs, results, strict=True))
        return [state[i] for i in range(len(call.state))]

    return run_regions


def _init_part(call: Init, part: IndependentPart) -> Init:
    return dataclasses.replace(
        call,
        program=Program(part.jaxpr, _take(call.program.consts, part.consts), None),
        params=tuple(_take(call.params, part.inputs)),
        split_params=tuple(_take(call.split_params, part.inputs)),
        state=_take(call.state, part.outputs),
    )


# --- update --------------------------------------------------------------------------------------


class _Region(NamedTuple):
    """A manual region for one part of an update.

    Attributes:
      run: Takes and returns global arrays.
      positions: Of its arrays among those of the whole call: of gradients, state, parameters, extra arrays, constants.
      new: Positions of its updates (or new parameters) among the whole call's.
      state: Positions of its new state.
    """

    run: Callable[..., tuple[Arrays, Arrays]]
    positions: Positions
    new: list[int]
    state: list[int]


def _update(call: Update) -> Callable[..., tuple[Arrays, Arrays]]:
    program = call.traced.program
    of_leaf = _of_leaf(call)
    cut = None if call.options.offload else cut_at_scalars(program.jaxpr, of_leaf)
    scalars = None if cut is None else _scalars_region(call, cut[0])
    rest = program.jaxpr if cut is None else cut[1]
    parts = independent_parts(rest, [*of_leaf, *[False] * (len(rest.invars) - len(of_leaf))])
    if len(parts) == 1:
        return _open(call)
    remaining = dataclasses.replace(call.traced, program=Program(rest, program.consts, None))
    regions = [_part_region(dataclasses.replace(call, traced=remaining), part) for part in parts]

    def run_regions(*arrays: Arrays) -> tuple[Arrays, Arrays]:
        new: dict[int, jax.Array] = {}
        state: dict[int, jax.Array] = {}
        if scalars is not None:
            _, made = scalars.run(*_take_each(arrays, scalars.positions))
            arrays = (*arrays[:_EXTRA], [*arrays[_EXTRA], *made], *arrays[_EXTRA + 1 :])
        for region in regions:
            some_new, some_state = region.run(*_take_each(arrays, region.positions))
            new.update(zip(region.new, some_new, strict=True))
            state.update(zip(region.state, some_state, strict=True))
        in_order = lambda found: [found[i] for i in sorted(found)]
        return in_order(new), in_order(state)

    return run_regions


def _origins(call: Update) -> list[tuple[int, int]]:
    """For each input of the program the argument of the call that it comes from, and its position there."""
    extra = len(call.traced.program.jaxpr.invars) - len(call.grads) - len(call.traced.state) - len(call.params)
    counts = (len(call.grads), len(call.traced.state), len(call.params), extra)
    return call.traced.inputs(*([(argument, i) for i in range(count)] for argument, count in enumerate(counts)))


def _of_leaf(call: Update) -> list[bool]:
    """For each input of the program whether it belongs to one leaf: not so scalars of state, and extra arrays."""
    shared = lambda argument, i: argument == _EXTRA or (argument == _STATE and call.traced.state[i].shape == ())
    return [not shared(*origin) for origin in _origins(call)]


def _part_region(call: Update, part: IndependentPart) -> _Region:
    """The region of one part."""
    traced = call.traced
    count = len(traced.new.leaves)
    new_at = [i for i in part.outputs if i < count]
    state_at = [i - count for i in part.outputs if i >= count]
    new, state = _take(traced.new.leaves, new_at), _take(traced.new_state, state_at)
    run, positions = _open_part(call, part, new, state)
    moving = [i for i in new_at if traced.new.leaves[i].trainable]
    changing = [i for i in state_at if not traced.new_state[i].frozen]
    return _Region(run, positions, moving, changing)


def _scalars_region(call: Update, part: IndependentPart) -> _Region:
    """The region that makes scalars, which come out as state."""
    made = [StateLeaf((), (), aval(v).dtype, None, False) for v in part.jaxpr.outvars]
    run, positions = _open_part(call, part, [], made)
    return _Region(run, positions, [], list(range(len(made))))


def _open_part(
    call: Update, part: IndependentPart, new: Sequence[Leaf], state: list[StateLeaf]
) -> tuple[Callable[..., tuple[Arrays, Arrays]], Positions]:
    """A region for the program of one part and these results, and the positions of its arrays."""
    traced, origins = call.traced, _take(_origins(call), part.inputs)
    grads, old, params, extra = ([i for a, i in origins if a == argument] for argument in range(4))
    update = dataclasses.replace(
        call,
        traced=dataclasses.replace(
            traced,
            program=Program(part.jaxpr, _take(traced.program.consts, part.consts), None),
            grads=sum(i < traced.grads for i in grads),
            state=_take(traced.state, old),
            new=Leaves(tuple(new), None),
            new_state=state,
        ),
        grads=tuple(_take(call.grads, grads)),
        split_grads=tuple(_take(call.split_grads, grads)),
        params=tuple(_take(call.params, params)),
        split_params=tuple(_take(call.split_params, params)),
    )
    return _open(update), (grads, old, params, extra, part.consts)
