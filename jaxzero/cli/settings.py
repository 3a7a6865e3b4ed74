"""Arguments that several commands share."""

import dataclasses
import re
from typing import Annotated, Literal

import optax
import tyro
from jax.sharding import AbstractMesh

from .._src._types import AnyMesh
from .._src.gradients.checks import GradOptions
from .._src.sharding.options import BUCKET_BYTES, CHUNK_BYTES, PERSIST_BYTES, PREFETCH, resolve_axes
from .._src.zero import Zero
from . import optimizers
from .problem import Problem

REPLICA = "replica"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A user's function, and how its training state is split."""

    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODULE:FUNCTION")]
    """Returns parameters, abstract or real; or (parameters, loss_fn, *batch); or a Flax model and its inputs."""
    stage: Literal[1, 2, 3] = 2
    """1 splits optimizer state, 2 gradients too, 3 parameters too."""
    optimizer: Annotated[str, tyro.conf.arg(metavar="NAME")] = "adamw"
    """Any of optax or optax.contrib, or module:function for one of your own."""
    shard_axis: Annotated[str, tyro.conf.arg(metavar="AXIS,...")] = ""
    """Mesh axes that split the state, outer first. Default: all but the replica axes."""
    replica_axis: Annotated[str, tyro.conf.arg(metavar="AXIS,...")] = ""
    """Mesh axes over which it is repeated (MiCS). Default: the axis called replica, if there is one."""
    batch: int | None = None
    """Examples per step, over all devices. Default: as many as the function returns."""
    accumulate: int = 1
    """Micro-steps, whose gradients are added."""
    regather: Literal["local", "never"] | None = None
    """Stage 3: local gathers inside the node in the backward pass (hpZ), never keeps parameters whole until then."""
    bucket_bytes: int = BUCKET_BYTES
    """Stages 1 and 2: smaller leaves travel together."""
    prefetch: int = PREFETCH
    """Stage 3: large gathers that may run ahead."""
    persist_bytes: int = PERSIST_BYTES
    """Stage 3: parameters up to this size stay whole within a step."""
    chunk_bytes: int = CHUNK_BYTES
    """Stage 3: smaller parameters travel together."""
    json: bool = False
    """Print one JSON document."""

    def inner(self) -> optax.GradientTransformation:
        """The optimizer."""
        return optimizers.make(self.optimizer)

    def zero(self, mesh: AnyMesh) -> Zero:
        """The `Zero` over a mesh."""
        GradOptions(accumulate=self.accumulate).check("value_and_grad", self.stage)
        given = tuple(filter(None, self.replica_axis.split(",")))
        replica = given or tuple(a for a in mesh.axis_names if a == REPLICA)
        shard = tuple(filter(None, self.shard_axis.split(",")))
        shard = shard or tuple(a for a in mesh.axis_names if a not in replica)
        return Zero(
            mesh,
            stage=self.stage,
            shard_axis=shard[0] if len(shard) == 1 else shard,
            replica_axis=replica or None,
            bucket_bytes=self.bucket_bytes,
            prefetch=self.prefetch,
            persist_bytes=self.persist_bytes,
            chunk_bytes=self.chunk_bytes,
            regather=self.regather,
        )

    @staticmethod
    def parts(zero: Zero) -> int:
        """The number of devices among which examples are divided: over shard and replica axes, not over other axes."""
        axes, _ = resolve_axes(zero, "plan")
        return axes.n * axes.r

    def observed(self, zero: Zero, problem: Problem) -> Zero:
        """The `Zero` that has seen the loss, where there is one."""
        if problem.loss is None:
            return zero
        return zero.observe(problem.loss, problem.params, *problem.batch, whole_argnums=problem.whole)


def mesh_sizes(text: str) -> dict[str, int]:
    """Names and sizes of mesh axes from `replica=2,data=4`.

    Examples:
      >>> mesh_sizes("replica=2,data=4")
      {'replica': 2, 'data': 4}
    """
    pairs = [re.fullmatch(r"([A-Za-z_]\w*)=([1-9]\d*)", part.strip()) for part in text.split(",")]
    sizes = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if None in pairs or len(sizes) < len(pairs):
        raise ValueError(
            f"--mesh {text}: no mesh. Expected different axis names with positive sizes. Fix: for example "
            "--mesh data=8, or --mesh replica=2,node=2,local=8."
        )
    return sizes


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))
