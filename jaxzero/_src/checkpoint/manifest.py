"""The manifest of a checkpoint (its leaves, layout and origin), and checks of it against the wanted leaves."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .._types import JSON
from .._version import __version__
from ..sharding.axes import Axes
from ..sharding.options import Options
from .leaves import PARAMS, STATE, Entry

#: Increased by one whenever older versions of jaxzero cannot read what newer ones write.
FORMAT = 1
#: How many leaves an error names.
_NAMED = 4


def compose(options: Options | None, axes: Axes, step: int, entries: Sequence[Entry], extra: JSON) -> dict[str, JSON]:
    """The manifest of a checkpoint, as JSON values."""
    return {
        "format": FORMAT,
        "jaxzero": __version__,
        "step": step,
        "layout": {
            "stage": options.stage if options else None,
            "shards": axes.n,
            "replicas": axes.r,
            "fingerprint": fingerprint(entries),
        },
        "leaves": {e.name: e.described for e in entries},
        "extra": extra,
    }


def fingerprint(entries: Sequence[Entry]) -> str:
    """A digest of names, shapes, dtypes and layouts of all leaves: equal where training continues bit for bit."""
    layout = lambda x: x and (x.kind, x.lead, x.n, *([x.other_axes] if x.other_axes else []))
    cut = [(e.name, e.described, layout(e.layout)) for e in entries]
    return hashlib.sha256(json.dumps(cut).encode()).hexdigest()[:16]


def check_extra(extra: JSON) -> JSON:
    """`extra` as `restore` will return it; refuses values that JSON cannot hold."""
    try:
        _check_keys(extra)
        return json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"save: extra={extra!r} cannot be written as JSON ({error}). Expected numbers, text, lists and dicts of "
            "them: the position in the data, the epoch. Fix: int(x) or x.tolist() for arrays."
        ) from error


def _check_keys(extra: JSON) -> None:
    """Refuses keys that are no strings: JSON would turn them into strings."""
    if isinstance(extra, dict):
        for key in extra:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no text")
    for x in extra.values() if isinstance(extra, dict) else extra if isinstance(extra, (list, tuple)) else ():
        _check_keys(x)


def check_version(call: str, path: os.PathLike[str], manifest: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of a newer format than this version reads."""
    if manifest["format"] > FORMAT:
        raise ValueError(
            f"{call}: {path} has format {manifest['format']}, written by jaxzero {manifest['jaxzero']}. Expected "
            f"format {FORMAT} or older: this is jaxzero {__version__}. Fix: a newer jaxzero."
        )


def check_leaves(
    path: os.PathLike[str], manifest: Mapping[str, Any], entries: Sequence[Entry], *, params_only: bool, partial: bool
) -> None:
    """Refuses a checkpoint with a missing or unexpected leaf, or a leaf of another shape or dtype."""
    found = {k: v for k, v in manifest["leaves"].items() if not params_only or k.split("/")[0] == PARAMS}
    wanted = {e.name: e.described for e in entries}
    problems = [] if partial else [f"there is no leaf {k!r}" for k in wanted if k not in found]
    problems += [] if partial else [f"leaf {k!r} was not asked for" for k in found if k not in wanted]
    for k, (dtype, shape) in wanted.items():
        is_dtype, is_shape = found.get(k, (dtype, shape))
        if shape != is_shape:
            problems.append(f"leaf {k!r} has shape {tuple(is_shape)}, expected {tuple(shape)}")
        if dtype != is_dtype:
            problems.append(f"leaf {k!r} has dtype {is_dtype}, expected {dtype}")
    for tree in (PARAMS, STATE):
        names = {k for k in wanted if k.split("/")[0] == tree}
        if partial and names and not names & found.keys():  # an optimizer of another structure, not added leaves
            problems.append(f"no leaf of {tree} has the name of one that was asked for, such as {min(names)!r}")
    if problems:
        more = f" (and {len(problems) - _NAMED} more)" if len(problems) > _NAMED else ""
        raise ValueError(
            f"restore: {path} is not a checkpoint of these parameters and this optimizer: "
            f"{'; '.join(problems[:_NAMED])}{more}. Expected the {len(wanted)} leaves of abstract_params and inner, "
            "in their shapes and dtypes. Fix: the model, dtype and optimizer that it was saved with; or, where leaves "
            "came or went, partial=True."
        )
