"""The figures of a machine that a prediction of time needs: peaks, memory, links and their latency."""

import dataclasses
import math
import re

from .._text import nearest
from .topology import is_gpu, parse_topology

#: Peak operations per second of one device by dtype, dense; memory and its bandwidth; bytes/s that one device sends in
#: its node; bytes/s that a node sends. GPUs: NVIDIA's data sheets of the SXM modules (half of NVLink's figure is one
#: direction) and of DGX systems (one card of 200 or 400 Gb/s for each GPU).
_GPUS = {
    "a100": dict(bf16=312e12, f32=156e12, f64=19.5e12, memory=80e9, bandwidth=2.039e12, local=300e9, card=25e9),
    "h100": dict(bf16=989e12, f32=495e12, f64=67e12, memory=80e9, bandwidth=3.352e12, local=450e9, card=50e9),
    "h200": dict(bf16=989e12, f32=495e12, f64=67e12, memory=141e9, bandwidth=4.8e12, local=450e9, card=50e9),
}
#: TPUs: Google's pages of each version; `link` is one link in one direction. Products of float32 are rounded to
#: bfloat16 by default, so that they have its peak. `ring` is the size from which a dimension of the torus is closed.
_TPUS = {
    "v5e": dict(bf16=197e12, memory=16e9, bandwidth=0.819e12, link=45e9, ring=16),
    "v5p": dict(bf16=459e12, memory=95e9, bandwidth=2.765e12, link=90e9, ring=4),
    "v6e": dict(bf16=918e12, memory=32e9, bandwidth=1.64e12, link=90e9, ring=16),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The figures of a machine; `dataclasses.replace` changes some.

    Attributes:
      name: Its name.
      bf16: Peak operations per second of one device, for products of 16-bit floats; 8-bit ones count as these.
      f32: The same for 32-bit floats.
      f64: The same for 64-bit floats.
      memory: Bytes of memory of one device.
      bandwidth: Bytes per second between a device and its memory.
      per_node: Devices in a node; of a TPU slice all are in one.
      local: Bytes per second that one device sends to others of its node, in one direction.
      network: Bytes per second that a node sends, in one direction, over all of its cards.
      local_latency: Seconds for each step of a ring inside a node.
      network_latency: Seconds for each step of a ring to another node.
      launch: Seconds that an instruction takes at least.
      torus: Chips in each dimension of a TPU slice; empty for GPUs. `local` is then one link.
      ring: The size from which a dimension of the torus is closed, so that both directions carry data.
      products_reach: The part of the peak that large products reach.
      memory_reach: The part of the memory's bandwidth that is reached.
      links_reach: The part of a link's bandwidth that large messages reach.
    """

    name: str
    bf16: float
    f32: float
    f64: float
    memory: float
    bandwidth: float
    per_node: int
    local: float
    network: float
    local_latency: float = 3e-6
    network_latency: float = 15e-6
    launch: float = 2e-6
    torus: tuple[int, ...] = ()
    ring: int = 2
    products_reach: float = 0.7
    memory_reach: float = 0.85
    links_reach: float = 0.8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value >= (0 if "latency" in field.name else 1e-30):
                raise ValueError(
                    f"machine: {field.name}={value!r}. Expected a positive number. Fix: for example "
                    'dataclasses.replace(jaxzero.machine("h100:2x8"), network=50e9).'
                )

    def peak(self, dtype: str) -> float:
        """Operations per second that products of a dtype of HLO reach."""
        wide = {"f64": self.f64, "c128": self.f64, "f32": self.f32, "c64": self.f32}
        return self.products_reach * wide.get(dtype, self.bf16)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The figures in words."""
        links = f"{self.local / 1e9:g} GB/s per device inside a node, {self.network / 1e9:g} GB/s per node outside"
        if self.torus:
            links = f"{self.local / 1e9:g} GB/s per link of a torus of {'x'.join(map(str, self.torus))}"
        return (
            f"peak {self.bf16 / 1e12:g} TFLOP/s (16 bit), {self.f32 / 1e12:g} (float32), of which products reach "
            f"{self.products_reach:.0%}",
            f"memory {self.bandwidth / 1e9:g} GB/s, of which {self.memory_reach:.0%} is reached; {self.launch:g} s for "
            "each instruction at least",
            f"{links}, of which {self.links_reach:.0%} is reached",
            f"latency of a step of a ring {self.local_latency:g} s inside a node, {self.network_latency:g} s outside",
        )


def machine(name: str, **figures: float) -> Machine:
    """The figures of a machine by the name that `topology` takes; sends nothing and needs no plug-in.

    GPUs stand in nodes with a network card for each. The parts of peaks and links that are reached, latencies and the
    least time of an instruction are assumptions, equal for all machines: give yours where you have measured them.

    Args:
      name: ``"h100:4x8"``, ``"a100:2x8"``, ``"h200"``, ``"v5e:4x4"``, ... as for `topology`.
      **figures: What differs from the published figures: any attribute of `Machine` that is a number.

    Returns:
      A `Machine`.

    Raises:
      ValueError: For an unknown name or figure, with the nearest known one; for a figure that is not positive.

    Examples:
      >>> import jaxzero
      >>> slow = jaxzero.machine("h100:4x8", network=12.5e9)
      >>> slow.per_node, slow.network
      (8, 12500000000.0)

    References:
      NVIDIA, data sheets of A100, H100, H200, DGX A100 and DGX H100; Google Cloud, pages of TPU v5e, v5p and v6e.
    """
    kind, sizes = parse_topology(name)
    found = _gpus(name, kind, sizes[1]) if is_gpu(name) else _tpus(name, kind, sizes)
    return with_figures(found, figures)


def with_figures(found: Machine, figures: dict[str, float]) -> Machine:
    """A machine with some figures of the user's."""
    numbers = [f.name for f in dataclasses.fields(Machine) if f.name not in ("name", "torus")]
    for name in figures:
        if name not in numbers:
            fix = nearest(name, numbers, "{}=") or "Fix: drop it."
            raise ValueError(f"machine: unknown figure {name!r}. Expected some of {numbers}. {fix}")
    return dataclasses.replace(found, **figures)  # type: ignore[arg-type]


def figures_of(text: str) -> dict[str, float]:
    """Figures as a command line takes them.

    Examples:
      >>> figures_of("network=12.5e9,links_reach=0.9")
      {'network': 12500000000.0, 'links_reach': 0.9}
    """
    pairs = [re.fullmatch(r"(\w+)=([\d.]+(?:e[+-]?\d+)?)", part.strip()) for part in text.split(",") if part.strip()]
    if None in pairs:
        raise ValueError(f"--figures {text}: expected NAME=NUMBER,... Fix: for example --figures network=12.5e9.")
    return {pair[1]: float(pair[2]) for pair in pairs if pair}


def _gpus(name: str, kind: str, per_node: int) -> Machine:
    known = _GPUS[kind]
    return Machine(
        name=name,
        bf16=known["bf16"],
        f32=known["f32"],
        f64=known["f64"],
        memory=known["memory"],
        bandwidth=known["bandwidth"],
        per_node=per_node,
        local=known["local"],
        network=known["card"] * per_node,
    )


def _tpus(name: str, kind: str, torus: tuple[int, ...]) -> Machine:
    known = _TPUS[kind]
    return Machine(
        name=name,
        bf16=known["bf16"],
        f32=known["bf16"],
        f64=known["bf16"] / 32,
        memory=known["memory"],
        bandwidth=known["bandwidth"],
        per_node=math.prod(torus),
        local=known["link"],
        network=known["link"],
        local_latency=1e-6,
        torus=torus,
        ring=int(known["ring"]),
    )
