"""Opens manual regions around a traced call: one, or one for each independent part of a large program."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..jaxpr.trace import Program
from ..sharding.leaves import Leaf, Leaves, StateLeaf
from ..sharding.regions import open_region
from .split_program import Part, parts, scalars
from .step import Init, Update


def around(call: Init | Update) -> Callable[..., Any]:
    """The call as a function of global arrays (flat lists); its parts are found once."""
    return _init(call) if isinstance(call, Init) else _update(call)


def _open(call: Init | Update) -> Callable[..., Any]:
    return open_region(call.options.mesh, call.axes, call, call.in_specs, call.out_specs)


def _take(values: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    return [values[i] for i in positions]


def _init(call: Init) -> Callable[..., Any]:
    found = parts(call.program.jaxpr, [True] * len(call.params))
    regions = [(_open(_init_part(call, part)), part) for part in found]

    def run(params: Any, consts: Any) -> Any:
        out: list[Any] = [None] * len(call.state)
        for region, part in regions:
            results = region(_take(params, part.inputs), _take(consts, part.consts))
            for i, x in zip(part.outputs, results, strict=True):
                out[i] = x
        return out

    return run


def _init_part(call: Init, part: Part) -> Init:
    return dataclasses.replace(
        call,
        program=Program(part.jaxpr, _take(call.program.consts, part.consts), None),
        params=tuple(_take(call.params, part.inputs)),
        split_params=tuple(_take(call.split_params, part.inputs)),
        state=_take(call.state, part.outputs),
    )


def _update(call: Update) -> Callable[..., Any]:
    traced = call.traced
    trees = len(call.grads) - traced.grads
    sizes = [traced.grads, len(traced.state), len(call.params), trees]
    leafy = [True] * sizes[0] + [s.shape != () for s in traced.state] + [True] * (sizes[2] + sizes[3])
    program = traced.program
    leafy += [False] * (len(program.jaxpr.invars) - len(leafy))
    cut = None if call.options.offload else scalars(program.jaxpr, leafy)
    rest = program.jaxpr if cut is None else cut[1]
    found = parts(rest, [*leafy, *[False] * (len(rest.invars) - len(leafy))])
    if len(found) == 1:
        return _open(call)
    opened = lambda piece: (_open(piece[0]), *piece[1:])
    first = None if cut is None else opened(_scalars_part(call, cut[0], sizes))
    whole = dataclasses.replace(call, traced=dataclasses.replace(traced, program=Program(rest, program.consts, None)))
    regions = [opened(_update_part(whole, part, sizes)) for part in found]

    def run(*arrays: Any) -> Any:
        new: dict[int, Any] = {}
        state: dict[int, Any] = {}
        taking = lambda taken: [_take(x, at) for x, at in zip(arrays, taken, strict=True)]
        if first is not None:
            region, taken = first
            grads, old, params, others, consts = arrays
            arrays = (grads, old, params, [*others, *region(*taking(taken))[1]], consts)
        for region, taken, new_at, state_at in regions:
            some_new, some_state = region(*taking(taken))
            new.update(zip(new_at, some_new, strict=True))
            state.update(zip(state_at, some_state, strict=True))
        in_order = lambda found: [found[i] for i in sorted(found)]
        return in_order(new), in_order(state)

    return run


def _update_part(call: Update, part: Part, sizes: Sequence[int]) -> tuple[Update, Any, list[int], list[int]]:
    """The call for one part, and where its arrays come from and go to."""
    traced = call.traced
    count = len(traced.new.leaves)
    new_at = [i for i in part.outputs if i < count]
    state_at = [i - count for i in part.outputs if i >= count]
    new, state = _take(traced.new.leaves, new_at), _take(traced.new_state, state_at)
    moving = [i for i in new_at if traced.new.leaves[i].trainable]
    changing = [i for i in state_at if not traced.new_state[i].frozen]
    return *_piece(call, part, sizes, new, state), moving, changing


def _scalars_part(call: Update, part: Part, sizes: Sequence[int]) -> tuple[Update, Any]:
    """The call that makes scalars, and where its arrays come from; the scalars come out as state."""
    made = [StateLeaf((), (), v.aval.dtype, None, False) for v in part.jaxpr.outvars]
    return _piece(call, part, sizes, [], made)


def _piece(
    call: Update, part: Part, sizes: Sequence[int], new: Sequence[Leaf], state: list[StateLeaf]
) -> tuple[Update, Any]:
    """The call with the program of one part and these results, and where its arrays come from."""
    traced = call.traced
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    ends = [*starts[1:], len(traced.program.jaxpr.invars)]
    g, s, p, t, e = (
        [i - start for i in part.inputs if start <= i < end] for start, end in zip(starts, ends, strict=True)
    )
    grads = [*g, *(traced.grads + i for i in t)]
    program = dataclasses.replace(
        traced,
        program=Program(part.jaxpr, _take(traced.program.consts, part.consts), None),
        grads=len(g),
        state=_take(traced.state, s),
        new=Leaves(tuple(new), None),
        new_state=state,
    )
    piece = dataclasses.replace(
        call,
        traced=program,
        grads=tuple(_take(call.grads, grads)),
        split_grads=tuple(_take(call.split_grads, grads)),
        params=tuple(_take(call.params, p)),
        split_params=tuple(_take(call.split_params, p)),
    )
    return piece, (grads, s, p, e, part.consts)
