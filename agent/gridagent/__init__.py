"""gridagent, the node's side: the agent and, in `gridagent.train`, the library of a training process."""

__version__ = "0.1.0"
