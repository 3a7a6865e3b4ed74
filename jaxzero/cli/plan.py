"""Show what each device will hold and send: layout, memory at rest at every stage, traffic per mesh axis.

Nothing is allocated or compiled, and the devices need not be here.

Examples:
  jaxzero plan models:gpt --mesh data=8
  jaxzero plan models:gpt --mesh replica=2,node=2,local=8 --stage 3 --optimizer muon --json
"""

import dataclasses
from typing import Annotated

import tyro

from .._src.analysis.topology import stay_on_cpu
from . import output
from .problem import problem_of
from .settings import Settings, abstract_mesh, mesh_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """The arguments of `jaxzero plan`."""

    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=N,...")]
    """Axes of the mesh with their sizes, outer first."""

    def run(self) -> int:
        """Plans and prints."""
        stay_on_cpu()  # before the user's code, which may use a device as soon as it is imported
        zero = self.zero(abstract_mesh(mesh_sizes(self.mesh)))
        inner = self.inner()
        with output.working(f"planning {self.target} for {self.mesh}"):
            problem = problem_of(self.target).sized(self.batch, self.parts(zero), self.accumulate)
            zero = self.observed(zero, problem)
            plan = zero.plan(problem.params, inner, accumulate=self.accumulate)
        plan = dataclasses.replace(plan, notes=(*plan.notes, *filter(None, [problem.note])))
        if self.json:
            output.document({"target": self.target, **plan.to_dict()})
        else:
            print(plan)
        return 0


COMMAND = Plan
