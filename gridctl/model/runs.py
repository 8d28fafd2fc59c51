"""What happened: runs and incidents. Both are folds over the journal, whose records are described here.

Data of the journal's records, by kind (all carry `incident` where there is one):

    finding   a finding of `gridctl.detect`
    decision  a decision of `gridctl.detect`, also a suppressed one; type choice: a `Choice` of
              `gridctl.assess` about the node of an incident, with "p_24h" and "basis"
    incident  {"incident", "state": open|closed, "kind", "node", "job", "title"}; a person's also has
              "who", "reason", and closed "verdict" (true_fault|false_alarm|unknown) or "merged_into" (an
              incident)
    plan      {"incident", "plan": Plan}
    gate      {"incident", "plan": ID, "run", "digest", "who", "reason", "typed", "yes"}
    run       {"incident", "run", "plan": ID, "node", "job", "state", "code", "text", "who"}
    step      {"incident", "run", "step", "index", "state", "attempt", "code", "text", "values": [...]}
    lease     {"incident", "run", "fence", "holder", "granted": [node]}
    audit     {"what": "evidence", "incident", "node", "id", "who", "state": asked|collected|failed,
              "text", "code", "file", "bytes", "sha256", "taken_unix_s"}: a collection, before and after it
    audit     {"what", "who", "reason", ...}: freeze, thaw, abort, rollback, resume, uncordon, acts of trust,
              join; relayed {"scope", "missed": [node], "refused": [node]}: what came of a freeze or thaw
    audit     {"what": note|link|ack|assign, "incident", "who", "reason", "value"}: a person's doing; `value`
              is the link's address or who it is assigned to, a note's words are its reason
    notice    {"incident", "thread", "route", "receiver", "event", "incidents", "escalation", "state":
              sent|failed|given-up, "text"}: what was told to whom (`gridctl.notify.duty`)
    facts     {"node", "rack", "node_class", "nvlink_domain", "cooling_zone", "driver", "gpu_model", "gpus",
              "serial", "boot_id", "version", "spare", "jobs": {job: [rank]}, "devices": {device: {"uuid",
              "serial", "pci", "name"}}}: what a node is, once and whenever something of it changes
    note      {"incident", "run", "node", "phase", "handover", "detail"}: a phase that an agent told of

States of a run: running, held (stopped, needs a person), and the ends done, aborted, rolled-back, failed.
States of a step: started, done, failed; undoing, undone, undo-failed.
"""

from typing import Any

import msgspec

ENDS = ("done", "aborted", "rolled-back", "failed")


class StepRun(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it went."""

    name: str
    text: str
    state: str  #: planned, or a state of the journal's `step` records
    code: str = ""
    error: str = ""
    started_unix_s: float = 0.0
    ended_unix_s: float = 0.0
    values: list[Any] = []


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/run/ID. A run that no controller drives at the moment is "interrupted"."""

    id: str
    plan: str
    incident: str
    node: str
    job: str
    who: str
    state: str
    code: str = ""
    text: str = ""
    started_unix_s: float = 0.0
    ended_unix_s: float = 0.0
    steps: list[StepRun] = []


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a timeline."""

    t_unix_s: float
    kind: str
    what: str
    seq: int = 0


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/incident/ID"""

    id: str
    kind: str
    state: str  #: open or closed
    title: str
    node: str
    job: str = ""
    opened_unix_s: float = 0.0
    closed_unix_s: float = 0.0
    acked_by: str = ""  #: who has it in hand, the last one who said so since it was opened
    assigned_to: str = ""
    reopened_by: str = ""  #: a person, so that only a person or a run that is done closes it again
    verdict: str = ""  #: true_fault, false_alarm or unknown: a person's word; "": nobody's yet
    merged_into: str = ""  #: the incident that this one is a part of, in a person's words
    merged: list[str] = []  #: incidents that were merged into this one
    notes: list[dict[str, Any]] = []  #: of people, the oldest first: t_unix_s, who, reason (the note's words)
    links: list[dict[str, Any]] = []  #: likewise; value is the address
    findings: list[dict[str, Any]] = []
    decision: dict[str, Any] = {}
    choice: dict[str, Any] = {}  #: what ought to be done and what each alternative costs, as it was last
    plans: list[str] = []
    runs: list[str] = []
    evidence: list[dict[str, Any]] = []  #: the newest audit of every collection, the oldest first
    timeline: list[Moment] = []


class Act(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/incident/ID/VERB: what a person does to an incident, see `gridctl.control.acts`."""

    who: str
    reason: str  #: why; of a note, its words
    value: str = ""  #: link: the address; assign: to whom; close: the verdict; merge: into which incident
