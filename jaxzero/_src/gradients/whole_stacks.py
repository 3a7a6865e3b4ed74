"""A warning where a program scans over layers that the stored layout does not know: all are gathered at once."""

import math
import warnings
from collections.abc import Mapping

from .._text import path_text
from ..fsdp.observe import scanned_layers
from ..jaxpr.flat import Flat, Var
from ..sharding.leaves import Leaf
from ..sharding.options import gather_options
from .call import CallSpec

#: From how many bytes on a stack of layers that is gathered at once is worth a word.
WORTH_A_WARNING = 2**20


def warn_of_whole_stacks(call: str, spec: CallSpec, flat: Flat, params: Mapping[Var, int]) -> None:
    """Warns of leaves that a scan reads layer by layer, but that were split as one array.

    The layout is a function of the options alone, so that optimizers and checkpoints agree on it: it is not changed
    for a loss that is seen after the parameters were split.

    Args:
      call: The name of the call.
      spec: The call.
      flat: The traced program.
      params: The inputs that are parameters -> their numbers.
    """
    layers = scanned_layers(flat, params)
    kept = gather_options(spec.options, spec.axes).persist_bytes
    dear = [
        leaf
        for i, leaf in enumerate(spec.leaves.leaves)
        if leaf.layout is not None
        and leaf.layout.lead < layers.get(i, 0)
        and _nbytes(leaf) > max(kept, WORTH_A_WARNING)
    ]
    if dear:
        names, total = [path_text(leaf.path) for leaf in dear[:4]], sum(map(_nbytes, dear)) / 1e6
        warnings.warn(
            f"{call}: a scan reads {names} layer by layer, but each was split as one array, so all layers are gathered "
            f"at once: {total:.1f} MB on every device. Fix: observe the loss before you split the parameters, "
            "zero = zero.observe(loss_fn, params, *batch), then zero.shard(params) or zero.init(init_fn, key).",
            stacklevel=2,
        )


def _nbytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
