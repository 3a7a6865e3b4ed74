"""Leaves whose gradient is their next value: the scales and the history of maxima of 8-bit floats (FP8).

A product in FP8 gives back, as the gradient of its scale, the scale of the next step, and as that of its history of
maxima the new history. So nothing is averaged, divided or added: devices and microbatches give the largest value.
"""

from .._types import Path

#: Flax's collection of such leaves (`flax.linen.fp8_ops`).
FLAX_COLLECTION = "_overwrite_with_gradient"


def in_flax_collection(path: Path) -> bool:
    """Whether a leaf lies in Flax's collection of leaves that their gradients overwrite."""
    return any(getattr(key, "key", None) == FLAX_COLLECTION for key in path)
