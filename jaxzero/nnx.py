"""Flax NNX: `init`, `shard`, `optimizer`, `observe`, `value_and_grad` and `forward` for whole models; needs Flax."""

from ._src._optional import need

need("flax.nnx", "flax", "jaxzero.nnx")

from ._src.flax_nnx import forward, init, observe, optimizer, shard, value_and_grad  # noqa: E402 - after the check

__all__ = ["forward", "init", "observe", "optimizer", "shard", "value_and_grad"]
