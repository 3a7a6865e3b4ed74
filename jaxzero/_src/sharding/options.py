"""The options of a `Zero`, validated once, and what they mean for one call."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from .._text import nearest
from .._types import AxisNames, DType, HasShape, Path, PyTree
from .axes import Axes, in_manual_region, names, resolve
from .axis_checks import check_axes, check_hops, check_types
from .host import PINNED_HOST, lacking
from .layout import Layout, OtherAxes
from .leaves import Leaves, leaves_of
from .overwritten import in_flax_collection
from .param_specs import axes_of, check_spec_axes, normal
from .scalars import is_int, python_scalar

#: Measured (`benchmarks/buckets.py`): from here on joining costs more in copies than it saves in calls.
BUCKET_BYTES = 256 * 2**10
#: How many large gathers of stage 3 may run ahead of the computation.
PREFETCH = 2
#: Parameters up to this size stay whole from their first use to the end of the backward pass.
PERSIST_BYTES = 64 * 2**10
#: Smaller parameters of stage 3 travel together.
CHUNK_BYTES = 1 * 2**20


@dataclasses.dataclass(frozen=True)
class Options:
    """How training state is split; see `Zero`, which adds the operations."""

    mesh: Any = None
    _: dataclasses.KW_ONLY
    stage: int = 2
    shard_axis: AxisNames = "data"
    replica_axis: AxisNames | None = None
    hierarchical: bool | None = None
    bucket_bytes: int | None = BUCKET_BYTES
    deal: bool = True
    reduce_dtype: jax.typing.DTypeLike | None = None
    predivide: float | None = None
    stacked: Callable[[Path], int] | None = None
    param_specs: PyTree = None
    overwrite: Callable[[Path], bool] | None = None
    prefetch: int = PREFETCH
    persist_bytes: int = PERSIST_BYTES
    chunk_bytes: int | None = CHUNK_BYTES
    regather: str | None = None
    unused: str = "zero"
    offload: tuple[str, ...] = ()
    observed: Any = None

    def __new__(cls, *args: Any, **options: Any) -> "Options":
        """Refuses unknown options by name, with the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                fix = nearest(name, known, "{}=") or "Fix: drop it."
                raise ValueError(f"Zero: unknown option {name!r}. Expected one of {known}. {fix}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            object.__setattr__(self, name, python_scalar(getattr(self, name)))
        _check_mesh(self.mesh)
        _check_choices(self)
        _check_sizes(self)
        _check_regather(self)
        _check_reduction(self)
        for name, word in (("stacked", "layers"), ("overwrite", "amax")):
            if (given := getattr(self, name)) is not None and not callable(given):
                raise ValueError(
                    f"Zero: {name}={given!r}. Expected a predicate on key paths or None. Fix: "
                    f"{name}=lambda path: {word!r} in jax.tree_util.keystr(path)."
                )
        object.__setattr__(self, "offload", _check_offload(self))
        check_axes(self.mesh, self.shard_axis, self.replica_axis)
        object.__setattr__(self, "param_specs", normal(self.param_specs))
        if self.mesh is not None:
            check_spec_axes(self.param_specs, self.mesh.shape, self.replica_axes + self.shard_axes)
        check_hops(self.mesh, self.shard_axes, self.hierarchical)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Names of the shard axes, outer first."""
        return names(self.shard_axis)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Names of the replica axes."""
        return names(self.replica_axis)


STAGES = (1, 2, 3)
#: The options that are numbers or flags.
_NUMBERS = ("stage", "bucket_bytes", "prefetch", "persist_bytes", "chunk_bytes", "predivide", "hierarchical")
OFFLOAD = ("state", "params")
REGATHER = (None, "local", "never")
UNUSED = ("zero", "skip", "error")


def _check_mesh(mesh: object) -> None:
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ValueError(
            f"Zero: mesh={mesh!r} is no mesh. Found {type(mesh).__name__}; expected a "
            "jax.sharding.Mesh. Fix: jax.make_mesh((8,), ('data',)), or keyword arguments for "
            "everything after the mesh."
        )


def _check_choices(options: Options) -> None:
    if options.stage not in STAGES or isinstance(options.stage, bool):
        raise ValueError(
            f"Zero: stage={options.stage!r}. Expected one of {STAGES}. Fix: stage=1 splits optimizer "
            "state, stage=2 gradients too, stage=3 parameters too."
        )
    if options.unused not in UNUSED:
        raise ValueError(
            f"Zero: unused={options.unused!r}. Expected one of {UNUSED}. Fix: 'zero' gives unused parameters a zero "
            "gradient, 'skip' leaves them and their state untouched, 'error' refuses them."
        )


def _check_sizes(options: Options) -> None:
    size = options.bucket_bytes
    if size is not None and not is_int(size, 1):
        raise ValueError(
            f"Zero: bucket_bytes={size!r}. Expected a positive int, or None for no buckets. "
            f"Fix: for example bucket_bytes={BUCKET_BYTES}."
        )
    if not isinstance(options.deal, bool):
        raise ValueError(
            f"Zero: deal={options.deal!r}. Expected True or False. Fix: deal=False makes every device do all work on "
            "whole matrices."
        )
    _check_count("prefetch", options.prefetch, 0, f"large gathers that may run ahead. Fix: prefetch={PREFETCH}.")
    _check_count("persist_bytes", options.persist_bytes, 0, "bytes. Fix: persist_bytes=0 keeps nothing whole.")
    if options.chunk_bytes is not None:
        _check_count("chunk_bytes", options.chunk_bytes, 1, "bytes, or None. Fix: chunk_bytes=None for no chunks.")


def _check_reduction(options: Options) -> None:
    if options.reduce_dtype is not None:
        _check_dtype(options.reduce_dtype)
    if options.predivide is not None:
        _check_divisor(options.predivide)


def _check_offload(options: Options) -> tuple[str, ...]:
    given: Any = options.offload
    names = given is None or isinstance(given, (tuple, list))
    found = tuple(given or ()) if names else ()
    if not names or any(x not in OFFLOAD for x in found):
        raise ValueError(
            f"Zero: offload={given!r}. Expected a tuple of names among {OFFLOAD}: what rests in the host's "
            "memory. Fix: offload=('state',)."
        )
    kinds = lacking(options.mesh) if found else ()
    if kinds:
        raise ValueError(
            f"Zero: offload={found!r}, but the devices of the mesh cannot reach the host's memory. Found memory "
            f"kinds {sorted(kinds)}; expected {PINNED_HOST!r} among them. Fix: drop offload on this backend."
        )
    return found


def _check_regather(options: Options) -> None:
    if options.regather not in REGATHER:
        raise ValueError(
            f"Zero: regather={options.regather!r}. Expected one of {REGATHER}. Fix: regather='local' keeps a share of "
            "each node for the backward pass, 'never' the whole parameter."
        )
    if options.regather == "never" and options.stage != 3:
        raise ValueError(
            f"Zero: regather='never' with stage={options.stage}. Expected stage=3: below it apply gathers the new "
            "parameters. Fix: stage=3, which gathers each parameter once, where the next step first uses it."
        )
    if options.regather and options.stage != 3:
        raise ValueError(
            f"Zero: regather={options.regather!r} with stage={options.stage}. Expected stage=3, where the backward "
            "pass gathers parameters again. Fix: drop regather."
        )
    _check_node_shards(options)


def _check_node_shards(options: Options) -> None:
    if options.regather == "never":
        return
    if options.regather and (len(options.shard_axes) < 2 or options.hierarchical is False):
        raise ValueError(
            f"Zero: regather={options.regather!r} with shard_axis={options.shard_axis!r} and hierarchical="
            f"{options.hierarchical!r}. Expected a tuple of shard axes, gathered hop by hop: the last one is inside a "
            "node. Fix: shard_axis=('node', 'local'), or drop regather."
        )
    if options.regather and options.param_specs is not None:
        raise ValueError(
            f"Zero: regather={options.regather!r} with param_specs. Expected one of the two: a share of each node is "
            "kept flat, which leaves of other mesh axes cannot be. Fix: drop regather."
        )


def _check_count(name: str, value: object, least: int, what: str) -> None:
    if not is_int(value, least):
        raise ValueError(f"Zero: {name}={value!r}. Expected an int of at least {least}: {what}")


def _check_dtype(dtype: jax.typing.DTypeLike) -> None:
    if not is_wire_dtype(dtype):
        raise ValueError(
            f"Zero: reduce_dtype={dtype!r}. Expected a floating dtype of 16 bits or more, or None for float32 (wider "
            "leaves keep their own). Fix: for example reduce_dtype=jnp.bfloat16."
        )


def is_wire_dtype(dtype: DType) -> bool:
    """Whether sums can be taken in a dtype: floats of fewer than 16 bits do not promote, and overflow."""
    if dtype is None:  # NumPy reads it as float64
        return False
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        return False
    return bool(jnp.issubdtype(found, jnp.floating)) and jnp.finfo(found).bits >= 16


def _check_divisor(value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise ValueError(
            f"Zero: predivide={value!r}. Expected a positive number, or None: the number of summands in a narrow "
            "reduce_dtype, 1 in others. Fix: for example predivide=8."
        )


# --- the options of one part of the library --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GatherOptions:
    """When parameters are gathered and their gradients reduced; each as in `Zero`, and what follows from the stage.

    Attributes:
      prefetch: As in `Zero`.
      persist_bytes: As in `Zero`; with `regather="never"` any size persists.
      chunk_bytes: As in `Zero`; at stage 2 `bucket_bytes`, as only gradients travel.
      node_shards: Whether the backward pass gathers from node shards (`regather="local"`).
      several_hops: Whether a gather has several hops.
      several_sums: Whether a gradient is reduced by several collectives, one for each hop or over the replicas too.
      sum_first: Whether the terms of a gradient are added before they are reduced. Where a parameter is gathered for
        each of its uses, each term is reduced where it is computed: a sum would be whole from the first to the last.
    """

    prefetch: int = PREFETCH
    persist_bytes: int = PERSIST_BYTES
    chunk_bytes: int | None = CHUNK_BYTES
    node_shards: bool = False
    several_hops: bool = False
    several_sums: bool = False
    sum_first: bool = False


@dataclasses.dataclass(frozen=True)
class ReduceOptions:
    """How gradients are summed over devices; each as in `Zero`."""

    reduce_dtype: jax.typing.DTypeLike | None = None
    predivide: float | None = None
    bucket_bytes: int | None = BUCKET_BYTES


def gather_options(options: Options, axes: Axes) -> GatherOptions:
    """The options of gathers over `axes`; `regather="local"` has no effect where gathers take a single hop."""
    several = len(axes.hops) > 1
    local = options.regather == "local" and several
    persist = sys.maxsize if options.regather == "never" else options.persist_bytes
    split = options.stage == 3
    small = options.chunk_bytes if split else options.bucket_bytes
    sums = several or bool(axes.replica)
    return GatherOptions(options.prefetch, persist, small, local, several, sums, sum_first=not split)


def reduce_options(options: Options) -> ReduceOptions:
    """The options of the reduction of gradients."""
    return ReduceOptions(options.reduce_dtype, options.predivide, options.bucket_bytes)


# --- the options of one call ----------------------------------------------------------------------


def resolve_axes(options: Options, call: str) -> tuple[Axes, bool]:
    """The axes with their sizes, and whether the call stands inside a user's `shard_map`."""
    manual = in_manual_region(call, options.shard_axes, options.replica_axes)
    if manual and options.offload:
        raise ValueError(
            f"{call}: offload={options.offload!r} inside a shard_map. Found a call in a manual region, where arrays "
            "are moved by you; expected the global view. Fix: call it outside, or drop offload and move the state "
            "with jax.device_put(x, jax.memory.Space.Device) and .Host yourself."
        )
    if manual:
        check_hops(jax.sharding.get_abstract_mesh(), options.shard_axes, options.hierarchical)
    elif options.mesh is not None:
        check_types(call, options.mesh)
    axes = resolve(call, options.mesh, options.shard_axes, options.replica_axes, manual)
    return dataclasses.replace(axes, hierarchical=options.hierarchical is not False), manual


def param_leaves(options: Options, tree: PyTree, n: int, *, shares: bool = False) -> Leaves:
    """The leaves of a tree of parameters over `n` shares, with their layouts; `shares` as for `leaves_of`."""
    others = functools.partial(other_axes, options)
    overwrite = options.overwrite or in_flax_collection
    return leaves_of(tree, n, options.stacked, others, shares=shares, overwrite=overwrite)


def other_axes(options: Options, path: Path, leaf: HasShape) -> OtherAxes:
    """The other mesh axes that shard each dimension of a leaf; empty where none does."""
    if options.param_specs is None:
        return ()
    here = jax.sharding.get_abstract_mesh()
    sizes = here.shape if options.mesh is None else options.mesh.shape
    own = options.replica_axes + options.shard_axes
    typed = {*here.manual_axes, *here.explicit_axes} if here.manual_axes else ()
    return axes_of(options.param_specs, path, leaf, sizes, own, typed)


def memory_kind(options: Options, what: str, layout: Layout | None) -> str | None:
    """The memory kind in which a leaf of the state or the parameters is kept; small whole ones stay on the device."""
    return PINNED_HOST if what in options.offload and layout is not None else None


def require_observed(options: Options, call: str) -> None:
    """Refuses an option for unused parameters where no loss was observed that could show which these are."""
    if options.unused != "zero" and options.observed is None:
        raise ValueError(
            f"{call}: unused={options.unused!r}, but which parameters are unused is not known. Found no "
            "observed loss; expected one. Fix: zero = zero.observe(loss_fn, params, *batch) first."
        )


def plain_options(options: Options) -> Options:
    """The options alone, of an object that is more: equal ones share compiled programs."""
    return Options(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Options)})
