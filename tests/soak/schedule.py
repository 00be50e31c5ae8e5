"""What happens to the cluster, in which order: drawn from a seed, before anything starts."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

MAX_WORKERS = 8
KINDS = ("join", "leave", "leave idle", "kill worker", "kill reader", "kill planner")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happens.

    Attributes:
        kind: one of :data:`KINDS`. ``leave idle`` is a node without workers, that reads.
        places: there are for workers from then on.
        node: which of the nodes that are there leaves, counted in the order in which they joined; -1 if none does.
        rank: of the worker that is killed, as a share of the world size: in [0, 1).
    """

    kind: str
    places: int
    node: int = -1
    rank: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What happens, after ``first_places`` places for workers were there; a cluster of :data:`MAX_WORKERS` at most."""

    first_places: int
    events: tuple[Event, ...]

    def places(self) -> list[int]:
        """The numbers of places that there are, one after the other."""
        numbers = [self.first_places, *(event.places for event in self.events)]
        return [number for number, _ in itertools.groupby(numbers)]


def make_schedule(seed: int, *, times: int) -> Schedule:
    """Nodes join ``times`` times and leave ``times`` times, a third of these without workers; all else in proportion.

    From six on every number of places from 1 to :data:`MAX_WORKERS` comes up.
    """
    draw = random.Random(seed)
    while True:
        schedule = _draw(draw, times)
        if schedule is not None and (times < 6 or len(set(schedule.places())) == MAX_WORKERS):
            return schedule


def _draw(draw: random.Random, times: int) -> Schedule | None:
    """One schedule; None if it led to a cluster that is too small or too large."""
    third = -(-times // 3)
    kills = max(1, times - third)
    counts = {"join": times, "leave": times - third, "leave idle": third}
    counts |= {"kill worker": kills, "kill reader": kills, "kill planner": third}
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    draw.shuffle(kinds)
    first = draw.randint(1, 3)
    nodes, events = [first], []
    for kind in kinds:
        event = Event(kind=kind, places=sum(nodes))
        if kind == "join":
            nodes.append(draw.randint(1, 3))
        elif kind == "leave":
            event = replace(event, node=draw.randrange(len(nodes)))
            del nodes[event.node]
        elif kind == "kill worker":
            event = replace(event, rank=draw.random())
        if not 1 <= sum(nodes) <= MAX_WORKERS:
            return None
        events.append(replace(event, places=sum(nodes)))
    return Schedule(first_places=first, events=tuple(events))
