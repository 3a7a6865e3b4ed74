"""`value_and_grad`: the gradient of the local loss, reduced and split as the stage prescribes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from . import batches, dependence, mesh, partition, split_loss, synchronise
from .batches import Arguments
from .layout import is_split
from .mesh import Axes, path_text
from .options import Options
from .state import Leaves, bare, is_key, leaves_of, wear

P = PartitionSpec
CALL = "value_and_grad"


@functools.lru_cache(maxsize=64)
def value_and_grad(
    options: Options,
    loss_fn: Callable[..., Any],
    has_aux: bool,
    whole_argnums: tuple[int, ...],
    fold_keys: bool,
) -> Callable[..., Any]:
    """See `Zero.value_and_grad`; the same function for the same arguments, so that caches work."""
    loss = Loss(options, loss_fn, has_aux)
    compiled: dict[Any, Any] = {}

    def grad_fn(params: Any, *batch: Any) -> Any:
        axes, manual = options.context(CALL)
        traced = manual or mesh.is_traced((params, batch))
        arguments, arrays = batches.sort_arguments(batch, whole_argnums, fold_keys, traced)
        leaves = _parameters(params, axes, options, manual)
        flat = jax.tree.leaves(params)
        if options.stage == 3 and manual:
            return loss.inside_split(axes, leaves, arguments, flat, arrays)
        if manual:
            return loss.inside(axes, leaves, arguments, flat, arrays)
        batches.check_divides(arguments.arrays, arrays, axes)
        flat, arrays = _placed(options.mesh, axes, leaves, arguments, flat, arrays, options.stage == 3)
        run = functools.partial(loss.outside, axes, leaves, arguments)
        if traced:
            return run(flat, arrays)
        key = (axes, leaves, arguments, mesh.x64())
        return compiled.setdefault(key, jax.jit(run))(flat, arrays)

    return grad_fn


class Loss:
    """A user's loss and how to differentiate it on one device."""

    def __init__(self, options: Options, loss_fn: Callable[..., Any], has_aux: bool) -> None:
        self.options, self.loss_fn, self.has_aux = options, loss_fn, has_aux

    def local(
        self, leaves: Leaves, arguments: Arguments, params: Sequence[Any], arrays: Sequence[Any]
    ) -> tuple[Any, Any, list[Any]]:
        """Loss, aux and gradients of this device's examples; only trainable leaves have one."""
        trainable = [i for i, leaf in enumerate(leaves.leaves) if leaf.trainable]

        def of(values: list[Any]) -> tuple[Any, Any]:
            merged = list(params)
            for i, x in zip(trainable, values, strict=True):
                merged[i] = x
            out = self.loss_fn(leaves.unflatten(merged), *arguments.rebuild(arrays))
            return _check_loss(out, self.has_aux)

        given = [params[i] for i in trainable]
        (value, aux), grads = jax.value_and_grad(of, has_aux=True)(given)
        return value, aux, grads

    def outside(self, axes: Axes, leaves: Leaves, arguments: Arguments, params: Any, arrays: Any) -> Any:
        """The global view: a region of the library's own around the loss."""
        options = self.options
        if options.stage == 3:
            return self.outside_split(axes, leaves, arguments, params, arrays)
        over = _batch_axes(options.mesh, axes)
        aux_tree = self._check_aux(axes, leaves, arguments, params, arrays)
        whole = options.stage == 1

        def body(params: Any, arrays: Any) -> Any:
            arrays = batches.fold(arguments.arrays, arrays, axes)
            value, aux, grads = self.local(leaves, arguments, params, arrays)
            return _reduced(value, jax.tree.leaves(aux), grads, leaves, axes, options, whole)

        trainable = [leaf for leaf in leaves.leaves if leaf.trainable]
        grad_specs = [P() if whole or leaf.layout is None else leaf.layout.spec(axes.shard) for leaf in trainable]
        run = _region(options, axes, body, (P(), [a.spec(over) for a in arguments.arrays]), (P(), P(), grad_specs))
        value, aux, grads = run(params, arrays)
        return self._assemble(value, jax.tree.unflatten(aux_tree, aux), grads, leaves, whole)

    def inside(self, axes: Axes, leaves: Leaves, arguments: Arguments, params: Any, arrays: Any) -> Any:
        """Inside a user's `shard_map`: types say what is local; every stage gives shares."""
        arrays = batches.fold(arguments.arrays, arrays, axes)
        params = [mesh.cast(x, axes.every) for x in params]
        value, aux, grads = self.local(leaves, arguments, params, arrays)
        missing = [a for a in axes.every if a not in mesh.varying(value)]
        if missing:
            raise ValueError(
                f"{CALL}: the loss does not vary over {missing} inside shard_map. Found a loss that is "
                "reduced over devices already (lax.pmean?), whose gradient would be divided twice; "
                "expected the mean over this device's own examples. Fix: return the local mean; the "
                "mean over devices is taken here."
            )
        pairs, aux_tree = jax.tree_util.tree_flatten_with_path(aux)
        for path, x in pairs:
            over = sorted(set(axes.every) & mesh.varying(x))
            if over and not _is_mean(x.dtype):
                raise _aux_error(path, x.dtype)
        flat = [mesh.cast(x, axes.every) if _is_mean(x.dtype) else x for _, x in pairs]
        value, aux, grads = _reduced(value, flat, grads, leaves, axes, self.options, False)
        return self._assemble(value, jax.tree.unflatten(aux_tree, aux), grads, leaves, False)

    def _program(self, axes: Axes, leaves: Leaves, arguments: Arguments, arrays: Any, count: int) -> Any:
        """The gradient program at full parameter shapes and the shapes of one device's examples."""
        local = [
            jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]) if a.cut else np.shape(x), jnp.result_type(x))
            for a, x in zip(arguments.arrays, arrays, strict=True)
        ]
        return split_loss.trace(functools.partial(self.local, leaves, arguments), leaves, local, axes, self.options)

    def _aux_of(self, program: Any, arguments: Arguments, axes: Axes) -> tuple[bool, Any]:
        """Whether the loss depends on the device; the structure of aux, checked as at the other stages."""
        value, *marks = program.differs([a.cut or a.key for a in arguments.arrays], axes)
        pairs, tree = jax.tree_util.tree_flatten_with_path(program.out[1])
        for (path, x), mark in zip(pairs, marks, strict=False):
            if mark and not _is_mean(x.dtype):
                raise _aux_error(path, x.dtype)
        return value, tree

    def outside_split(self, axes: Axes, leaves: Leaves, arguments: Arguments, params: Any, arrays: Any) -> Any:
        """Stage 3 in the global view: the region evaluates the gradient program over shares."""
        options = self.options
        program = self._program(axes, leaves, arguments, arrays, axes.n * axes.r)
        _, aux_tree = self._aux_of(program, arguments, axes)

        def body(params: Any, arrays: Any, consts: Any) -> Any:
            arrays = batches.fold(arguments.arrays, arrays, axes)
            return program.run(params, arrays, consts, False)

        cut = lambda leaf: P() if leaf.layout is None else leaf.layout.spec(axes.shard)
        dealt = [a.spec(_batch_axes(options.mesh, axes)) for a in arguments.arrays]
        in_specs = ([cut(leaf) for leaf in leaves.leaves], dealt, P())
        out_specs = (P(), P(), [cut(leaf) for leaf in leaves.leaves if leaf.trainable])
        run = _region(options, axes, body, in_specs, out_specs)
        value, aux, grads = run(params, arrays, program.consts)
        return self._assemble(value, jax.tree.unflatten(aux_tree, aux), grads, leaves, False)

    def inside_split(self, axes: Axes, leaves: Leaves, arguments: Arguments, params: Any, arrays: Any) -> Any:
        """Stage 3 inside a user's `shard_map`: the same program; every value is typed as varying."""
        arrays = batches.fold(arguments.arrays, arrays, axes)
        program = self._program(axes, leaves, arguments, arrays, 1)
        _, aux_tree = self._aux_of(program, arguments, axes)
        value, aux, grads = program.run(params, arrays, program.consts, True)
        return self._assemble(value, jax.tree.unflatten(aux_tree, aux), grads, leaves, False)

    def _assemble(self, value: Any, aux: Any, grads: Any, leaves: Leaves, whole: bool) -> Any:
        moved, out = iter(grads), []
        for leaf in leaves.leaves:
            if leaf.trainable:
                out.append(wear(next(moved), None if whole else leaf.layout))
            elif is_key(leaf.dtype):
                out.append(np.zeros(leaf.shape, jax.dtypes.float0))
            else:
                out.append(jnp.zeros(leaf.shape, leaf.dtype))
        return ((value, aux) if self.has_aux else value), leaves.unflatten(out)

    def _check_aux(self, axes: Axes, leaves: Leaves, arguments: Arguments, params: Any, arrays: Any) -> Any:
        """The structure of aux; refuses leaves that are no means and differ between devices."""
        if not self.has_aux:
            return jax.tree.structure(None)
        count = axes.n * axes.r
        local = [
            jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]) if a.cut else np.shape(x), jnp.result_type(x))
            for a, x in zip(arguments.arrays, arrays, strict=True)
        ]
        known = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves.leaves]
        fn = lambda p, b: _check_loss(self.loss_fn(leaves.unflatten(p), *arguments.rebuild(b)), True)[1]
        env = list(zip(axes.every, axes.sizes, strict=True))
        program = partition.trace(fn, known, local, axis_env=env)
        marks = [False] * len(known) + [a.cut or a.key for a in arguments.arrays]
        differs = dependence.depends(program.jaxpr, marks, axes.every)
        pairs, tree = jax.tree_util.tree_flatten_with_path(program.out)
        for (path, x), mark in zip(pairs, differs, strict=True):
            if mark and not _is_mean(x.dtype):
                raise _aux_error(path, x.dtype)
        return tree


def _region(options: Options, axes: Axes, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """The one region without the type check.

    A program written for one device does not pass it (a scan carry that starts as a constant), and
    without it autodiff inserts no reduction.
    """
    return jax.shard_map(
        body,
        mesh=options.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=mesh.manual_axes(options.mesh, axes),
        check_vma=False,
    )


def _reduced(
    value: Any,
    aux: Sequence[Any],
    grads: Sequence[Any],
    leaves: Leaves,
    axes: Axes,
    options: Options,
    whole: bool,
) -> tuple[Any, list[Any], list[Any]]:
    """Everything that leaves a loss: the mean over devices, once."""
    layouts = [None if whole else leaf.layout for leaf in leaves.leaves if leaf.trainable]
    out: list[Any] = list(grads)
    cut = [i for i, layout in enumerate(layouts) if layout is not None]
    shares = synchronise.mean_shares([grads[i] for i in cut], [la for la in layouts if la is not None], axes, options)
    for i, x in zip(cut, shares, strict=True):
        out[i] = x
    rest = [i for i, layout in enumerate(layouts) if layout is None]
    means = [j for j, x in enumerate(aux) if _is_mean(x.dtype)]
    together = [value, *(aux[j] for j in means), *(grads[i] for i in rest)]
    done = synchronise.mean_whole(together, axes, options)
    aux = list(aux)
    for j, x in zip(means, done[1:], strict=False):
        aux[j] = x
    for i, x in zip(rest, done[1 + len(means) :], strict=True):
        out[i] = x
    return done[0], aux, out


def _is_mean(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _aux_error(path: Any, dtype: Any) -> ValueError:
    return ValueError(
        f"{CALL}: aux leaf {path_text(path)!r} of dtype {dtype} depends on the device, and no mean of it "
        "is taken. Expected a floating leaf (averaged), or one that is equal on all devices. Fix: "
        "jax.lax.psum(..., axis names) for a count, or .astype(float) for a mean."
    )


def _check_loss(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """The loss and aux (`None` without), refused in words where it is no scalar mean."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(
            f"{CALL}: has_aux=True, but the loss returns {type(out).__name__}. Expected (loss, aux). "
            "Fix: return a pair, or drop has_aux."
        )
    value, aux = out if has_aux else (out, None)
    if isinstance(value, tuple):
        raise ValueError(
            f"{CALL}: the loss returns a tuple of {len(value)}. Expected a scalar. Fix: has_aux=True if "
            "it is (loss, aux)."
        )
    shape, dtype = np.shape(value), jnp.result_type(value)
    if shape or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{CALL}: the loss has shape {shape} and dtype {dtype}. Expected a floating scalar, the mean "
            "over examples. Fix: jnp.mean(...) of the losses."
        )
    return value, aux


def _parameters(params: Any, axes: Axes, options: Options, manual: bool) -> Leaves:
    split = options.stage == 3
    leaves = leaves_of(params, axes.n, options.stacked, shares=split and manual)
    for leaf, x in zip(leaves.leaves, jax.tree.leaves(params, is_leaf=is_split), strict=True):
        if is_split(x) and not split:
            raise ValueError(
                f"{CALL}: parameter leaf {path_text(leaf.path)!r} is an EvenSplit, but at stage "
                f"{options.stage} parameters are whole. Expected plain arrays. Fix: zero.gather(params)."
            )
        if not split or leaf.layout is None:
            continue
        wanted = leaf.layout.local_shape if manual else leaf.layout.stored_shape
        if is_split(x) != (leaf.layout.kind == "flat") or np.shape(bare(x)) != wanted:
            raise ValueError(
                f"{CALL}: parameter leaf {path_text(leaf.path)!r} has stored shape {np.shape(bare(x))}; at stage 3 "
                f"expected {wanted}, its share layout over {axes.n} devices. It is whole, or split for another mesh or "
                "stage. Fix: params = zero.shard(params) with this Zero."
            )
    return leaves


def _batch_axes(mesh_: Any, axes: Axes) -> tuple[str, ...]:
    """The axes over which examples are dealt, in the mesh's order: no data has to move."""
    return tuple(a for a in mesh_.axis_names if a in axes.every)


def _placed(
    mesh_: Any,
    axes: Axes,
    leaves: Leaves,
    arguments: Arguments,
    params: Sequence[Any],
    arrays: Sequence[Any],
    split: bool,
) -> tuple[list[Any], list[Any]]:
    over = _batch_axes(mesh_, axes)
    place = lambda path, x, spec, own: mesh.place(CALL, mesh_, path, x, spec, own)
    rest = [P() if leaf.layout is None or not split else leaf.layout.spec(axes.shard) for leaf in leaves.leaves]
    params = [place(leaf.path, x, s, axes.every) for leaf, x, s in zip(leaves.leaves, params, rest, strict=True)]
    arrays = [place((), x, a.spec(over), mesh_.axis_names) for a, x in zip(arguments.arrays, arrays, strict=True)]
    return params, arrays
