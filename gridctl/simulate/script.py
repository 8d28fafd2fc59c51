"""A story as acts in order of time: each changes how the fleet stands from its second on."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from gridctl.simulate.actors import Actor, Job
from gridctl.simulate.story import EVER, Crowd, Line, Span, Story

T = TypeVar("T")
Act = Callable[[], None]
Acts = list[tuple[float, Act]]


class Standing(Protocol):
    """What acts change."""

    named: dict[str, Actor]
    jobs: dict[str, Job]
    dense: dict[str, Actor]

    def tell(self, line: Line) -> None: ...

    def boot(self, t_s: float, actor: Actor) -> None: ...

    def crowd(self, crowd: Crowd) -> None: ...


def written(story: Story, stage: Standing) -> list[tuple[float, int, Act]]:
    """The acts, in order. What lasts until a time is taken away in the second after it."""
    acts: Acts = []
    for patch in story.patches:
        _while(acts, patch.begin, patch.end, stage.named[patch.node].patches, patch)
    for silence in story.silences:
        _while(acts, silence.begin, silence.end, stage.named[silence.node].silences, silence)
    for span in story.away:
        acts.append((span.begin, partial(_leave, stage, span)))
        acts.append((span.end, partial(_return, stage, span)))
    for span in story.dense:
        acts.append((span.begin, partial(_look, stage, span.name, 1)))
        acts.append((span.end, partial(_look, stage, span.name, -1)))
    for member, spans in (("stopped", story.ended), ("hung", story.pauses), ("no_number", story.no_numbers)):
        for span in spans:
            job = stage.jobs[span.name]
            acts.append((span.begin, partial(job.change, member, 1, span.begin)))
            acts.append((span.end, partial(job.change, member, -1, span.end)))
    acts += [(t_s, partial(stage.boot, t_s, stage.named[node])) for t_s, node in story.boots]
    acts += [(crowd.t, partial(stage.crowd, crowd)) for crowd in story.crowds]
    acts += [(line.t, partial(stage.tell, line)) for line in story.lines]
    timed = sorted((t_s, index) for index, (t_s, _) in enumerate(acts) if t_s < EVER)
    return [(t_s, index, acts[index][1]) for t_s, index in timed]


def _while(acts: Acts, begin_s: float, end_s: float, held: list[T], what: T) -> None:
    acts.append((begin_s, partial(held.append, what)))
    acts.append((end_s + 1.0, partial(held.remove, what)))


def _look(stage: Standing, name: str, more: int) -> None:
    actor = stage.named[name]
    actor.dense += more
    if actor.dense:
        stage.dense[name] = actor
    else:
        stage.dense.pop(name, None)


def _leave(stage: Standing, span: Span) -> None:
    """The ranks go to the spare, where there is one; without it the job goes on smaller."""
    actor = stage.named[span.name]
    actor.rank = None
    if span.by and actor.own_rank:
        stage.named[span.by].rank = actor.own_rank


def _return(stage: Standing, span: Span) -> None:
    actor = stage.named[span.name]
    actor.rank = actor.own_rank
    if span.by:
        stage.named[span.by].rank = None
