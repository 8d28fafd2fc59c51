"""The spool -> Parquet, and Parquet -> coarser Parquet as it gets older: 1 s, then 1 min, then 1 h.

Samples keep mean, lowest, highest, last and count of each span; progress keeps the last step of each span.
A day is in one tier at a time: it is put into the next as a whole, once all of it is old enough.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from gridctl.history.catalog import Catalog, File
from gridctl.history.seal import Sealer, day_of
from gridctl.history.spool import spooled
from gridctl.history.store import Store
from gridctl.history.tables import parquet, spooled_progress, spooled_samples
from gridctl.model.policy import Kept

if TYPE_CHECKING:
    import duckdb

ORDERS = {
    "samples": "node, device, metric, t_unix_s",
    "progress": "node, job, rank, t_unix_s",
}
_DAY_S = 86_400.0
_HOUR_S = 3600


class Telemetry:
    """Works on a store, within its `writing()`, through the same database as the sealer."""

    def __init__(self, store: Store, sealer: Sealer, database: "duckdb.DuckDBPyConnection") -> None:
        self._store = store
        self._sealer = sealer
        self._database = database

    def take_in(self, spool: Path) -> None:
        """Every file of the spool that has an end: all but the newest."""
        for path in spooled(spool, self._sealer.catalog.spooled)[:-1]:
            new: list[File] = []
            for table, select in (
                ("samples", spooled_samples([path])),
                ("progress", spooled_progress([path])),
            ):
                self._database.execute(f"CREATE OR REPLACE TEMP TABLE spooled AS {select}")
                days = self._database.execute(
                    "SELECT DISTINCT floor(t_unix_s / 86400)::BIGINT FROM spooled ORDER BY 1"
                ).fetchall()
                for (day,) in days:
                    its = f"FROM spooled WHERE floor(t_unix_s / 86400)::BIGINT = {day}"
                    new += self._sealer.write(table, day_of(day * _DAY_S), its, ORDERS[table], 1)
            self._sealer.commit(new, [], spooled=int(path.stem))

    def clear(self, spool: Path, before_unix_s: float) -> None:
        """Deletes what was taken in and is older than `before_unix_s`."""
        for path in spooled(spool):
            if int(path.stem) <= self._sealer.catalog.spooled and path.stat().st_mtime < before_unix_s:
                path.unlink()

    def thin(self, kept: Kept, now_unix_s: float) -> None:
        """Puts every day into the tier of its age."""
        groups: dict[tuple[str, str, int], list[File]] = {}
        for file, span_s in due(self._sealer.catalog, kept, now_unix_s):
            period = file.period[:7] if span_s == _HOUR_S else file.period
            groups.setdefault((file.table, period, span_s), []).append(file)
        for (table, period, span_s), files in sorted(groups.items()):
            # What came late joins what the day, or the month, has in that tier.
            there = self._sealer.catalog.of(table)
            old = [*files, *(f for f in there if (f.period, f.span_s) == (period, span_s))]
            whole = parquet([self._store.url(file.path) for file in old])
            select = (_coarser if table == "samples" else _last)(whole, span_s)
            new = self._sealer.write(table, period, select, ORDERS[table], span_s)
            self._sealer.commit(new, old)


def due(catalog: Catalog, kept: Kept, now_unix_s: float) -> list[tuple[File, int]]:
    """Files whose rows are older than their tier keeps them, with the span that they ought to have."""
    aged = [(file, _span_s(file, kept, now_unix_s)) for file in catalog.files if file.table in ORDERS]
    return [(file, span_s) for file, span_s in aged if span_s > file.span_s]


def _span_s(file: File, kept: Kept, now_unix_s: float) -> int:
    """The tier of a file by the end of its last day."""
    age_s = now_unix_s - (file.last // _DAY_S + 1) * _DAY_S
    if age_s > kept.minutes_d * _DAY_S:
        return _HOUR_S
    return 60 if age_s > kept.seconds_h * 3600 else 1


def _coarser(source: str, span_s: int) -> str:
    return (
        f"SELECT floor(t_unix_s / {span_s})::DOUBLE * {span_s} AS t_unix_s, {span_s}::INTEGER AS span_s, "
        "node, device, metric, sum(value * n) / sum(n) AS value, min(low) AS low, max(high) AS high, "
        "arg_max(last, t_unix_s) AS last, sum(n)::BIGINT AS n "
        f"FROM {source} GROUP BY floor(t_unix_s / {span_s}), node, device, metric"
    )


def _last(source: str, span_s: int) -> str:
    return (
        f"SELECT * FROM {source} QUALIFY row_number() OVER "
        f"(PARTITION BY node, job, rank, floor(t_unix_s / {span_s}) ORDER BY t_unix_s DESC, step DESC) = 1"
    )
