"""One call of a user's function of parameters and examples: what it was given, checked and put in its place."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._text import path_text
from ..jaxpr import trace
from ..optimizer import checks as optimizer_checks
from ..sharding import axes as sharding_axes
from ..sharding import checks, host
from ..sharding import place as sharding_place
from ..sharding.axes import Axes
from ..sharding.layout import is_split
from ..sharding.leaves import Leaves, unwrap
from ..sharding.options import Options, memory_kind, param_leaves, resolve_axes
from ..sharding.regions import open_region
from . import batch as gradients_batch
from .batch import Arguments

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """Everything about a call but its arrays: equal settings share one compiled program.

    Attributes:
      options: The options.
      axes: The mesh axes.
      manual: Whether the call stands inside a user's `shard_map`.
      leaves: The parameters, without their arrays.
      arguments: The other arguments, without their arrays.
      steps: Into how many micro-batches the examples of each device are cut.
    """

    options: Options
    axes: Axes
    manual: bool
    leaves: Leaves
    arguments: Arguments
    steps: int = 1

    @property
    def split(self) -> bool:
        """Whether parameters come as shares."""
        return self.options.stage == 3

    @property
    def over(self) -> tuple[str, ...]:
        """The axes over which examples are dealt, in the mesh's order: no data has to move."""
        return tuple(a for a in self.options.mesh.axis_names if a in self.axes.every)

    @property
    def param_specs(self) -> list[PartitionSpec]:
        """Where parameters are at rest."""
        return [leaf.spec(self.axes.shard if self.split else None) for leaf in self.leaves.leaves]

    @property
    def batch_specs(self) -> list[PartitionSpec]:
        """How the arrays of the batch are dealt."""
        return [a.spec(self.over) for a in self.arguments.arrays]

    @property
    def abstract_params(self) -> list[jax.ShapeDtypeStruct]:
        """The parameters at full shapes."""
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves.leaves]

    def abstract_batch(self, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The arrays of the batch as one device sees them in one micro-step."""
        count = (1 if self.manual else self.axes.n * self.axes.r) * self.steps
        cut = lambda x: (np.shape(x)[0] // count, *np.shape(x)[1:])
        shapes = [cut(x) if a.cut else np.shape(x) for a, x in zip(self.arguments.arrays, arrays, strict=True)]
        return [jax.ShapeDtypeStruct(s, jnp.result_type(x)) for s, x in zip(shapes, arrays, strict=True)]

    @property
    def axis_env(self) -> list[tuple[str, int]]:
        """The mesh axes that a trace binds."""
        return list(zip(self.axes.every, self.axes.sizes, strict=True))

    @property
    def trace_mesh(self) -> Any:
        """The mesh under which the user's function is traced outside a region."""
        return sharding_axes.for_losses(self.options.mesh, self.axes)

    @property
    def dealt(self) -> list[bool]:
        """Which arrays of the batch differ between devices."""
        return [a.cut or a.key for a in self.arguments.arrays]

    def fetched(self, params: Sequence[Any]) -> Sequence[Any]:
        """Parameters on the device where they are whole; shares stay until they are gathered."""
        return params if self.split else [host.to_device(x) for x in params]

    def region(self, body: Callable[..., Any], in_specs: Any, out_specs: Any, *, told: bool = True) -> Any:
        """The one region without the type check: that in which a user's function runs.

        A program written for one device does not pass it (a scan carry that starts as a constant), and
        without it autodiff inserts no reduction.
        """
        return open_region(self.options.mesh, self.axes, body, in_specs, out_specs, told=told, check_vma=False)


def wrap(
    call: str,
    options: Options,
    whole_argnums: Sequence[int],
    fold_keys: bool,
    run: Callable[[CallSpec, Sequence[Any], Sequence[Any]], Any],
    steps: int = 1,
) -> Callable[..., Any]:
    """A function of parameters and batch that checks and places them and hands their arrays to `run`.

    Called eagerly it is compiled once for each setting.

    Args:
      call: The name of the call, for errors.
      options: The options.
      whole_argnums: Positions of arguments that are given whole to every device.
      fold_keys: Whether scalar keys are folded with the device's index.
      run: Takes a setting, the arrays of the parameters and the arrays of the batch.
      steps: Into how many micro-batches the examples of each device are cut.

    Returns:
      The function.
    """
    compiled: dict[Any, Any] = {}

    def wrapped(params: Any, *batch: Any) -> Any:
        axes, manual = resolve_axes(options, call)
        traced = manual or sharding_place.is_traced((params, batch))
        arguments, arrays = gradients_batch.sort_arguments(batch, whole_argnums, fold_keys, traced, call)
        leaves = _parameters(call, params, axes, options, manual)
        setting = CallSpec(options, axes, manual, leaves, arguments, steps)
        flat = jax.tree.leaves(params)
        gradients_batch.check_divides(arguments.arrays, arrays, (1, 1) if manual else (axes.n, axes.r), steps, call)
        if not manual:
            flat, arrays = _placed(call, setting, flat, arrays)
        if traced:
            return run(setting, flat, arrays)
        key = (setting, trace.x64())
        if key not in compiled:
            compiled[key] = jax.jit(lambda p, b: run(setting, p, b))
        return compiled[key](flat, arrays)

    return wrapped


def _parameters(call: str, params: Any, axes: Axes, options: Options, manual: bool) -> Leaves:
    checks.parameters(call, options, params)
    split = options.stage == 3
    leaves = param_leaves(options, params, axes.n, shares=split and manual)
    for leaf, x in zip(leaves.leaves, jax.tree.leaves(params, is_leaf=is_split), strict=True):
        if is_split(x) and not split:
            raise ValueError(
                f"{call}: parameter leaf {path_text(leaf.path)!r} is an EvenSplit, but at stage "
                f"{options.stage} parameters are whole. Expected plain arrays. Fix: zero.gather(params)."
            )
        if not split or leaf.layout is None:
            continue
        wanted = leaf.layout.local_shape if manual else leaf.layout.stored_shape
        if is_split(x) == leaf.layout.plain or np.shape(unwrap(x)) != wanted:
            raise ValueError(
                f"{call}: parameter leaf {path_text(leaf.path)!r} has stored shape {np.shape(unwrap(x))}; at stage 3 "
                f"expected {wanted}, its share layout over {axes.n} devices. It is whole, or split for another mesh or "
                f"stage. Fix: {optimizer_checks.RESHARD}"
            )
    return leaves


def _placed(call: str, setting: CallSpec, params: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    mesh_ = setting.options.mesh
    place = lambda path, x, spec, own, kind=None: sharding_place.place(call, mesh_, path, x, spec, own, kind)
    kind = lambda leaf: memory_kind(setting.options, "params", leaf.layout)
    rows = zip(setting.leaves.leaves, params, setting.param_specs, strict=True)
    params = [place(leaf.path, x, spec, setting.axes.every, kind(leaf)) for leaf, x, spec in rows]
    arrays = [place((), x, spec, mesh_.axis_names) for x, spec in zip(arrays, setting.batch_specs, strict=True)]
    return params, arrays
