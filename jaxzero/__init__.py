"""ZeRO for JAX: training state split over a mesh, for any Optax optimizer and any loss, as they are."""

from ._version import __version__ as __version__
from .checkpoint import latest as latest
from .checkpoint import restore as restore
from .checkpoint import save as save
from .hlo import Collective as Collective
from .hlo import Collectives as Collectives
from .hlo import collectives as collectives
from .layout import EvenSplit as EvenSplit
from .loss_scale import dynamic_loss_scale as dynamic_loss_scale
from .memory import Memory as Memory
from .plain import mics as mics
from .plain import zero1 as zero1
from .plain import zero2 as zero2
from .plain import zero3 as zero3
from .precision import master_weights as master_weights
from .topology import topology as topology
from .verify import Verification as Verification
from .zero import Zero as Zero
