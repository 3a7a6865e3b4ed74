"""The memory that a compiled program needs on each device."""

import dataclasses
from typing import Any

from .._table import table
from .._text import size_text


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device's memory that a compiled program needs; `print` shows a table.

    Attributes:
      arguments: All arguments: parameters, optimizer state, batch.
      temporaries: What it allocates while it runs, at the highest.
      outputs: All results.
      aliased: Results that take over the memory of a donated argument.
      peak: The most that is in use at once, where XLA says so.
      total: What the device must have: arguments, temporaries and outputs, those that are aliased once.
    """

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    peak: int | None

    @property
    def total(self) -> int:
        """Arguments, temporaries and outputs, those that are aliased once."""
        return self.arguments + self.temporaries + self.outputs - self.aliased

    def __str__(self) -> str:
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"total": self.total}
        rows = [(name, "unknown" if size is None else size_text(size)) for name, size in sizes.items()]
        return table((), rows, title="per device", indent=2)


def memory(compiled: Any) -> Memory:
    """See `Zero.memory`."""
    analysis = getattr(compiled, "memory_analysis", None)
    found = analysis() if analysis is not None else None
    if found is None:
        fix = "lowered.compile()" if hasattr(compiled, "compile") else "jax.jit(f).lower(*args).compile()"
        raise ValueError(
            f"memory: a {type(compiled).__name__} has no memory analysis. Expected a compiled program. Fix: pass what "
            f"{fix} returns."
        )
    return Memory(
        found.argument_size_in_bytes,
        found.temp_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
        getattr(found, "peak_memory_in_bytes", 0) or None,
    )
