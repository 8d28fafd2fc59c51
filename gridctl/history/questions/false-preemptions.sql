-- title: Moves that need not have been
-- subject: handovers at started_unix_s
-- meaning: How many nodes were left because of something that was no fault of theirs.
-- computed: Over committed hand-overs of running jobs that began with a finding (not those a person opened,
--   nor of jobs that stood). False: the incident was closed with the verdict false_alarm, or nobody judged it
--   and the node was opened again (uncordon) with the same boot, chassis, devices and driver and no reset
--   between. The share is that of all that are judged so or as true_fault.
-- unknown: Unmarked moves are in no share: neither judged nor opened unchanged, or what the node was is not
--   known. A node that was opened unchanged may have been repaired by reseating, and be counted as false: a
--   verdict counts before that.
-- columns:
--   scope             whose: the fleet, or as --by asks; null where that is not known
--   preemptions       how many
--   true_faults       people said so
--   false_alarms      people said so
--   opened_unchanged  nobody said, and the node was opened again unchanged
--   said_unknown      people said that they do not know
--   unmarked          nobody said anything
--   false_share       false ones of the judged; null where none is judged
--   false_low         not below that, with 95 %
--   false_high        not above that, with 95 %
--   note              what to know about these figures
WITH moved AS (
    SELECT s.scope, s.run, s.node, s.started_unix_s, s.gpu_model IS NOT NULL AS known, i.verdict
    FROM subject s
    JOIN incidents i USING (incident)
    WHERE s.outcome = 'commit' AND NOT coalesce(s.standing, false) AND i.kind IS DISTINCT FROM 'manual'
), opened AS (
    SELECT m.run, m.node, m.started_unix_s, min(a.t_unix_s) AS opened_unix_s
    FROM moved m
    JOIN audit a ON a.what = 'uncordon' AND a.node = m.node AND a.t_unix_s > m.started_unix_s
    WHERE m.known
    GROUP BY ALL
), identities AS (
    SELECT node, from_unix_s, row(serial, boot_id, driver, gpu_model, gpus, devices::VARCHAR) AS identity
    FROM node_spans
    WHERE gpu_model IS NOT NULL
), changed AS (
    SELECT node, from_unix_s AS t_unix_s
    FROM identities
    QUALIFY identity IS DISTINCT FROM lag(identity) OVER (PARTITION BY node ORDER BY from_unix_s)
    UNION ALL
    SELECT r.node, r.started_unix_s
    FROM runs r
    JOIN plans p ON p.plan = r.plan AND p.runbook = 'reset'
), unchanged AS (
    SELECT o.run
    FROM opened o
    ANTI JOIN changed c ON c.node = o.node AND c.t_unix_s > o.started_unix_s AND c.t_unix_s <= o.opened_unix_s
), judged AS (
    SELECT m.scope,
           CASE WHEN verdict IN ('true_fault', 'false_alarm', 'unknown') THEN verdict
                WHEN u.run IS NOT NULL THEN 'unchanged'
                ELSE 'unmarked' END AS word
    FROM moved m
    LEFT JOIN unchanged u ON u.run = m.run
), counted AS (
    SELECT scope,
           count(*)                                 AS preemptions,
           count(*) FILTER (word = 'true_fault')    AS true_faults,
           count(*) FILTER (word = 'false_alarm')   AS false_alarms,
           count(*) FILTER (word = 'unchanged')     AS opened_unchanged,
           count(*) FILTER (word = 'unknown')       AS said_unknown,
           count(*) FILTER (word = 'unmarked')      AS unmarked,
           count(*) FILTER (word IN ('false_alarm', 'unchanged'))               AS k,
           count(*) FILTER (word IN ('false_alarm', 'unchanged', 'true_fault')) AS n
    FROM judged
    GROUP BY scope
)
SELECT * EXCLUDE (k, n),
       CASE WHEN n > 0 THEN k / n END AS false_share,
       share_low(k, n)                AS false_low,
       share_high(k, n)               AS false_high,
       nullif(concat_ws('; ',
           CASE WHEN scope IS NULL THEN 'what these nodes were was never journaled' END,
           CASE WHEN n = 0 THEN 'none is judged: gridctl incident close --verdict' END,
           CASE WHEN said_unknown + unmarked > 0 THEN 'those that nobody judged are in no share' END), '')
               AS note
FROM counted
ORDER BY scope
