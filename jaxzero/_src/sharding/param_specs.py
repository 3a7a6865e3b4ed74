"""`param_specs`: which other mesh axes shard each parameter already, read from the user's `PartitionSpec`s."""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence

import jax
from jax.sharding import PartitionSpec, Sharding

from .._text import path_text
from .._types import HasShape, Path, PyTree
from .axes import names
from .layout import OtherAxes, Shape

#: A function of the key path of a leaf and the abstract leaf.
SpecOf = Callable[[Path, HasShape], PartitionSpec | None]

_FIX = "Fix: per dimension None, or axes that are neither shard nor replica axes, e.g. PartitionSpec(None, 'model')."


@dataclasses.dataclass(frozen=True)
class ParamSpecs:
    """The specs of a tree of parameters, by key path.

    Attributes:
      paths: Key paths of leaves, each with its spec.
    """

    paths: tuple[tuple[Path, PartitionSpec], ...]

    @functools.cached_property
    def _known(self) -> dict[Path, PartitionSpec]:
        return {_unboxed(path): spec for path, spec in self.paths}

    def __call__(self, path: Path, leaf: HasShape) -> PartitionSpec:
        """The spec of one leaf."""
        found = self._known.get(_unboxed(path))
        if found is None:
            raise ValueError(
                f"Zero: param_specs has no leaf {path_text(path)!r}. Found "
                f"{[path_text(p) for p, _ in self.paths[:4]]}; expected a PartitionSpec "
                "for each parameter. Fix: a tree like them, e.g. "
                "jax.tree.map(lambda x: x.sharding.spec, params), or a function of (path, abstract leaf)."
            )
        return found


def _unboxed(path: Path) -> Path:
    """The path without the last step into a box: Flax gives parameters and specs in boxes and without them."""
    return path[:-1] if path and path[-1] == jax.tree_util.GetAttrKey("value") else path


def normal(given: PyTree) -> SpecOf | None:
    """`param_specs` as a function of (path, abstract leaf) that can be hashed."""
    if given is None or isinstance(given, ParamSpecs):
        return given
    is_leaf = lambda x: x is None or isinstance(x, PartitionSpec)
    pairs = jax.tree_util.tree_leaves_with_path(given, is_leaf=is_leaf)
    if callable(given) and _is_function(given, pairs):
        return given
    for path, spec in pairs:
        _check_kind(path, spec)
    return ParamSpecs(tuple((path, PartitionSpec() if spec is None else spec) for path, spec in pairs))


def _is_function(given: PyTree, pairs: Sequence[tuple[Path, object]]) -> bool:
    """Whether a callable is a function of (path, leaf): a tree of specs may have a `__call__` too, as modules have."""
    if any(x is given for _, x in pairs):  # not a container that JAX has registered
        return True
    return not any(x is None or isinstance(x, (PartitionSpec, Sharding)) for _, x in pairs)


def check_spec_axes(specs: SpecOf | None, sizes: Mapping[str, int], own: tuple[str, ...]) -> None:
    """Refuses unknown axes as soon as the mesh is known."""
    if isinstance(specs, ParamSpecs):
        for path, spec in specs.paths:
            _check_axes(path, spec, sizes, own)


def axes_of(
    specs: SpecOf,
    path: Path,
    leaf: HasShape,
    sizes: Mapping[str, int],
    own: tuple[str, ...],
    typed: Container[str] = (),
) -> OtherAxes:
    """The other axes that shard each dimension of a leaf; empty where none does.

    Args:
      specs: A function of (path, abstract leaf).
      path: The leaf's key path.
      leaf: The leaf, abstract.
      sizes: Devices along each axis of the mesh.
      own: The shard and replica axes.
      typed: Axes that are manual or Explicit where the call stands, inside a user's `shard_map`.
    """
    spec = specs(path, leaf)
    spec = PartitionSpec() if spec is None else spec
    _check_kind(path, spec)
    _check_axes(path, spec, sizes, own)
    parts = [names(part) for part in spec]
    parts += [()] * (len(leaf.shape) - len(parts))
    _check_shape(path, spec, parts, leaf.shape, sizes)
    _check_auto(path, spec, typed)
    return tuple(parts) if any(parts) else ()


def _check_kind(path: Path, spec: object) -> None:
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise ValueError(
            f"Zero: param_specs: leaf {path_text(path)!r} is a {type(spec).__name__}. Expected a PartitionSpec. {_FIX}"
        )


def _check_axes(path: Path, spec: PartitionSpec, sizes: Mapping[str, int], own: tuple[str, ...]) -> None:
    axes = [a for part in spec for a in names(part)]
    if unknown := [a for a in axes if a not in sizes]:
        raise ValueError(
            f"Zero: param_specs: leaf {path_text(path)!r} has {spec}. Found axis {unknown[0]!r}, which is not in the "
            f"mesh; expected axes of {dict(sizes)}. {_FIX}"
        )
    if mine := [a for a in axes if a in own]:
        raise ValueError(
            f"Zero: param_specs: leaf {path_text(path)!r} has {spec}. Found {mine[0]!r}, over which this Zero "
            "splits or repeats the state itself; expected only other axes. Fix: drop it from the spec; jaxzero adds it."
        )
    if twice := [a for a in axes if axes.count(a) > 1]:
        raise ValueError(
            f"Zero: param_specs: leaf {path_text(path)!r} has {spec}. Found axis {twice[0]!r} twice; expected "
            f"each axis once. {_FIX}"
        )


def _check_shape(
    path: Path, spec: PartitionSpec, parts: Sequence[tuple[str, ...]], shape: Shape, sizes: Mapping[str, int]
) -> None:
    if len(parts) > len(shape):
        raise ValueError(
            f"Zero: param_specs: leaf {path_text(path)!r} of shape {shape} has {spec}. Found {len(spec)} entries; "
            f"expected at most {len(shape)}, one per dimension. {_FIX}"
        )
    for d, axes in enumerate(parts):
        count = math.prod(sizes[a] for a in axes)
        if shape[d] % count:
            raise ValueError(
                f"Zero: param_specs: leaf {path_text(path)!r} of shape {shape} has {spec}. Found dimension {d} of "
                f"{shape[d]}, which does not divide by the {count} devices of {axes}; expected one that does. Fix: pad "
                "that dimension, or leave it whole: None in the spec."
            )


def _check_auto(path: Path, spec: PartitionSpec, typed: Container[str]) -> None:
    if found := [a for part in spec for a in names(part) if a in typed]:
        raise ValueError(
            f"Zero: param_specs: leaf {path_text(path)!r} has {spec}, and inside this shard_map axis {found[0]!r} is "
            "manual or Explicit. Expected it to be Auto there, left to the compiler. Fix: leave it out of axis_names= "
            "of that shard_map, with AxisType.Auto for it in the mesh; or call jaxzero outside of it."
        )
