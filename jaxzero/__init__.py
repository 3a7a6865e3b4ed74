"""ZeRO for JAX: training state split over a mesh, for any Optax optimizer and any loss, as they are."""

from .layout import EvenSplit as EvenSplit
from .zero import Zero as Zero
from .zero import zero1 as zero1
from .zero import zero2 as zero2
from .zero import zero3 as zero3

__version__ = "0.1.0"
