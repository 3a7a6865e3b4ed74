"""Options of XLA under which collectives run behind matrix products."""

from typing import Any

from jax.sharding import Mesh

from ..sharding.options import Options

#: GPU: one bucket per reduce-scatter and all-gather. XLA joins those of 30 MB and more in all, and one that joins all
#: layers can start when the last is ready, behind nothing.
_SEPARATE = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_all_gather_combine_threshold_bytes": 1,
}
#: GPU: how many collectives may be on the wire at a time. By default it is one: a gather waits for a reduction to end.
_IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"


def compiler_options(options: Options) -> dict[str, Any]:
    """See `Zero.compiler_options`."""
    return for_mesh(options.mesh) if isinstance(options.mesh, Mesh) else {}


def for_mesh(mesh: Mesh) -> dict[str, Any]:
    """The options for the devices of a mesh."""
    on_gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    return {**_SEPARATE, _IN_FLIGHT: 2} if on_gpu else {}
