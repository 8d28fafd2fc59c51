-- What `History.query` can ask. Times: `_unix_s` are seconds since 1970 UTC, `_s` are seconds.
-- `records` is the journal as it lies on the disk, one row a record.

-- events: every record, with what most questions are about taken out of its data.
--   seq, t_unix_s, t_utc (timestamp), kind, actor, incident, run, node, job (null where a record has none),
--   data (JSON, the record's own), prev, hash
CREATE VIEW events AS
SELECT seq,
       t_unix_s,
       make_timestamp(TRY_CAST(t_unix_s * 1000000 AS BIGINT)) AS t_utc,
       kind,
       actor,
       data ->> '$.incident' AS incident,
       data ->> '$.run'      AS run,
       data ->> '$.node'     AS node,
       data ->> '$.job'      AS job,
       data,
       prev,
       hash
FROM records;

-- incidents: one row an incident, folded from its records.
--   incident, state (open or closed), kind, node, job, title, opened_unix_s, closed_unix_s (null while open),
--   findings, decisions, plans, runs (how many of each)
CREATE VIEW incidents AS
SELECT incident,
       arg_max(data ->> '$.state', seq) FILTER (kind = 'incident') AS state,
       arg_max(data ->> '$.kind', seq)  FILTER (kind = 'incident') AS kind,
       arg_max(node, seq)               FILTER (kind = 'incident') AS node,
       arg_max(job, seq)                FILTER (kind = 'incident') AS job,
       arg_max(data ->> '$.title', seq) FILTER (kind = 'incident') AS title,
       arg_min(t_unix_s, seq)           FILTER (kind = 'incident') AS opened_unix_s,
       CASE arg_max(data ->> '$.state', seq) FILTER (kind = 'incident')
            WHEN 'closed' THEN arg_max(t_unix_s, seq) FILTER (kind = 'incident')
       END AS closed_unix_s,
       count(*) FILTER (kind = 'finding')        AS findings,
       count(*) FILTER (kind = 'decision')       AS decisions,
       count(*) FILTER (kind = 'plan')           AS plans,
       count(DISTINCT run) FILTER (kind = 'run') AS runs
FROM events
WHERE incident IS NOT NULL AND incident <> ''
GROUP BY incident
HAVING count(*) FILTER (kind = 'incident') > 0;

-- runs: one row a run.
--   run, incident, plan, node, job, who, state (running, held, done, aborted, rolled-back, failed), code, text,
--   started_unix_s, ended_unix_s and duration_s (null while it has not ended)
CREATE VIEW runs AS
WITH folded AS (
    SELECT run,
           arg_max(incident, seq)          AS incident,
           arg_max(data ->> '$.plan', seq) AS plan,
           arg_max(node, seq)              AS node,
           arg_max(job, seq)               AS job,
           arg_min(data ->> '$.who', seq)  AS who,
           arg_max(data ->> '$.state', seq) AS state,
           arg_max(data ->> '$.code', seq) AS code,
           arg_max(data ->> '$.text', seq) AS text,
           arg_min(t_unix_s, seq)          AS started_unix_s,
           arg_max(t_unix_s, seq)          AS last_unix_s
    FROM events
    WHERE kind = 'run' AND run IS NOT NULL
    GROUP BY run
)
SELECT * EXCLUDE (last_unix_s),
       CASE WHEN state IN ('done', 'aborted', 'rolled-back', 'failed') THEN last_unix_s END AS ended_unix_s,
       CASE WHEN state IN ('done', 'aborted', 'rolled-back', 'failed')
            THEN last_unix_s - started_unix_s END AS duration_s
FROM folded;

-- steps: one row a step of a run.
--   run, incident, step, position (its place in the plan), state (started, done, failed, undoing, undone,
--   undo-failed), attempts, code, text, started_unix_s, ended_unix_s and duration_s (null while it is under way)
CREATE VIEW steps AS
WITH folded AS (
    SELECT run,
           data ->> '$.step'                                 AS step,
           arg_max(incident, seq)                            AS incident,
           min(TRY_CAST(data ->> '$.index' AS BIGINT))       AS position,
           arg_max(data ->> '$.state', seq)                  AS state,
           count(*) FILTER (data ->> '$.state' = 'started')  AS attempts,
           arg_max(data ->> '$.code', seq)                   AS code,
           arg_max(data ->> '$.text', seq)                   AS text,
           arg_min(t_unix_s, seq)                            AS started_unix_s,
           arg_max(t_unix_s, seq)                            AS last_unix_s
    FROM events
    WHERE kind = 'step' AND run IS NOT NULL
    GROUP BY run, data ->> '$.step'
)
SELECT * EXCLUDE (last_unix_s),
       CASE WHEN state NOT IN ('started', 'undoing') THEN last_unix_s END AS ended_unix_s,
       CASE WHEN state NOT IN ('started', 'undoing') THEN last_unix_s - started_unix_s END AS duration_s
FROM folded;
