"""gridctl inside the training process. See `gridagent.train.session` for the five lines it takes."""

from gridagent.train.context import CONTEXT
from gridagent.train.errors import SessionError
from gridagent.train.group import GroupError, register
from gridagent.train.session import Session
from gridagent.train.state import StateError
from gridagent.train.tolerance import StepAborted

__all__ = ["CONTEXT", "GroupError", "Session", "SessionError", "StateError", "StepAborted"]

register(CONTEXT.registry)
