"""gridctl, the operator's side: detects, plans, carries out and records hand-overs of training ranks."""

__version__ = "0.1.0"
