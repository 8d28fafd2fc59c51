"""Whether there is a way back from a run, and what to do where there is none. Pure."""

from gridctl.errors import Refused
from gridctl.model.plans import Plan
from gridctl.runbook.engine import RunState, committed, cutting


def check_not_past(state: RunState) -> None:
    """Raises `Refused` where a run has come too far to be undone."""
    run, resume = state.run, f"`gridctl run resume {state.run}`"
    moved = state.plan.runbook == "hot-swap"
    if committed(state):
        text = "the ranks have moved" if moved else "what was to be destroyed is"
        back = ", and the way back is a new hand-over" if moved else "; there is no way back"
        raise Refused("boundary-past", f"run {run} is past its commit: {text}; {resume} ends it{back}")
    if cutting(state) and moved:
        raise Refused(
            "boundary-past",
            f"run {run} is in its cut, which ends by itself in a commit or an abort; if it is held,"
            f" {resume} finds out which",
        )
    if cutting(state):
        text = "may have destroyed already what it is to destroy; if it is held"
        raise Refused("boundary-past", f"run {run} {text}, {resume} goes on with what is seen")


def done(run: str, plan: Plan) -> Refused:
    """Why a run that is done is neither undone nor resumed."""
    if plan.runbook == "reset":
        return Refused("boundary-past", f"run {run} is done, and a reset has no way back")
    return Refused(
        "boundary-past",
        f"run {run} was committed and is done; the way back is a new hand-over: `gridctl swap plan` for the"
        f" node that has the ranks now, --to {plan.node}",
    )
