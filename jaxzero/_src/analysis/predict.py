"""The time that a compiled step takes on a machine, from its schedule."""

import dataclasses

from jax.sharding import AbstractMesh, Mesh
from jax.stages import Compiled

from .._table import fold, table, terminal_width
from .._types import JSON
from .hlo import Collectives, known_mesh, placed
from .hlo_parser import parse, text_of
from .machine import Machine, machine
from .timeline import Timeline

_ASSUMED = (
    "an instruction takes the larger of its products' operations over the peak and its bytes over the bandwidth",
    "a collective is a ring: its latency and the bytes that a device sends, over the links of its axes",
    "one stream of computation and one for each network; collectives share nothing else with the computation",
)


@dataclasses.dataclass(frozen=True)
class Exposed:
    """The collectives of one kind over the same axes.

    Attributes:
      kind: The kind.
      axes: The mesh axes; `None` where no mesh is known.
      wire: Seconds of a step in which they are on a network.
      exposed: Seconds of a step in which the computation waits for them.
    """

    kind: str
    axes: tuple[str, ...] | None
    wire: float
    exposed: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted time of one call of a compiled program; `print` shows a table.

    Attributes:
      seconds: Seconds of a call.
      busy: Seconds of it in which a device computes.
      rows: What waits: the collectives by kind and axes.
      operations: Operations of products on one device, recomputed ones included.
      share_of_peak: The part of the peak of their dtypes that these are, over all of the time.
      tokens_per_second: Over all devices; `None` where the tokens of a call were not given.
      collectives: The collectives, with `exposed`.
      assumptions: What the figures stand on.
    """

    seconds: float
    busy: float
    rows: tuple[Exposed, ...]
    operations: float
    share_of_peak: float
    tokens_per_second: float | None
    collectives: Collectives
    assumptions: tuple[str, ...]

    @property
    def exposed(self) -> float:
        """Seconds in which the computation waits for collectives."""
        return sum(row.exposed for row in self.rows)

    def to_dict(self) -> JSON:
        """The figures without the collectives, for a JSON document."""
        figures = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "collectives"}
        return figures | {"rows": [dataclasses.asdict(row) for row in self.rows], "exposed": self.exposed}

    def __str__(self) -> str:
        return self.text()

    def text(self, unit: str = "tokens") -> str:
        """The table; `unit` is what `tokens` counted."""
        lines = [
            ("step", _time(self.seconds)),
            ("computing", f"{_time(self.busy)}, {self.busy / self.seconds if self.seconds else 0:.0%} of the step"),
            ("waiting for collectives", _time(self.exposed)),
            ("share of peak", f"{self.share_of_peak:.1%}"),
        ]
        if self.tokens_per_second is not None:
            lines.append((f"{unit} per second", f"{self.tokens_per_second:,.0f}"))
        rows = [(x.kind, ", ".join(x.axes or ("?",)), _time(x.wire), _time(x.exposed)) for x in self.rows]
        waits = table(("collective", "mesh axes", "on the wire", "exposed"), rows, "<<>>")
        notes = [line for text in self.assumptions for line in fold(f"assumed: {text}", terminal_width())]
        return "\n".join([table((), lines, title="predicted, not measured", indent=2), waits, *notes])


def predict(
    compiled: Compiled | str,
    machine: Machine | str,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    tokens: int | None = None,
) -> Prediction:
    """The time of a compiled step on a machine, predicted from its schedule; runs and sends nothing.

    Walks the program in the order that XLA scheduled. An instruction takes the larger of its operations over the peak
    and its bytes over the memory's bandwidth; a collective its latency and its bytes over the links of its axes, and
    the computation waits at its end. `benchmarks/RESULTS.md` compares it with measured and published times.

    Args:
      compiled: What `jax.jit(f).lower(*args).compile()` returned, for devices that are here or not; or its text.
      machine: A `Machine`, or the name of one as for `topology`.
      mesh: As for `collectives`.
      tokens: Tokens, or other units, that one call works off on all devices.

    Returns:
      A `Prediction`, in seconds: the step, what waits by kind and axes, the share of the peak, `tokens` per second.

    Raises:
      ValueError: For an unknown machine, and as `collectives`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxzero
      >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = jax.jit(zero.value_and_grad(loss)).lower(jnp.ones((64, 64)), jnp.ones((8, 64))).compile()
      >>> found = jaxzero.predict(step, "h100:1x8", tokens=8)
      >>> 0 < found.busy < found.seconds, [(x.kind, x.axes) for x in found.rows]
      (True, [('reduce-scatter', ('data',)), ('all-reduce', ('data',))])

    References:
      Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model", 2009.
    """
    hardware = machine_of(machine)
    program = parse(text_of("predict", compiled))
    shape = known_mesh("predict", compiled, mesh, program)
    found = list(placed(program, shape))
    clock = Timeline(program, found, hardware).run()
    timed = Collectives(
        dataclasses.replace(x.collective, exposed=clock.exposed.get(i, 0.0)) for i, x in enumerate(found)
    )
    peaks = {dtype: hardware.peak(dtype) / hardware.products_reach for dtype in clock.operations}
    used = sum(count / peaks[dtype] for dtype, count in clock.operations.items())
    return Prediction(
        clock.now,
        clock.busy,
        _rows(timed, clock.wire),
        sum(clock.operations.values()),
        used / clock.now if clock.now else 0.0,
        tokens / clock.now if tokens is not None and clock.now else None,
        timed,
        (*_ASSUMED, *hardware.assumptions),
    )


def machine_of(given: Machine | str) -> Machine:
    """A machine, by its name too."""
    if isinstance(given, Machine):
        return given
    return machine(given)


def _rows(timed: Collectives, wire: dict[int, float]) -> tuple[Exposed, ...]:
    found: dict[tuple[str, tuple[str, ...] | None], list[float]] = {}
    for i, x in enumerate(timed):
        row = found.setdefault((x.kind, x.axes), [0.0, 0.0])
        row[0] += wire.get(i, 0.0)
        row[1] += x.exposed or 0.0
    rows = (Exposed(*key, *times) for key, times in found.items())
    return tuple(sorted(rows, key=lambda row: (-row.exposed, -row.wire)))


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"
