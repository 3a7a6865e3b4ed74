"""Save and restore: on disk each leaf has its logical shape and is stored once, for any mesh and layout."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from .._types import JSON, PyTree
from ..comm import placement
from ..jaxpr.compat import as_weak, is_weak
from ..optimizer.wrapper import wrap
from ..sharding import processes
from ..sharding.axes import Axes
from ..sharding.checks import check_arrays
from ..sharding.layout import is_split
from ..sharding.leaves import Leaves, state_leaves, wrap_padded
from ..sharding.options import Options, resolve_axes
from ..sharding.place import check_devices
from ..sharding.scalars import is_int, python_scalar
from . import checksums, orbax_io
from . import manifest as manifests
from .leaves import PARAMS, STATE, Entry, check_names, of_params, of_state, of_tree, saved, wanted_state

#: A folder that all processes see, or a bucket such as ``gs://...``.
Directory = str | os.PathLike[str]


class Restored(NamedTuple):
    """What `restore` returns.

    Attributes:
      params: The parameters, stored as the `Zero` says.
      opt_state: The optimizer state.
      step: The step that was read.
      extra: What `save` was given.
    """

    params: PyTree
    opt_state: PyTree
    step: int
    extra: JSON


@dataclasses.dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written in the background.

    Attributes:
      path: The folder of the step.
    """

    path: orbax_io.EPath

    def wait(self) -> None:
        """Returns when the checkpoint is complete.

        Raises:
          ValueError: If it could not be written. Earlier checkpoints are as they were.
        """
        orbax_io.wait()
        if not orbax_io.is_complete(self.path):
            raise ValueError(f"save: {self.path} was not written: an earlier call raised the reason. Fix: save again.")


def save(  # noqa: PLR0913 - one call holds all that a checkpoint has
    directory: Directory,
    step: int,
    zero: Options | None,
    params: PyTree,
    opt_state: PyTree,
    inner: optax.GradientTransformation | None = None,
    *,
    extra: JSON = None,
    keep: int | None = None,
) -> Saving:
    """Writes a checkpoint in the background: logical leaves, each once, without padding.

    Returns as soon as this process's part is copied to the host, so parameters and state may be donated. The step
    appears in `directory` only when it is complete. The next `save` waits for it, and raises if it failed. Every
    process must call it, and each writes its part. With several processes a device sends the beginning of each flat
    leaf's share, at most 1/8 of it, to the device before it; leaves with small shares are gathered one by one.
    When the step is complete, the next call of this module (`Saving.wait`, `save`, `latest`) reads it back and writes
    a checksum of each piece, which `restore` and `jaxzero doctor DIR` compare.

    Args:
      directory: A folder that all processes see, or a bucket (``gs://...``).
      step: The number of the step; the directory does not have it yet.
      zero: The `Zero` that split the state; `None` for a state that nothing split.
      params: The parameters as they are stored between steps.
      opt_state: The state of `zero.optimizer(inner)`.
      inner: The optimizer, not wrapped. Needed where a state leaf is flat and not of its parameter's shape
        (Adafactor's factors), because its logical shape follows from the optimizer alone. `save` raises then.
      extra: The position in the data and the like: JSON values; process 0's are written.
      keep: How many steps stay in the directory: once this one is complete, all but the newest, by number, are
        removed; this one stays. `None`: all.

    Returns:
      A `Saving`; its `wait()` returns when the step is complete. Call it on the last one, before the program ends.

    Raises:
      ValueError: If the step exists already, the directory cannot be written, the save before failed, a leaf does
        not fit, or processes disagree.

    Examples:
      >>> import tempfile, jax, jax.numpy as jnp, optax, jaxzero
      >>> zero, inner = jaxzero.Zero(jax.make_mesh((8,), ("data",))), optax.adam(1e-3)
      >>> params = zero.shard({"w": jnp.arange(5.0)})
      >>> directory = tempfile.mkdtemp()
      >>> jaxzero.save(directory, 100, zero, params, zero.optimizer(inner).init(params), extra={"epoch": 2}).wait()
      >>> abstract = {"w": jax.ShapeDtypeStruct((5,), jnp.float32)}
      >>> three = jaxzero.Zero(jax.make_mesh((3,), ("data",), devices=jax.devices()[:3]), stage=3)
      >>> restored = jaxzero.restore(directory, three, abstract, inner)
      >>> restored.params, restored.step, restored.extra
      ({'w': EvenSplit(shape=(5,), stored=float32[6])}, 100, {'epoch': 2})
    """
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise ValueError(f"save: step={step!r}. Expected an int of at least 0. Fix: the number of the training step.")
    keep = python_scalar(keep)
    if keep is not None and not is_int(keep, 1):
        raise ValueError(f"save: keep={keep!r}. Expected an int of at least 1, or None for all. Fix: keep=3.")
    axes = _axes("save", zero)
    extra = manifests.check_extra(extra)
    leaves, arrays = saved(zero, axes, params, opt_state, inner)
    orbax_io.wait()
    path = orbax_io.folder(directory) / str(int(step))
    facts = dict(step=step, directory=directory, keep=keep, leaves=manifests.fingerprint(leaves))
    processes.agree("save", zero, facts, orbax_io.obstacle(path))
    orbax_io.write(path, manifests.compose(zero, axes, int(step), leaves, extra), leaves, arrays, zero, axes, keep)
    return Saving(path)


def latest(directory: Directory) -> int | None:
    """The newest complete step in a directory, or `None`. Waits for an unfinished save of this program.

    Every process must call it, and all return the step that process 0 found.

    Args:
      directory: That of `save`; it need not exist.

    Returns:
      The step.

    Examples:
      >>> import jaxzero
      >>> jaxzero.latest("/no/such/directory") is None
      True
    """
    orbax_io.wait()
    step = processes.broadcast(max(orbax_io.complete_steps(directory), default=-1))
    return None if step < 0 else step


def restore(
    directory: Directory,
    zero: Options | None,
    abstract_params: PyTree,
    inner: optax.GradientTransformation | None,
    step: int | None = None,
    *,
    partial: bool = False,
    check: bool = True,
) -> Restored:
    """Reads a checkpoint into the layout of `zero`, whatever layout it was saved from.

    Each device's share is read from disk; nothing is sent. See `save` for an example.

    Args:
      directory: That of `save`.
      zero: The `Zero` that shall split the state, with any mesh, stage and options; `None`: whole, on one device.
      abstract_params: The parameters' tree at logical shapes: `jax.eval_shape(init_fn, key)`.
      inner: The optimizer, not wrapped; `None`: only the parameters are read.
      step: The step; `None`: the latest complete one.
      partial: Whether leaves may have been added or removed since: a parameter that the checkpoint lacks keeps its
        array in `abstract_params` and gets fresh state; leaves that are not in `abstract_params` are left out. Shapes
        and dtypes of all others must agree.
      check: Whether to compare what is read with its checksums first: it is read twice then. Steps of versions that
        wrote none are read without; `jaxzero doctor DIR` says so.

    Returns:
      A `Restored`: `params`, `opt_state`, `step`, `extra`.

    Raises:
      ValueError: If there is no such checkpoint, a part of it is missing or damaged, a newer version wrote it, or a
        leaf is missing, unexpected, or of another shape or dtype: by name.
    """
    axes = _axes("restore", zero)
    path, manifest = find("restore", directory, zero, latest(directory) if step is None else step)
    check_arrays("restore", abstract_params)
    if check:
        check_data("restore", path, zero, params_only=inner is None, skip=", or check=False to read it as it is")
    params = of_tree(zero, abstract_params, axes)
    leaves, state = of_params(zero, params), None
    if inner is not None:
        on_disk = {name: leaf for name, leaf in manifest["leaves"].items() if name.split("/")[0] == STATE}
        state = wanted_state(inner, params, axes, on_disk)
        leaves = leaves + of_state(zero, state_leaves(state, params.leaves, axes.n))
    check_names("restore", leaves)
    manifests.check_leaves(path, manifest, leaves, params_only=inner is None, partial=partial)
    arrays = orbax_io.read(path, zero, [e for e in leaves if e.name in manifest["leaves"]], axes)
    count = len(params.leaves)
    new_params = _params(path, zero, params, leaves[:count], arrays, abstract_params)
    if inner is not None and any(e.name not in arrays for e in leaves[count:]):
        fresh = inner.init(new_params) if zero is None else wrap(zero, inner, False).init(new_params)
        arrays = dict(zip((e.name for e in leaves[count:]), jax.tree.leaves(fresh), strict=True)) | arrays
    opt_state = jax.tree.map(
        lambda aval, x: as_weak(x) if is_weak(aval) else x,
        state,
        jax.tree.unflatten(jax.tree.structure(state), [arrays[e.name] for e in leaves[count:]]),
    )
    return Restored(new_params, opt_state, int(manifest["step"]), manifest["extra"])


def _axes(call: str, zero: Options | None) -> Axes:
    if zero is None:
        return Axes(("data",), (), (1,))
    if not isinstance(zero, Options):
        raise ValueError(
            f"{call}: zero is a {type(zero).__name__}. Expected a jaxzero.Zero, or None for a state that nothing "
            "split. Fix: jaxzero.Zero(mesh, stage=...)."
        )
    placement.outside(zero, call)
    check_devices(call, zero.mesh)
    return resolve_axes(zero, call)[0]


def find(
    call: str, directory: Directory, zero: Options | None, step: int | None
) -> tuple[orbax_io.EPath, dict[str, Any]]:
    """The folder of a step and its manifest; refuses an incomplete checkpoint, and one that is too new."""
    manifest: dict[str, Any] = {}
    path = orbax_io.folder(directory) / str(step)
    problem = (
        f"{call}: there is no complete checkpoint in {directory}. Expected one that jaxzero.save wrote. Fix: the "
        "directory; jaxzero.latest(directory) is None where there is none."
    )
    if step is not None:
        manifest, problem = orbax_io.read_manifest(path)
        if problem:
            problem = (
                f"{call}: {path} cannot be read: {problem}. Expected a complete checkpoint; complete steps here are "
                f"{orbax_io.complete_steps(directory)}. Fix: one of these, or permission to read."
            )
    processes.agree(call, zero, dict(step=step, directory=directory), problem)
    manifests.check_version(call, path, manifest)
    return path, manifest


def check_data(call: str, path: orbax_io.EPath, zero: Options | None, *, params_only: bool, skip: str = "") -> None:
    """Refuses a step whose data is not as it was written, by leaf path and file, on every process."""
    wanted = lambda leaf: not params_only or leaf.split("/")[0] == PARAMS
    processes.agree(call, zero, {}, checksums.refusal(call, path, checksums.check(path, wanted), skip))


def _params(
    path: orbax_io.EPath,
    zero: Options | None,
    params: Leaves,
    leaves: Sequence[Entry],
    arrays: Mapping[str, jax.Array],
    given: PyTree,
) -> PyTree:
    """The tree of parameters; those that the checkpoint lacks are the given arrays, placed as `zero` stores them."""
    out = []
    for e, x in zip(leaves, jax.tree.leaves(given, is_leaf=is_split), strict=True):
        if e.name in arrays:
            x = wrap_padded(arrays[e.name], e.layout)
        elif isinstance(x, jax.ShapeDtypeStruct):
            raise ValueError(
                f"restore: {path} has no leaf {e.name!r}, and abstract_params holds no array in its place. Expected "
                "one, which it then keeps. Fix: put its initial value into abstract_params."
            )
        out.append(x)
    tree = params.unflatten(out)
    if all(e.name in arrays for e in leaves):
        return tree
    return jax.tree.map(jax.numpy.asarray, tree) if zero is None else placement.shard(zero, tree)
