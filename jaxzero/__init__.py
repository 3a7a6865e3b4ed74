"""ZeRO for JAX: training state split over a mesh, for any Optax optimizer and any loss, as they are."""

from ._src._version import __version__ as __version__
from ._src.analysis.hlo import Collective as Collective
from ._src.analysis.hlo import Collectives as Collectives
from ._src.analysis.hlo import collectives as collectives
from ._src.analysis.memory import Memory as Memory
from ._src.analysis.topology import topology as topology
from ._src.analysis.verify import Verification as Verification
from ._src.checkpoint.api import latest as latest
from ._src.checkpoint.api import restore as restore
from ._src.checkpoint.api import save as save
from ._src.optax_wrappers import mics as mics
from ._src.optax_wrappers import zero1 as zero1
from ._src.optax_wrappers import zero2 as zero2
from ._src.optax_wrappers import zero3 as zero3
from ._src.optimizer.loss_scale import dynamic_loss_scale as dynamic_loss_scale
from ._src.optimizer.master_weights import master_weights as master_weights
from ._src.sharding.layout import EvenSplit as EvenSplit
from ._src.zero import Zero as Zero
