"""One call of a user's function of parameters and examples: its arguments, checked and put in place."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .._text import path_text
from .._types import PyTree
from ..jaxpr.varying import Vary, unchecked, varying_over
from ..optimizer.checks import RESHARD
from ..sharding import axes as sharding_axes
from ..sharding import checks, host, place
from ..sharding.arguments import Whole
from ..sharding.axes import Axes
from ..sharding.flax_boxes import opened
from ..sharding.layout import is_split
from ..sharding.leaves import Leaves, unwrap
from ..sharding.options import Options, memory_kind, param_leaves, resolve_axes
from ..sharding.regions import only, open_region
from .batch import Arguments, check_agree, check_divides, fold, sort_arguments
from .checks import check_static
from .compiled import Programs, TracedCall

Array = jax.Array
T = TypeVar("T")
#: What runs on each device: parameters, arrays of the batch, constants, and the function that types values as varying.
Body = Callable[[Sequence[Array], Sequence[Array], Sequence[Array], Vary], T]


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """Everything about a call but its arrays: equal ones share one compiled program.

    Attributes:
      options: The options.
      axes: The mesh axes.
      manual: Whether the call stands inside a user's `shard_map`.
      leaves: The parameters, without their arrays.
      arguments: The other arguments, without their arrays.
      steps: Into how many microbatches the examples of each device are cut.
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
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which examples are cut, in the mesh's order: no data has to move."""
        return tuple(a for a in self.options.mesh.axis_names if a in self.axes.every)

    @property
    def param_specs(self) -> list[PartitionSpec]:
        """The specs of parameters as they are stored."""
        return [leaf.spec(self.axes.shard if self.split else None) for leaf in self.leaves.leaves]

    @property
    def batch_specs(self) -> list[PartitionSpec]:
        """How the arrays of the batch are cut."""
        return [a.spec(self.batch_axes) for a in self.arguments.arrays]

    @property
    def abstract_params(self) -> list[jax.ShapeDtypeStruct]:
        """The parameters at full shapes."""
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves.leaves]

    def abstract_batch(self, arrays: Sequence[Array]) -> list[jax.ShapeDtypeStruct]:
        """The arrays of the batch as one device sees them of one microbatch."""
        count = (1 if self.manual else self.axes.n * self.axes.r) * self.steps
        cut = lambda x: (np.shape(x)[0] // count, *np.shape(x)[1:])
        shapes = [cut(x) if a.cut else np.shape(x) for a, x in zip(self.arguments.arrays, arrays, strict=True)]
        return [jax.ShapeDtypeStruct(s, jnp.result_type(x)) for s, x in zip(shapes, arrays, strict=True)]

    def call(self, name: str, fn: Callable[..., PyTree], params: Sequence[Array], arrays: Sequence[Array]) -> PyTree:
        """The user's function of whole parameters and arrays of the batch; `name` is that of the call, for errors."""
        batch, named = self.arguments.rebuild(arrays)
        out = fn(opened(self.leaves.unflatten(params)), *batch, **named)
        check_static(name, out)
        return out

    @property
    def axis_env(self) -> list[tuple[str, int]]:
        """The mesh axes that a trace binds."""
        return list(zip(self.axes.every, self.axes.sizes, strict=True))

    @property
    def trace_mesh(self) -> AbstractMesh:
        """The mesh under which the user's function is traced outside a region."""
        return sharding_axes.for_losses(self.options.mesh, self.axes)

    @property
    def differs(self) -> list[bool]:
        """Which arrays of the batch differ between devices."""
        return [a.cut or a.key for a in self.arguments.arrays]

    def on_devices(
        self,
        body: Body[T],
        params: Sequence[Array],
        arrays: Sequence[Array],
        consts: Sequence[Array],
        out_specs: PyTree,
        *,
        constrain_outputs: bool = True,
    ) -> T:
        """`body(params, arrays, consts, vary)` on each device.

        Inside a user's `shard_map` that is here, where types say what differs between devices. In the global view it
        is in a region of the library's own, the one without the type check: a program written for one device does not
        pass it (a scan's carry that starts as a constant), and without it autodiff inserts no reduction.

        Args:
          body: Takes parameters (shares at stage 3), arrays of the batch as `fold` gives them, `consts`, and the
            function that types a value as varying.
          params: The parameters.
          arrays: The arrays of the batch.
          consts: Arrays that are equal on all devices.
          out_specs: Specs of the results, in the global view.
          constrain_outputs: As for `open_region`.

        Returns:
          The results of `body`.
        """
        vary = varying_over(self.axes) if self.manual else unchecked

        def local(params: Sequence[Array], arrays: Sequence[Array], consts: Sequence[Array]) -> T:
            arrays = fold(self.arguments.arrays, arrays, self.axes, self.steps)
            # Shares stay on the host, if they are stored there, until they are gathered.
            return body(params if self.split else [host.to_device(x) for x in params], arrays, consts, vary)

        if self.manual:
            return local(params, arrays, consts)
        in_specs = (self.param_specs, self.batch_specs, PartitionSpec())
        run = open_region(
            self.options.mesh,
            self.axes,
            local,
            in_specs,
            out_specs,
            constrain_outputs=constrain_outputs,
            check_vma=False,
        )
        return run(params, arrays, consts)


def traced_per_call(
    call: str,
    options: Options,
    whole: Whole,
    fold_keys: bool,
    trace: Callable[[CallSpec, Sequence[Array]], TracedCall[T]],
    programs: Programs,
    steps: int = 1,
) -> Callable[..., T]:
    """A function of parameters and batch that checks and places them, traces a user's function and runs the program.

    Called eagerly it compiles a program once.

    Args:
      call: The name of the call, for errors.
      options: The options.
      whole: Which arguments are given whole to every device.
      fold_keys: Whether scalar keys are folded with the device's index.
      trace: Traces the user's function for one call, given the arrays of the batch.
      programs: Where compiled programs are kept.
      steps: Into how many microbatches the examples of each device are cut.

    Returns:
      The function.
    """

    def wrapped(params: PyTree, /, *batch: Any, **named: Any) -> T:
        axes, manual = resolve_axes(options, call)
        traced = manual or place.is_traced((params, batch, named))
        arguments, arrays = sort_arguments(batch, named, whole, fold_keys, traced, call)
        leaves = _param_leaves(call, params, axes, options, manual)
        spec = CallSpec(options, axes, manual, leaves, arguments, steps)
        flat = jax.tree.leaves(params)
        sizes = (1, 1) if manual else (axes.n, axes.r)
        check_divides(arguments.arrays, arrays, sizes, steps, call)
        if math.prod(sizes) * steps > 1:
            check_agree(arguments.arrays, arrays, whole, call)
        if not manual:
            flat, arrays = _placed(call, spec, flat, arrays)
        done = trace(spec, arrays)
        consts = done.program.consts
        if traced or place.is_traced(consts):
            return done.run(flat, arrays, consts)
        return programs.compiled(spec, done)(flat, arrays, _placed_consts(call, spec, consts))

    return wrapped


def _param_leaves(call: str, params: PyTree, axes: Axes, options: Options, manual: bool) -> Leaves:
    """The leaves of the parameters; refuses such as are not stored as the stage says."""
    checks.check_params(call, options, params)
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
                f"stage. Fix: {RESHARD}"
            )
    return leaves


def _placed(
    call: str, spec: CallSpec, params: Sequence[Array], arrays: Sequence[Array]
) -> tuple[list[Array], list[Array]]:
    """Parameters and arrays of the batch where the specs say, in the global view."""
    mesh, options = spec.options.mesh, spec.options
    kind = lambda leaf: memory_kind(options, "params", leaf.layout)
    rows = zip(spec.leaves.leaves, params, spec.param_specs, strict=True)
    return (
        [place.place(call, mesh, leaf.path, x, s, spec.axes.every, kind(leaf)) for leaf, x, s in rows],
        [place.place(call, mesh, (), x, s, mesh.axis_names) for x, s in zip(arrays, spec.batch_specs, strict=True)],
    )


def _placed_consts(call: str, spec: CallSpec, consts: Sequence[Array]) -> list[Array]:
    """What a function closes over, equal on all devices of the library's axes; other axes may shard it."""
    mesh = spec.options.mesh
    others = [a for a in mesh.axis_names if a not in spec.axes.every]

    def spec_of(x: Array) -> PartitionSpec:
        sharding = getattr(x, "sharding", None)  # NumPy arrays have none
        if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
            return only(sharding.spec, others)
        return PartitionSpec()

    specs = [spec_of(x) for x in consts]
    return place.place_all(call, mesh, None, consts, specs, spec.axes)
