"""The host's memory: which memory kind it is, and moving arrays there and back."""

import jax
from jax.sharding import Mesh

from .._types import AnyMesh, ArrayLike, T

#: The memory kind of arrays that are kept in the host's memory.
PINNED_HOST = "pinned_host"


def on_host(x: ArrayLike) -> bool:
    """Whether an array, traced or not, is in the host's memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def to_device(x: T) -> T:
    """`x` in the device's memory."""
    return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x


def to_host(x: T) -> T:
    """`x` in the host's memory."""
    return x if on_host(x) else jax.device_put(x, jax.memory.Space.Host)


def lacking(mesh: AnyMesh | None) -> set[str]:
    """The memory kinds of a mesh's devices, where they are known and the host's is not among them."""
    devices = mesh.local_devices if isinstance(mesh, Mesh) else []  # a machine elsewhere has no memories
    kinds = {m.kind for device in devices[:1] for m in device.addressable_memories()}
    return set() if PINNED_HOST in kinds else kinds
