"""gridctl inside the training process. See `gridagent.train.session` for the five lines it takes."""

from gridagent.train.context import CONTEXT
from gridagent.train.group import GroupError, register
from gridagent.train.session import Session, SessionError
from gridagent.train.state import StateError

__all__ = ["CONTEXT", "GroupError", "Session", "SessionError", "StateError"]

register(CONTEXT.registry)
