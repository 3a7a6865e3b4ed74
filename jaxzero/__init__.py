"""ZeRO for JAX: training state split over a mesh, for any Optax optimizer and any loss, as they are."""

from ._src._version import __version__
from ._src.analysis.hlo import Collective, Collectives, collectives
from ._src.analysis.machine import Machine, machine
from ._src.analysis.memory import Memory
from ._src.analysis.predict import Prediction, predict
from ._src.analysis.topology import topology
from ._src.analysis.verify import Verification
from ._src.checkpoint.api import latest, restore, save
from ._src.fit.api import Fit, FitOptions, fit
from ._src.optax_wrappers import mics, reduce_gradients, zero1, zero2, zero3
from ._src.optimizer.loss_scale import dynamic_loss_scale
from ._src.optimizer.master_weights import master_weights
from ._src.sharding.layout import EvenSplit
from ._src.zero import Zero

__all__ = [
    "__version__",
    "Collective",
    "Collectives",
    "EvenSplit",
    "Fit",
    "FitOptions",
    "Machine",
    "Memory",
    "Prediction",
    "Verification",
    "Zero",
    "collectives",
    "dynamic_loss_scale",
    "fit",
    "latest",
    "machine",
    "master_weights",
    "mics",
    "reduce_gradients",
    "predict",
    "restore",
    "save",
    "topology",
    "zero1",
    "zero2",
    "zero3",
]


def __dir__() -> list[str]:
    return list(__all__)
