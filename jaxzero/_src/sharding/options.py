"""The options that every part of the library reads, validated once."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from .._text import nearest
from . import axes as sharding_axes
from . import axis_checks, host
from . import param_specs as sharding_param_specs
from .axes import AxisNames
from .layout import OtherAxes
from .leaves import Leaves, leaves_of
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
    reduce_dtype: Any = None
    predivide: float | None = None
    stacked: Callable[[Any], int] | None = None
    param_specs: Any = None
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
        if self.mesh is not None and not isinstance(self.mesh, (Mesh, AbstractMesh)):
            raise ValueError(
                f"Zero: mesh={self.mesh!r} is no mesh. Found {type(self.mesh).__name__}; expected a "
                "jax.sharding.Mesh. Fix: jax.make_mesh((8,), ('data',)), or keyword arguments for "
                "everything after the mesh."
            )
        if self.stage not in STAGES or isinstance(self.stage, bool):
            raise ValueError(
                f"Zero: stage={self.stage!r}. Expected one of {STAGES}. Fix: stage=1 splits optimizer "
                "state, stage=2 gradients too, stage=3 parameters too."
            )
        if self.bucket_bytes is not None and not is_int(self.bucket_bytes, 1):
            raise ValueError(
                f"Zero: bucket_bytes={self.bucket_bytes!r}. Expected a positive int, or None for no buckets. "
                f"Fix: for example bucket_bytes={BUCKET_BYTES}."
            )
        _check_count("prefetch", self.prefetch, 0, f"large gathers that may run ahead. Fix: prefetch={PREFETCH}.")
        _check_count("persist_bytes", self.persist_bytes, 0, "bytes. Fix: persist_bytes=0 keeps nothing whole.")
        if self.chunk_bytes is not None:
            _check_count("chunk_bytes", self.chunk_bytes, 1, "bytes, or None. Fix: chunk_bytes=None for no chunks.")
        self._check_regather()
        if self.unused not in UNUSED:
            raise ValueError(
                f"Zero: unused={self.unused!r}. Expected one of {UNUSED}. Fix: 'zero' gives unused parameters a zero "
                "gradient, 'skip' leaves them and their state untouched, 'error' refuses them."
            )
        if self.reduce_dtype is not None:
            _check_dtype(self.reduce_dtype)
        if self.predivide is not None:
            _check_divisor(self.predivide)
        if self.stacked is not None and not callable(self.stacked):
            raise ValueError(
                f"Zero: stacked={self.stacked!r}. Expected a predicate on key paths or None. Fix: "
                "stacked=lambda path: 'layers' in jax.tree_util.keystr(path)."
            )
        self._check_offload()
        axis_checks.check_axes(self.mesh, self.shard_axis, self.replica_axis)
        object.__setattr__(self, "param_specs", sharding_param_specs.normal(self.param_specs))
        if self.mesh is not None:
            sharding_param_specs.check_axes(self.param_specs, self.mesh.shape, self.replica_axes + self.shard_axes)
        axis_checks.check_hops(self.mesh, self.shard_axes, self.hierarchical)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Names of the shard axes, outer first."""
        return sharding_axes.names(self.shard_axis)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Names of the replica axes."""
        return sharding_axes.names(self.replica_axis)

    def _check_offload(self) -> None:
        given: Any = self.offload
        names = given is None or isinstance(given, (tuple, list))
        found = tuple(given or ()) if names else ()
        if not names or any(x not in OFFLOAD for x in found):
            raise ValueError(
                f"Zero: offload={given!r}. Expected a tuple of names among {OFFLOAD}: what rests in the host's "
                "memory. Fix: offload=('state',)."
            )
        object.__setattr__(self, "offload", found)
        kinds = host.lacking(self.mesh) if found else ()
        if kinds:
            raise ValueError(
                f"Zero: offload={found!r}, but the devices of the mesh cannot reach the host's memory. Found memory "
                f"kinds {sorted(kinds)}; expected {host.KIND!r} among them. Fix: drop offload on this backend."
            )

    def _check_regather(self) -> None:
        if self.regather not in (None, "local"):
            raise ValueError(
                f"Zero: regather={self.regather!r}. Expected None or 'local'. Fix: regather='local' keeps a share of "
                "each node for the backward pass."
            )
        if self.regather and self.stage != 3:
            raise ValueError(
                f"Zero: regather={self.regather!r} with stage={self.stage}. Expected stage=3, where the backward pass "
                "gathers parameters again. Fix: drop regather."
            )
        if self.regather and (len(self.shard_axes) < 2 or self.hierarchical is False):
            raise ValueError(
                f"Zero: regather={self.regather!r} with shard_axis={self.shard_axis!r} and hierarchical="
                f"{self.hierarchical!r}. Expected a tuple of shard axes, gathered hop by hop: the last one is inside a "
                "node. Fix: shard_axis=('node', 'local'), or drop regather."
            )
        if self.regather and self.param_specs is not None:
            raise ValueError(
                f"Zero: regather={self.regather!r} with param_specs. Expected one of the two: a share of each node is "
                "kept flat, which leaves of other mesh axes cannot be. Fix: drop regather."
            )


STAGES = (1, 2, 3)
#: The options that are numbers or flags.
_NUMBERS = ("stage", "bucket_bytes", "prefetch", "persist_bytes", "chunk_bytes", "predivide", "hierarchical")
OFFLOAD = ("state", "params")
UNUSED = ("zero", "skip", "error")


def _check_count(name: str, value: Any, least: int, what: str) -> None:
    if not is_int(value, least):
        raise ValueError(f"Zero: {name}={value!r}. Expected an int of at least {least}: {what}")


def _check_dtype(dtype: Any) -> None:
    if not is_wire_dtype(dtype):
        raise ValueError(
            f"Zero: reduce_dtype={dtype!r}. Expected a floating dtype of 16 bits or more, or None for float32 (wider "
            "leaves keep their own). Fix: for example reduce_dtype=jnp.bfloat16."
        )


def is_wire_dtype(dtype: Any) -> bool:
    """Whether sums can be taken in a dtype: narrower floats than 16 bits neither promote nor hold a sum."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        return False
    if dtype is None:  # NumPy's default
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
    """When stage 3 gathers parameters; each as in `Zero`."""

    prefetch: int = PREFETCH
    persist_bytes: int = PERSIST_BYTES
    chunk_bytes: int | None = CHUNK_BYTES
    regather: str | None = None


@dataclasses.dataclass(frozen=True)
class ReduceOptions:
    """How gradients are summed over devices; each as in `Zero`."""

    reduce_dtype: Any = None
    predivide: float | None = None
    bucket_bytes: int | None = BUCKET_BYTES


def gather_options(options: Options, axes: sharding_axes.Axes) -> GatherOptions:
    """The options of gathers over `axes`; gathers of a single hop have no part inside a node to repeat."""
    regather = options.regather if len(axes.hops) > 1 else None
    return GatherOptions(options.prefetch, options.persist_bytes, options.chunk_bytes, regather)


def reduce_options(options: Options) -> ReduceOptions:
    """The options of the reduction of gradients."""
    return ReduceOptions(options.reduce_dtype, options.predivide, options.bucket_bytes)


# --- what options say of one call -----------------------------------------------------------------


def resolve_axes(options: Options, call: str) -> tuple[sharding_axes.Axes, bool]:
    """The axes with their sizes, and whether the call stands inside a user's `shard_map`."""
    manual = sharding_axes.in_manual_region(call, options.shard_axes, options.replica_axes)
    if manual and options.offload:
        raise ValueError(
            f"{call}: offload={options.offload!r} inside a shard_map. Found a call in a manual region, where arrays "
            "are moved by you; expected the global view. Fix: call it outside, or drop offload and move the state "
            "with jax.device_put(x, jax.memory.Space.Device) and .Host yourself."
        )
    if manual:
        axis_checks.check_hops(jax.sharding.get_abstract_mesh(), options.shard_axes, options.hierarchical)
    elif options.mesh is not None:
        axis_checks.check_types(call, options.mesh)
    axes = sharding_axes.resolve(call, options.mesh, options.shard_axes, options.replica_axes, manual)
    return dataclasses.replace(axes, hierarchical=options.hierarchical is not False), manual


def param_leaves(options: Options, tree: Any, n: int, *, shares: bool = False) -> Leaves:
    """The leaves of a tree of parameters over `n` shares, with their layouts; `shares` as for `leaves_of`."""
    return leaves_of(tree, n, options.stacked, functools.partial(other_axes, options), shares=shares)


def other_axes(options: Options, path: Any, leaf: Any) -> OtherAxes:
    """The other mesh axes that shard each dimension of a leaf; empty where none does."""
    if options.param_specs is None:
        return ()
    here = jax.sharding.get_abstract_mesh()
    sizes = here.shape if options.mesh is None else options.mesh.shape
    own = options.replica_axes + options.shard_axes
    typed = {*here.manual_axes, *here.explicit_axes} if here.manual_axes else ()
    return sharding_param_specs.other_axes(options.param_specs, path, leaf, sizes, own, typed)


def memory_kind(options: Options, what: str, layout: Any) -> str | None:
    """The memory kind at rest of a leaf of the state or the parameters; small whole ones stay on the device."""
    return host.KIND if what in options.offload and layout is not None else None


def require_observed(options: Options, call: str) -> None:
    """Refuses options that say what to do with unused parameters before anybody looked for them."""
    if options.unused != "zero" and options.observed is None:
        raise ValueError(
            f"{call}: unused={options.unused!r}, but which parameters are unused is not known. Found no "
            "observed loss; expected one. Fix: zero = zero.observe(loss_fn, params, *batch) first."
        )
