"""The parts of Orbax that are deprecated, or not documented as public, in one place.

Checked with orbax-checkpoint 0.12.8; `pyproject.toml` has the upper bound. This file can go when Orbax documents how a
`TypeHandler` opens a TensorStore array of its own.
"""

from collections.abc import Coroutine, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from .._types import DType
from ..sharding.layout import Shape

#: A folder as `etils.epath` gives it, also of a bucket.
EPath = Any
#: Orbax's `ParamInfo` of one leaf: where it is on disk.
Info = Any


def unfinished(directory: EPath) -> Iterator[EPath]:
    """The folders of steps that were begun and never completed."""
    return iter(directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"))


def steps(directory: EPath) -> list[int]:
    """The numbers of the steps in a directory."""
    return list(ocp.utils.checkpoint_steps(directory))


def commit(operation: Coroutine[Any, Any, None], name: str) -> ocp.future.Future:
    """Runs `operation` in the background, as soon as Orbax has made the folders of the checkpoint."""
    return ocp.future.CommitFutureAwaitingContractedSignals(operation, name=name)


def can_store(dtype: DType) -> bool:
    """Whether TensorStore has a data type; it has no unsigned integers below 8 bits."""
    try:
        ts.dtype(np.dtype(dtype).name)
    except (TypeError, ValueError):
        return False
    return True


async def open_to_write(info: Info, shape: Shape, chunk: Shape, dtype: DType, transaction: Any) -> Any:
    """The TensorStore array of a leaf, in `chunk`s, for writing in a transaction.

    Process 0 writes the metadata. Each process writes into a folder of its own, next to the one of Orbax's own
    arrays: two transactions in one folder would be in conflict. Orbax merges all folders of processes.
    """
    await info.await_path_creation()
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        global_shape=shape,
        local_shape=chunk,
        dtype=dtype,
        process_index=f"{jax.process_index()}flat",
    )
    context = dict(context=info.ts_context, transaction=transaction, open=True)
    if jax.process_index() == 0:
        await ts.open(ts.Spec(spec), create=True, **context)
    return await ts.open(ts.Spec(spec), assume_metadata=True, **context)


async def open_to_read(info: Info) -> Any:
    """The TensorStore array of a leaf, for reading."""
    spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
    return await ts.open(ts.Spec(spec), open=True, read=True, context=info.ts_context)
