"""The even split of one array over `n` devices: shape arithmetic only, no devices and no arrays.

Device `i` of `n` holds the elements `[i*k, (i+1)*k)` of the row-major order, `k = ceil(size/n)`, the
tail padded with zeros. Where the cut dimension divides by `n` this is the same as cutting rows, so the
share keeps its rank and the stored array keeps its logical shape (kind *rows*). Otherwise the stored
array is one-dimensional and padded (kind *flat*). The first `lead` dimensions are never cut: a leaf
whose leading axis counts layers is split inside each layer. All offsets are Python integers, so arrays
above 2**31 elements are fine.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Literal, NoReturn, TypeGuard

import jax
import jax.export
from jax.sharding import PartitionSpec

from .._types import DType, PyTree

Shape = tuple[int, ...]
#: For each dimension the other mesh axes that shard it; empty where none shards any.
OtherAxes = tuple[tuple[str, ...], ...]

#: Arrays of fewer than `SMALL * n` elements that are not like a parameter stay whole.
SMALL = 8


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one array is cut over `n` devices: shapes only.

    Attributes:
      shape: The logical shape.
      n: The number of shares.
      kind: ``"rows"`` (dimension `lead` is cut, padded to a multiple of `n` where other axes forbid to ravel) or
        ``"flat"`` (the dimensions from `lead` on are ravelled, padded to a multiple of `n`, and cut).
      lead: The number of leading dimensions that are not cut.
      name: The path of its leaf, if any; collectives of compiled programs carry it. Not part of equality.
      other_axes: The other mesh axes that shard each dimension. Shapes are global over these axes.

    Examples:
      >>> Layout((5, 3), 4, "flat").stored_shape
      (16,)
      >>> Layout((6, 8, 3), 4, "rows", 1).local_shape
      (6, 2, 3)
      >>> Layout((5, 6), 4, "rows", other_axes=((), ("model",))).stored_shape
      (8, 6)
    """

    shape: Shape
    n: int
    kind: Literal["rows", "flat"]
    lead: int = 0
    name: str = dataclasses.field(default="", compare=False, repr=False)
    other_axes: OtherAxes = ()

    @property
    def length(self) -> int:
        """Elements of one device's share of one layer (of the whole array where `lead` is 0)."""
        return math.prod(self.local_shape[self.lead :])

    @property
    def local_shape(self) -> Shape:
        """The shape of one device's share."""
        before, cut = self.shape[: self.lead], self.shape[self.lead :]
        if self.kind == "rows":
            return (*before, -(-cut[0] // self.n), *cut[1:])
        return (*before, -(-math.prod(cut) // self.n))

    @property
    def stored_shape(self) -> Shape:
        """The shape of the global array that holds all shares."""
        local, lead = self.local_shape, self.lead
        return (*local[:lead], local[lead] * self.n, *local[lead + 1 :])

    @property
    def plain(self) -> bool:
        """Whether the stored array has the logical shape: rows without padding."""
        return self.kind == "rows" and self.shape[self.lead] % self.n == 0

    @property
    def size(self) -> int:
        """Elements of the logical array."""
        return math.prod(self.shape)

    @property
    def padding(self) -> int:
        """Elements of the stored array that belong to no logical element."""
        return math.prod(self.stored_shape) - self.size

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """The `PartitionSpec` of the stored array when `axes` (outer first) split it."""
        parts = list(self.other_axes) or [()] * (self.lead + 1)
        parts[self.lead] = axes
        return partition_spec(parts)

    def per_layer(self) -> "Layout":
        """The layout of one layer of a stacked leaf: the first dimension is gone."""
        return Layout(self.shape[1:], self.n, self.kind, self.lead - 1, self.name, _or_none(self.other_axes[1:]))

    def rows(self, shape: Shape, lead: int, origin: Sequence[int | None] = ()) -> "Layout":
        """Rows of another array over the same devices.

        Args:
          shape: Its shape.
          lead: The dimension that is cut.
          origin: For each of its dimensions, the one of this array that it comes from, if any.

        Returns:
          Its layout. Its other axes are a guess; a wrong one costs the compiler a reshard and changes no number.
        """
        if not self.other_axes:
            return Layout(tuple(shape), self.n, "rows", lead)
        kept = (
            self.other_axes[d] if d is not None and self.shape[d] == size else ()
            for d, size in zip(origin, shape, strict=True)
        )
        return Layout(tuple(shape), self.n, "rows", lead, other_axes=_or_none(tuple(kept)))


def _or_none(other_axes: OtherAxes) -> OtherAxes:
    return other_axes if any(other_axes) else ()


def partition_spec(parts: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Axes for each dimension as a `PartitionSpec`.

    Examples:
      >>> partition_spec([(), ("data",), ()]) == PartitionSpec(None, "data")
      True
    """
    entries = [(axes if len(axes) > 1 else axes[0]) if axes else None for axes in parts]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def even_split(shape: Shape, n: int, lead: int = 0, name: str = "", other_axes: OtherAxes = ()) -> Layout | None:
    """The layout of a parameter-like array of `shape`, or `None` where it stays whole.

    Scalars and empty arrays are whole, and so are a stacked leaf whose layers are scalars and a leaf that has
    no dimension (of a layer) without one of the other axes.

    Examples:
      >>> even_split((16, 3), 8)
      Layout(shape=(16, 3), n=8, kind='rows', lead=0, other_axes=())
      >>> even_split((3,), 8).padding
      5
      >>> even_split((), 8) is None
      True
      >>> even_split((6, 16), 8, other_axes=(("model",), ())).lead
      1
    """
    shape = tuple(shape)
    if len(shape) <= lead or math.prod(shape) == 0:
        return None
    if any(other_axes):
        free = [d for d in range(lead, len(shape)) if not other_axes[d]]
        return Layout(shape, n, "rows", free[0], name, other_axes) if free else None
    return Layout(shape, n, "rows" if shape[lead] % n == 0 else "flat", lead, name)


def default_split(shape: Shape, n: int) -> Layout | None:
    """The layout of an array that is not like a parameter: small ones stay whole.

    Examples:
      >>> default_split((5,), 8) is None
      True
      >>> default_split((64,), 8).local_shape
      (8,)
    """
    return None if math.prod(shape) < SMALL * n else even_split(shape, n)


_MISUSED = (
    "it is one split leaf, flat and padded. Fix: zero.value_and_grad(loss_fn) or zero.forward(fn) call a function "
    "of full parameters; zero.gather(tree) gives plain arrays; leaf.value is the stored one."
)


class _SplitLeafType(type):
    """The class of `EvenSplit`: its `repr` explains JAX's error for a tree map over split leaves beside whole arrays.

    JAX raises that error before any function of the library is called, and prints the class of the node.
    """

    def __repr__(cls) -> str:
        return (
            f"<class 'jaxzero.{cls.__name__}'> (a split leaf, beside a whole one. Fix: put a transformation of "
            "gradients inside the wrapper, zero.optimizer(optax.chain(...)); elsewhere zero.gather(tree) first)"
        )


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class EvenSplit(metaclass=_SplitLeafType):
    """A parameter or gradient whose stored array is padded (and mostly flat), with its logical shape.

    A pytree node with one child, so `jax.tree.map`, `jit` and `shard_map` see the stored array. The
    value is the array itself, a `PartitionSpec` (see `Zero.specs`), or whatever a tree map put there.

    Args:
      value: The stored array, `(n * k,)` with `k = ceil(size / n)`, or `(layers, n * k)` for a stacked
        leaf; of a leaf that other mesh axes shard, the logical array with one dimension padded. Inside a manual
        region this device's share of it.
      shape: The logical shape.

    Examples:
      >>> import jax.numpy as jnp
      >>> leaf = EvenSplit(jnp.zeros(8), (3, 2))
      >>> leaf.shape, leaf.ndim, leaf.size, leaf.dtype
      ((3, 2), 2, 6, dtype('float32'))
      >>> leaf
      EvenSplit(shape=(3, 2), stored=float32[8])
    """

    value: PyTree
    shape: Shape

    @property
    def dtype(self) -> DType:
        """The dtype of the stored array."""
        return self.value.dtype

    @property
    def size(self) -> int:
        """Elements of the logical array."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Dimensions of the logical array."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the logical array, without padding."""
        return self.size * self.dtype.itemsize

    def __eq__(self, other: object) -> bool:
        """Equal like a NamedTuple: the same logical shape and equal values."""
        if not isinstance(other, EvenSplit):
            return NotImplemented
        return (self.shape, self.value) == (other.shape, other.value)

    def __hash__(self) -> int:
        return hash((self.shape, self.value))

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Refuse the use as an array: the stored one is flat and padded."""
        raise ValueError(f"{self!r} was used as an array: {_MISUSED}")

    __jax_array__ = __getitem__ = __float__ = __int__ = __neg__ = __abs__ = __array__
    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __matmul__ = __array__
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = __rmatmul__ = __array__
    __lt__ = __le__ = __gt__ = __ge__ = __array__

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse attributes of arrays, such as `.T` or `.astype`, with the fix."""
        if name.startswith("__") or name in ("value", "shape"):  # copy and pickle look these up before they are set
            raise AttributeError(name)
        raise AttributeError(f"EvenSplit of shape {self.shape} has no attribute {name!r}: {_MISUSED}")

    def __repr__(self) -> str:
        value = self.value
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            value = f"{value.dtype.name}[{','.join(map(str, value.shape))}]"
        return f"EvenSplit(shape={self.shape}, stored={value})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[object, PyTree]], Shape]:
        """One child, keyed `value`; the logical shape is static."""
        return ((jax.tree_util.GetAttrKey("value"), self.value),), self.shape

    @classmethod
    def tree_unflatten(cls, shape: Shape, children: Sequence[PyTree]) -> "EvenSplit":
        """The inverse of `tree_flatten_with_keys`."""
        return cls(children[0], shape)


jax.export.register_pytree_node_serialization(
    EvenSplit,
    serialized_name="jaxzero.EvenSplit",
    serialize_auxdata=lambda shape: json.dumps([int(d) for d in shape]).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


def is_split(x: object) -> TypeGuard[EvenSplit]:
    """Whether `x` is an `EvenSplit` leaf; the `is_leaf` of every tree map over split trees."""
    return isinstance(x, EvenSplit)
