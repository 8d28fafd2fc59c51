"""A report as sections of plain blocks: what is said in Markdown and in HTML, and in which order. Pure."""

import datetime
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gridctl.history.report.facts import Choice, Cut, Plot, Report
from gridctl.history.report.plots import NOT_KEPT

#: Characters of an entry of the timeline.
WORDS_MAX = 600


class Text(msgspec.Struct, frozen=True):
    """A paragraph."""

    text: str


class Items(msgspec.Struct, frozen=True):
    """A list; an item may end in a command."""

    items: Sequence[tuple[str, str]]


class Raw(msgspec.Struct, frozen=True):
    """Lines as they came."""

    lines: Sequence[str]


class Table(msgspec.Struct, frozen=True):
    """Rows of texts. Without heads, the first column is one."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


class Links(msgspec.Struct, frozen=True):
    """Addresses that people gave: (text, address)."""

    links: Sequence[tuple[str, str]]


class Figure(msgspec.Struct, frozen=True):
    """A plot with the moments that it shows."""

    plot: Plot
    marks: Sequence[tuple[float, str]]


Block = Text | Items | Raw | Table | Links | Figure


class Section(msgspec.Struct, frozen=True):
    """A heading and what stands below it."""

    title: str
    blocks: list[Block]


class Document(msgspec.Struct, frozen=True):
    """The whole."""

    title: str
    sections: list[Section]


class Clock:
    """Moments in UTC and in the time of whoever reads; None: this machine's."""

    def __init__(self, zone: datetime.tzinfo | None) -> None:
        self._zone = zone

    def both(self, t_unix_s: float) -> tuple[str, str]:
        """UTC to the millisecond, and local time with its offset; empty where there was no such moment."""
        if not t_unix_s:
            return "", ""
        try:
            utc = datetime.datetime.fromtimestamp(t_unix_s, datetime.UTC)
            here = utc.astimezone(self._zone)
        except (ValueError, OverflowError, OSError):  # a node's clock may say anything
            return f"{t_unix_s!r} s", ""
        return f"{utc:%Y-%m-%d %H:%M:%S}.{utc.microsecond // 1000:03d}", f"{here:%Y-%m-%d %H:%M:%S %z}"

    def one(self, t_unix_s: float) -> str:
        """Both in one text."""
        utc, here = self.both(t_unix_s)
        return f"{utc} UTC ({here})" if here else utc


def document(report: Report, zone: datetime.tzinfo | None) -> Document:
    """Equal reports give equal documents, in one time zone."""
    clock = Clock(zone)
    made = (
        Section("In short", [Items([(line, "") for line in report.summary])]),
        Section("Facts", [Table([], [*_facts(report, clock)])]),
        Section("Open follow-ups", [*_follow_ups(report)]),
        Section("How long it took, and what it cost", [Table([], [*_figures(report)])]),
        Section("Timeline", [_timeline(report, clock)]),
        Section("Evidence", [*_evidence(report, clock)]),
        Section("What was decided, and what was rejected", [*_decided(report, clock)]),
        Section("Seen and not acted on", [*_suppressed(report, clock)]),
        Section("Plans, and who answered for them", [*_plans(report, clock)]),
        Section("Runs", [*_runs(report, clock)]),
        Section("The hand-over", [*_handover(report, clock)]),
        Section("Loss and step time at the boundary", [*_losses(report)]),
        Section("Measured around the event", [Figure(plot, report.marks) for plot in report.plots]),
        Section("Notes and links", [*_people(report, clock)]),
        Section("Earlier incidents of the node", [*_earlier(report, clock)]),
        Section("What this was made from", [*_origin(report)]),
    )
    incident = report.incident
    title = f"Incident {incident.id}: {incident.title or incident.kind}"
    return Document(title, [section for section in made if section.blocks])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[Table]:
    if kept := [*rows]:
        yield Table(heads, kept)


def _facts(report: Report, clock: Clock) -> Iterator[tuple[str, str]]:
    incident, node = report.incident, report.node
    facts = (
        ("state", incident.state),
        ("verdict", incident.verdict.replace("_", " ") or "nobody's yet"),
        ("kind", incident.kind),
        ("node", incident.node),
        ("job", incident.job),
        ("rack", node.rack),
        ("node class", node.node_class),
        ("GPU", node.gpu_model),
        ("driver", node.driver),
        ("serial number", node.serial),
        ("opened", clock.one(incident.opened_unix_s)),
        ("closed", clock.one(incident.closed_unix_s)),
        ("in the hands of", incident.acked_by),
        ("assigned to", incident.assigned_to),
        ("part of", incident.merged_into),
        ("parts", ", ".join(incident.merged)),
    )
    return ((name, text) for name, text in facts if text)


def _follow_ups(report: Report) -> Iterator[Block]:
    if report.follow_ups:
        yield Items([(found.what, found.command) for found in report.follow_ups])
    else:
        yield Text("None that the journal knows of.")


def _seconds(seconds: float | None, lacking: str) -> str:
    return lacking if seconds is None else f"{seconds:.3f} s"


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    times, cost = report.times, report.cost
    yield "from the first sign to its record", _seconds(times.detect_s, "nothing was found")
    yield "from there to the first decision", _seconds(times.decide_s, "none was made")
    yield "from there to the first run", _seconds(times.act_s, "none was begun")
    yield "from the first sign to the end of the last run", _seconds(times.resolve_s, "none was done")
    yield "pause of the hand-over", _seconds(times.pause_s, "none was made")
    if times.stood_s is not None:
        yield "the job stood, from the first sign until it went on", _seconds(times.stood_s, "")
    if cost is None:
        yield "cost of the waiting", "not known: no hand-over was made"
        return
    yield "cost of the waiting", f"{cost.gpu_h:.3g} GPU-h ({cost.how})"
    known = "the price is not known" if cost.usd is None else f"{cost.usd:.3g} USD"
    at = "" if cost.usd_per_gpu_h is None else f", at {cost.usd_per_gpu_h:.2f} USD a GPU-hour"
    yield "in money", known + at


def _timeline(report: Report, clock: Clock) -> Table:
    rows = [[*clock.both(m.t_unix_s), m.kind, _short(m.what)] for m in report.timeline]
    return Table(["UTC", "local", "kind", "what"], rows)


def _short(text: str) -> str:
    """A note may be long: it stands below in full."""
    return text if len(text) <= WORDS_MAX else f"{text[:WORDS_MAX]}…"


def _evidence(report: Report, clock: Clock) -> Iterator[Block]:
    if not report.evidence:
        yield Text("Detection found nothing: the incident was opened by a person.")
    for found in report.evidence:
        by = ", ".join(filter(None, (found.layer, found.rule)))
        yield Text(
            f"{clock.one(found.t_unix_s)}: {found.kind} on {found.device}, {found.severity}, asks for"
            f" {found.action} ({by}; record {found.seq})"
        )
        yield Raw(found.lines)
    heads = ["UTC", "local", "node", "state", "by", "file", "SHA-256"]
    yield from _table(
        heads, ([*clock.both(a.t_unix_s), a.node, a.state, a.who, a.file, a.sha256] for a in report.archives)
    )


def _decided(report: Report, clock: Clock) -> Iterator[Block]:
    if not report.decisions and not report.choices:
        yield Text("Nothing was decided.")
    for decision in report.decisions:
        rules = ", ".join(decision.rules)
        yield Text(f"{clock.one(decision.t_unix_s)}: detection decided {decision.decision} by {rules}")
        yield Raw(decision.why)
    for choice in report.choices:
        yield from _choice(choice, clock)


def _choice(choice: Choice, clock: Clock) -> Iterator[Block]:
    wanted = "" if choice.wanted == choice.action else f" (wanted: {choice.wanted})"
    how = "by itself" if choice.automatic else "by a person"
    close = "; a close call" if choice.uncertain else ""
    yield Text(
        f"{clock.one(choice.t_unix_s)}: {choice.action}{wanted} is what ought to be done, {how}{close}."
        f" P(fault in 24 h) {choice.p_24h:.2g}, {choice.basis}"
    )
    yield Raw(choice.why)
    rows = [
        [
            option.action,
            f"{option.gpu_h:.3g}",
            "not known" if option.usd is None else f"{option.usd:.2f}",
            option.rejected or "chosen",
            "; ".join(option.parts),
        ]
        for option in choice.options
    ]
    yield from _table(["alternative", "GPU-h in 24 h", "USD", "rejected because", "made of"], rows)


def _suppressed(report: Report, clock: Clock) -> Iterator[Block]:
    for found in report.suppressed:
        yield Text(f"{clock.one(found.t_unix_s)}: {found.kind} on {found.device}, held back by {found.rule}")
        yield Raw(found.lines)


def _plans(report: Report, clock: Clock) -> Iterator[Block]:
    heads = ["plan", "UTC", "local", "by", "what", "expected pause", "applied as"]
    yield from _table(
        heads,
        (
            [p.id, *clock.both(p.t_unix_s), p.who, p.what, f"{p.pause_s:.3f} s", p.run or "never"]
            for p in report.plans
        ),
    )
    for plan in report.plans:
        told = [*plan.accepted, *plan.notes, *plan.comparison]
        if plan.run and told:
            yield Text(f"What plan {plan.id} said when it was confirmed:")
            yield Raw(told)
    yield from _table(
        ["UTC", "local", "who", "how", "reason", "plan", "run"],
        ([*clock.both(g.t_unix_s), g.who, g.how, g.reason, g.plan, g.run] for g in report.gates),
    )


def _runs(report: Report, clock: Clock) -> Iterator[Block]:
    for run in report.runs:
        why = f" ({' '.join(filter(None, (run.code, run.text)))})" if run.code or run.text else ""
        yield Text(f"{run.id} of {run.who or 'somebody'}, plan {run.plan}: {run.state}{why}")
        rows = [
            [
                *clock.both(step.started_unix_s),
                step.name,
                step.state,
                f"{step.ended_unix_s - step.started_unix_s:.3f} s" if step.ended_unix_s else "",
                " ".join(filter(None, (step.code, step.error))) or step.text,
            ]
            for step in run.steps
        ]
        yield from _table(["UTC", "local", "step", "state", "took", "what"], rows)


def _handover(report: Report, clock: Clock) -> Iterator[Block]:
    yield from _table(
        ["phase", "UTC", "local", "last", "told by"],
        (
            [p.phase, *clock.both(p.first_unix_s), f"+{p.last_unix_s - p.first_unix_s:.3f} s", str(p.told)]
            for p in report.phases
        ),
    )
    for cut in report.cuts:
        yield Table([], [*_cut(cut, clock)])
        rows = [
            [rank, part, digest]
            for rank, parts in sorted(cut.digests.items())
            for part, digest in sorted(parts.items())
        ]
        if rows and cut.outcome == "commit":
            yield Text("State that moved: what the target restored had the digest of what was captured.")
        yield from _table(["rank", "state", "SHA-256"], rows)


def _cut(cut: Cut, clock: Clock) -> Iterator[tuple[str, str]]:
    yield "run", cut.run
    yield "outcome", cut.outcome
    yield "boundary", f"before step {cut.boundary_step}, epoch {cut.epoch}"
    yield "pause", f"{cut.pause_s * 1000:.3f} ms"
    yield "from", clock.one(cut.from_unix_s)
    yield "until", clock.one(cut.to_unix_s)
    yield "state", f"{cut.state_bytes} bytes"
    yield "parts", ", ".join(f"{name} {ms:.3f} ms" for name, ms in sorted(cut.parts_ms.items()))


def _losses(report: Report) -> Iterator[Block]:
    for cut in report.cuts:
        told = [
            f"{name} {value:.4f} s"
            for name, value in (("before", cut.step_s_before), ("after", cut.step_s_after))
            if value is not None
        ]
        if told:
            yield Text(f"A step took, as run {cut.run} measured it: {', '.join(told)}.")
    if report.cuts and not report.losses:
        yield Text(f"Losses: {NOT_KEPT}.")
    heads = ["step", "side", "loss (mean of the ranks)", "step time"]
    yield from _table(
        heads,
        (
            [
                str(its.step),
                its.side,
                "not known" if its.loss is None else f"{its.loss:.9g}",
                "not known" if its.step_s is None else f"{its.step_s:.4f} s",
            ]
            for its in report.losses
        ),
    )


def _people(report: Report, clock: Clock) -> Iterator[Block]:
    for note in report.incident.notes:
        yield Text(f"{clock.one(note['t_unix_s'])}: {note['who']}")
        yield Raw(str(note["reason"]).splitlines())
    if links := report.incident.links:
        yield Links([(f"{link['who']}: {link['reason']}", str(link["value"])) for link in links])


def _earlier(report: Report, clock: Clock) -> Iterator[Block]:
    rows = ([its.incident, *clock.both(its.opened_unix_s), its.kind] for its in report.earlier)
    yield from _table(["incident", "UTC", "local", "kind"], rows)


def _origin(report: Report) -> Iterator[Block]:
    yield Text(
        f"Records {report.first_seq} to {report.last_seq} of the journal; the last has the hash"
        f" {report.last_hash}. gridctl journal verify says whether the chain holds."
    )
    if report.unread:
        yield Text(f"{report.unread} records say something else than written and were left out.")
