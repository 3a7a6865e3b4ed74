"""The time of one collective on the links of a machine."""

import math
from typing import NamedTuple

from .hlo_parser import Groups
from .machine import Machine

INSIDE, OUTSIDE = "inside a node", "between nodes"


class Transfer(NamedTuple):
    """What one collective occupies: a network, and for how many seconds."""

    network: str
    seconds: float


def transfer(machine: Machine, groups: Groups, sent: float) -> Transfer:
    """The time of one collective in which each device sends `sent` bytes, as a ring does it.

    A group inside a node has the link of each device. A group of `m` devices in each of several nodes has `m` of the
    `k` parts into which the cards of a node are divided, as the `k/m` groups of a node run at once; no more than its
    `m` devices can send inside the node.

    Args:
      machine: The machine; devices are numbered node by node.
      groups: The devices of each group, by number.
      sent: Bytes that each device sends.

    Returns:
      The network and the seconds.
    """
    if machine.torus:
        return _torus(machine, groups, sent)
    members = [len(set(group)) for group in groups]
    nodes = [len({device // machine.per_node for device in group}) for group in groups]
    size, spanned = max(members), max(nodes)
    here = math.ceil(size / spanned)  # devices of a group in a node
    inside = machine.links_reach * machine.local
    latency = spanned * (here - 1) * machine.local_latency
    if spanned == 1:
        return Transfer(INSIDE, latency + sent / inside)
    outside = machine.links_reach * machine.network * here / machine.per_node
    # Alone in its node, a device sends over its cards only; several pass everything on inside the node.
    speed = outside if here == 1 else min(inside, outside)
    return Transfer(OUTSIDE, latency + (spanned - 1) * machine.network_latency + sent / speed)


def _torus(machine: Machine, groups: Groups, sent: float) -> Transfer:
    """A ring along each dimension that a group spans; an open dimension carries half of what a closed one does."""
    places = [_place(device, machine.torus) for device in groups[0]]
    spanned = [len({place[i] for place in places}) for i in range(len(machine.torus))]
    directions = [2 if size >= machine.ring else 1 for size in spanned if size > 1]
    steps = sum(size - 1 for size in spanned)
    speed = machine.links_reach * machine.local * max(1, sum(directions))
    return Transfer(INSIDE, steps * machine.local_latency + sent / speed)


def _place(device: int, torus: tuple[int, ...]) -> tuple[int, ...]:
    """The coordinates of a device; the last one runs fastest."""
    out = []
    for size in reversed(torus):
        device, place = divmod(device, size)
        out.append(place)
    return tuple(reversed(out))
