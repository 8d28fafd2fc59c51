"""What was, as tables and views: the journal and what the nodes told, sealed as Parquet or not yet.

`History` answers questions; `compact` and its fellows write the store. DuckDB is imported where it is used.
"""

from gridctl.history.reader import VIEWS, History, HistoryError

__all__ = ["VIEWS", "History", "HistoryError"]
