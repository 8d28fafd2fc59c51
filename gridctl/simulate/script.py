"""A story as acts in order of time: each changes how the fleet stands from its second on."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Protocol, TypeVar

from gridctl.simulate.actors import Actor, Job
from gridctl.simulate.story import EVER, Crowd, Line, Patch, Silence, Span, Story

Lasting = TypeVar("Lasting", Patch, Silence)
Act = Callable[[], None]
#: When, to whom (nodes, or a job), and what.
Acts = list[tuple[float, tuple[str, ...], Act]]


class Standing(Protocol):
    """What acts change."""

    named: dict[str, Actor]
    jobs: dict[str, Job]
    dense: dict[str, Actor]

    def tell(self, line: Line) -> None: ...

    def boot(self, t_s: float, actor: Actor) -> None: ...

    def crowd(self, crowd: Crowd) -> None: ...


def written(story: Story, stage: Standing) -> Acts:
    """The acts, in order. What lasts until a time is taken away in the second after it."""
    acts: Acts = []
    for patch in story.patches:
        _while(acts, patch, stage.named[patch.node].patches)
    for silence in story.silences:
        _while(acts, silence, stage.named[silence.node].silences)
    for span in story.away:
        acts.append((span.begin, (span.name, span.by), partial(_leave, stage, span)))
        acts.append((span.end, (span.name, span.by), partial(_return, stage, span)))
    for span in story.dense:
        acts.append((span.begin, (span.name,), partial(_look, stage, span.name, 1)))
        acts.append((span.end, (span.name,), partial(_look, stage, span.name, -1)))
    for member, spans in (("stopped", story.ended), ("hung", story.pauses), ("no_number", story.no_numbers)):
        for span in spans:
            job, who = stage.jobs[span.name], (span.name,)
            acts.append((span.begin, who, partial(job.change, member, 1, span.begin)))
            acts.append((span.end, who, partial(job.change, member, -1, span.end)))
    acts += [(t_s, (node,), partial(stage.boot, t_s, stage.named[node])) for t_s, node in story.boots]
    acts += [(crowd.t, (), partial(stage.crowd, crowd)) for crowd in story.crowds]
    acts += [(line.t, (line.node,), partial(stage.tell, line)) for line in story.lines]
    return sorted((act for act in acts if act[0] < EVER), key=itemgetter(0))


def _while(acts: Acts, what: Lasting, held: list[Lasting]) -> None:
    acts.append((what.begin, (what.node,), partial(held.append, what)))
    acts.append((what.end + 1.0, (what.node,), partial(held.remove, what)))


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
