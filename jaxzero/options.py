"""The options that every part of the library reads, validated once."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from . import mesh as meshes
from .mesh import AxisNames

#: Measured (`benchmarks/buckets.py`): from here on joining costs more in copies than it saves in calls.
BUCKET_BYTES = 256 * 2**10


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
    stacked: Callable[[Any], bool] | None = None

    def __new__(cls, *args: Any, **options: Any) -> "Options":
        """Refuses unknown options by name, with the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                fix = f"Fix: did you mean {near[0]}=?" if near else "Fix: drop it."
                raise ValueError(f"Zero: unknown option {name!r}. Expected one of {known}. {fix}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, (Mesh, AbstractMesh)):
            raise ValueError(
                f"Zero: mesh={self.mesh!r} is no mesh. Found {type(self.mesh).__name__}; expected a "
                "jax.sharding.Mesh. Fix: jax.make_mesh((8,), ('data',)), or keyword arguments for "
                "everything after the mesh."
            )
        if self.stage not in STAGES or isinstance(self.stage, bool):
            raise ValueError(
                f"Zero: stage={self.stage!r}. Expected one of {STAGES}. Fix: stage=2 splits optimizer "
                "state and gradients, stage=1 optimizer state alone."
            )
        size = self.bucket_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(
                f"Zero: bucket_bytes={size!r}. Expected a positive int, or None for no buckets. "
                f"Fix: for example bucket_bytes={BUCKET_BYTES}."
            )
        if self.reduce_dtype is not None:
            _check_dtype(self.reduce_dtype)
        if self.stacked is not None and not callable(self.stacked):
            raise ValueError(
                f"Zero: stacked={self.stacked!r}. Expected a predicate on key paths or None. Fix: "
                "stacked=lambda path: 'layers' in jax.tree_util.keystr(path)."
            )
        meshes.check_axes(self.mesh, self.shard_axis, self.replica_axis)
        meshes.check_hops(self.mesh, self.shard_axes, self.hierarchical)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Names of the shard axes, outer first."""
        return meshes.names(self.shard_axis)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Names of the replica axes."""
        return meshes.names(self.replica_axis)

    def context(self, call: str) -> tuple[meshes.Axes, bool]:
        """The axes with their sizes, and whether the call stands inside a user's `shard_map`."""
        manual = meshes.in_manual_region(call, self.shard_axes, self.replica_axes)
        if manual:
            meshes.check_hops(jax.sharding.get_abstract_mesh(), self.shard_axes, self.hierarchical)
        axes = meshes.resolve(call, self.mesh, self.shard_axes, self.replica_axes, manual)
        return dataclasses.replace(axes, hierarchical=self.hierarchical is not False), manual


STAGES = (1, 2)


def _check_dtype(dtype: Any) -> None:
    try:
        fits = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(
            f"Zero: reduce_dtype={dtype!r}. Expected a floating dtype, or None for float32 (wider "
            "leaves keep their own). Fix: for example reduce_dtype=jnp.bfloat16."
        )
