"""What is refused at once: gradients and state that do not fit, each by leaf path, with the fix."""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from .._text import path_text
from .._types import ArrayLike, Path, PyTree
from ..sharding.axes import Axes
from ..sharding.layout import EvenSplit, Shape, is_split
from ..sharding.leaves import Leaf, Leaves, StateLeaf, shape_dtype
from ..sharding.vma import varying


def same_leaves(call: str, grads: PyTree, params: PyTree) -> None:
    """Refuses gradients that lack a leaf, or have `None` for an array.

    Trees of different structure are legal where the gradients' paths are the ends of parameters'
    paths (`optax.LookaheadParams`).
    """
    none = lambda x: x is None or is_split(x)
    found = dict(jax.tree_util.tree_leaves_with_path(grads, is_leaf=none))
    wanted = dict(jax.tree_util.tree_leaves_with_path(params, is_leaf=is_split))
    for path in wanted:
        if path in found and found[path] is None:
            raise ValueError(
                f"{call}: gradient leaf {path_text(path)!r} is None where the parameters have an "
                f"array of shape {shape_dtype(wanted[path])[0]}. Expected an array; an unused parameter has a "
                "zero gradient. Fix: jnp.zeros_like(param), or optax.masked inside the wrapper."
            )
    missing = [p for p in wanted if p not in found]
    extra = [p for p, x in found.items() if p not in wanted and x is not None]
    ends = {p[i:] for p in wanted for i in range(len(p) + 1)} if extra else set()
    strange = [p for p in extra if p not in ends]
    if missing and (not extra or strange):
        path = missing[0]
        raise ValueError(
            f"{call}: the gradients lack leaf {path_text(path)!r} of shape "
            f"{shape_dtype(wanted[path])[0]}. Found {len(found)} leaves; expected "
            f"the parameters' {len(wanted)}. An unused parameter has a zero gradient. Fix: pass "
            "jnp.zeros_like(param) there, or leave it out of the parameters too."
        )
    if strange:
        raise ValueError(
            f"{call}: the gradients have leaf {path_text(strange[0])!r}, which the parameters lack. "
            f"Expected only the parameters' {len(wanted)} leaves. Fix: pass the parameters that were "
            "differentiated."
        )


def split_leaf(call: str, path: Path, x: ArrayLike | EvenSplit) -> None:
    """Refuses an `EvenSplit` that holds no array: somebody masked inside a split leaf."""
    if is_split(x) and not hasattr(x.value, "dtype"):
        masked = isinstance(x.value, optax.MaskedNode)
        fix = "put optax.masked inside the wrapper: zero.optimizer(optax.masked(inner, mask))."
        raise ValueError(
            f"{call}: leaf {path_text(path)!r} is an EvenSplit holding "
            f"{'a MaskedNode' if masked else repr(x.value)}. Expected its stored array. Fix: {fix}"
        )


def gradients(
    call: str, grads: Leaves, arrays: Sequence[ArrayLike | EvenSplit], params: Leaves, manual: bool
) -> Leaves:
    """The gradients with the parameters' logical shapes and layouts; refuses those of other shapes."""
    by_path = {leaf.path: leaf for leaf in params.leaves}
    out = []
    for leaf, x in zip(grads.leaves, arrays, strict=True):
        wanted = by_path.get(leaf.path) or _ending(leaf, params)
        share = wanted.layout.local_shape if wanted.layout else None
        if leaf.shape != wanted.shape and not (manual and leaf.shape == share):
            fix = "pass the gradient of these parameters, split by the same Zero."
            if leaf.shape[1:] == wanted.shape:
                fix = f"its mean over examples, if these are per-example gradients: {PER_EXAMPLE}"
            raise ValueError(
                f"{call}: gradient leaf {path_text(leaf.path)!r} has shape {leaf.shape}; expected the "
                f"parameter's shape {wanted.shape}. Fix: {fix}"
            )
        if is_split(x):
            kind = wanted.layout.kind if wanted.layout else "whole"
            plain = wanted.layout is None or wanted.layout.plain
            stored = wanted.layout.local_shape if manual and wanted.layout else None
            stored = stored or (wanted.layout.stored_shape if wanted.layout else wanted.shape)
            stored_shape(call, "gradient", leaf.path, x.value.shape, stored, params_n(wanted))
            if plain:
                raise ValueError(
                    f"{call}: gradient leaf {path_text(leaf.path)!r} is an EvenSplit, but here its "
                    f"layout is {kind}: it was split for another mesh. Expected a plain array of "
                    f"shape {wanted.shape}. Fix: zero.gather it with the Zero that split it."
                )
        if wanted.trainable and not leaf.trainable:
            raise ValueError(
                f"{call}: gradient leaf {path_text(leaf.path)!r} has dtype {leaf.dtype} for a parameter "
                f"of dtype {wanted.dtype}. Expected a floating gradient. Fix: pass what jax.grad gives."
            )
        dtype = leaf.dtype if wanted.trainable else wanted.dtype
        out.append(dataclasses.replace(wanted, path=leaf.path, dtype=dtype))
    return Leaves(tuple(out), grads.tree)


def params_n(leaf: Leaf) -> int:
    """The number of shares that a leaf is cut into."""
    return leaf.layout.n if leaf.layout else 1


def _ending(leaf: Leaf, params: Leaves) -> Leaf:
    """The parameter whose key path ends with the gradient's; `same_leaves` saw that there is one."""
    ends = (p for p in params.leaves if p.path[len(p.path) - len(leaf.path) :] == leaf.path)
    return next(ends)


#: What to do about parameters that do not rest as this `Zero` says.
RESHARD = "params = zero.shard(params) with this Zero; if another one has split them, zero.gather with that one first."


#: What to do about gradients that keep a dimension of examples.
PER_EXAMPLE = "jax.tree.map(lambda g: jnp.mean(g, 0), grads)."


def stored_shape(call: str, what: str, path: Path, shape: Shape, wanted: Shape, n: int) -> None:
    """Refuses a stored array of another length: it was split for another number of devices."""
    if tuple(shape) != tuple(wanted):
        fix = RESHARD if what == "parameter" else "use the Zero that made it, or start from tx.init(params)."
        raise ValueError(
            f"{call}: {what} leaf {path_text(path)!r} has shape {tuple(shape)}; expected "
            f"{tuple(wanted)}, its layout over {n} devices. It belongs to another layout (mesh size, "
            f"stage, stacked=) or another model. Fix: {fix}"
        )


def state_arrays(
    call: str, arrays: Sequence[jax.Array], leaves: Sequence[StateLeaf], axes: Axes, no_params: bool
) -> None:
    """Refuses state of another layout where lengths or concrete arrays show it."""
    for x, leaf in zip(arrays, leaves, strict=True):
        if no_params and np.shape(x) != leaf.stored_shape:
            raise ValueError(
                f"{call}: state leaf {path_text(leaf.path)!r} has shape {np.shape(x)}; expected {leaf.stored_shape}, "
                "as the gradients are shaped. The state belongs to another layout or model, or the gradients are not "
                "shaped as the parameters. Fix: pass the parameters too, tx.update(grads, state, params); of "
                f"per-example gradients the mean over examples, {PER_EXAMPLE}"
            )
        stored_shape(call, "state", leaf.path, np.shape(x), leaf.stored_shape, axes.n)
        sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if leaf.layout is None or not isinstance(sharding, NamedSharding):
            continue
        mine = leaf.layout.lead  # other axes may shard the other dimensions
        here = sharding.shard_shape(x.shape)
        if here[mine] not in (leaf.layout.local_shape[mine], x.shape[mine]):
            stored_shape(call, "state (per device)", leaf.path, here, leaf.layout.local_shape, axes.n)


def local(call: str, body: Any, arrays: Sequence[Any], reduced: bool, no_params: bool) -> None:
    """Inside `shard_map`: every array must have the type that its place demands."""
    grads, state, _, extra, consts = arrays
    axes: Axes = body.axes
    # A gradient that is never cut (a scalar) does not show whether it is reduced; its tree does: beside
    # shares, as value_and_grad gives them, it is the mean.
    with_shares = (
        axes.n * axes.r == 1
        or any(body.split_grads)
        and all(
            share or not (leaf.layout and leaf.trainable)
            for leaf, share in zip(body.grads, body.split_grads, strict=True)
        )
    )
    for x, leaf, share in zip(grads, body.grads, body.split_grads, strict=True):
        if not leaf.trainable:
            continue
        if share and no_params:
            raise ValueError(
                f"{call}: params=None with split gradients (leaf {path_text(leaf.path)!r}). Expected "
                "the parameters, which show the logical shapes. Fix: tx.update(grads, state, params)."
            )
        if share:
            _share(call, leaf, x, axes)
        elif reduced or (with_shares and not set(axes.every) & varying(x)):
            _mean(call, leaf, x, axes)
        else:
            own(call, leaf, x, axes)
    for x, leaf in zip(state, body.traced.state, strict=True):
        wanted = leaf.layout.local_shape if leaf.layout else leaf.shape
        stored_shape(call, "state", leaf.path, np.shape(x), wanted, axes.n)
        if leaf.layout is None and axes.n > 1:  # one share is the whole, whatever its spec said
            whole(call, f"state leaf {path_text(leaf.path)!r}", [x], axes)
    whole(call, "an extra argument", extra, axes)
    whole(call, "an array that the optimizer or an extra argument closes over", consts, axes)


def own(call: str, leaf: Leaf, x: jax.Array, axes: Axes) -> None:
    """Inside `shard_map`: refuses a gradient that is equal on all devices where this device's own is expected."""
    missing = [a for a in axes.every if a not in varying(x)]
    if missing:
        raise ValueError(
            f"{call}: gradient leaf {path_text(leaf.path)!r} does not vary over {missing}: jax.grad has "
            "already summed it over devices, because the parameters do not vary. Expected this "
            f"device's own gradient, varying over {axes.every}. Fix: before jax.grad, params = "
            f"jax.lax.pcast(params, {axes.every}, to='varying'); or, for gradients that are the mean "
            "already, zero.optimizer(inner, grads='reduced')."
        )


def _mean(call: str, leaf: Leaf, x: jax.Array, axes: Axes) -> None:
    over = sorted(set(axes.every) & varying(x))
    if over:
        raise ValueError(
            f"{call}: gradient leaf {path_text(leaf.path)!r} varies over {over}, but the optimizer was "
            "made with grads='reduced'. Expected the mean over all devices. Fix: drop grads='reduced'."
        )


def _share(call: str, leaf: Leaf, x: jax.Array, axes: Axes) -> None:
    over = sorted(set(axes.replica) & varying(x))
    if over:
        raise ValueError(
            f"{call}: gradient leaf {path_text(leaf.path)!r} is share-shaped but varies over the "
            f"replica axes {over}. Expected a share that is reduced over them. Fix: "
            f"jax.lax.pmean(grad, {axes.replica}), or pass full local gradients."
        )


def whole(call: str, name: str, values: Sequence[jax.Array], axes: Axes) -> None:
    """Inside `shard_map`: refuses values that differ between devices where one is expected."""
    for x in values:
        over = sorted(set(axes.every) & varying(x))
        if over:
            raise ValueError(
                f"{call}: {name} varies over {over}. Expected the same value on every device. Fix: "
                f"jax.lax.pmean(..., {axes.every}) before the call, or in_specs=PartitionSpec()."
            )


def closures(call: str, extra: Mapping[str, Any], axes: Axes) -> None:
    """Inside `shard_map`: refuses functions that close over what differs between devices, by name.

    JAX would refuse them too, somewhere inside the optimizer, in its own words.
    """
    for name, f in extra.items():
        if not callable(f):
            continue
        held: list[Any] = [c.cell_contents for c in getattr(f, "__closure__", None) or () if _filled(c)]
        held += [getattr(f, part, None) for part in ("args", "keywords", "__defaults__", "__kwdefaults__")]
        tracers = [x for x in jax.tree.leaves(held) if isinstance(x, jax.core.Tracer)]
        whole(call, f"a value that {name} closes over", tracers, axes)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where the variable has no value yet
    except ValueError:
        return False
    return True


def not_wrapped(tx: Any) -> ValueError:
    """The error where `zero.apply` finds no wrapped optimizer, which alone carries the step on shares."""
    return ValueError(
        f"apply: tx is a {type(tx).__name__}, not what zero.optimizer returns. Expected the wrapped "
        "optimizer itself. Fix: wrap the whole chain: tx = zero.optimizer(optax.chain(...))."
    )


def inner_optimizer(inner: Any, kind: type, call: str = "optimizer") -> None:
    """Refuses what is no optimizer, and a wrapped one inside a wrapped one."""
    if isinstance(inner, kind):
        raise ValueError(
            f"{call}: the inner optimizer is wrapped by jaxzero already. Expected a plain Optax "
            "optimizer. Fix: wrap once, outermost."
        )
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise ValueError(
            f"{call}: inner is a {type(inner).__name__}. Expected an optax.GradientTransformation. "
            "Fix: for example zero.optimizer(optax.adamw(1e-3)); for optax.MultiSteps call its "
            ".gradient_transformation()."
        )
