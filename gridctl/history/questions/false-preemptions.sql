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
    SELECT s.scope, s.run, s.node, s.started_unix_s, i.verdict
    FROM subject s
    JOIN incidents i USING (incident)
    WHERE s.outcome = 'commit' AND NOT coalesce(s.standing, false) AND i.kind IS DISTINCT FROM 'manual'
), opened AS (
    SELECT m.run, m.node, m.started_unix_s, min(a.t_unix_s) AS opened_unix_s
    FROM moved m
    JOIN audit a ON a.what = 'uncordon' AND a.node = m.node AND a.t_unix_s > m.started_unix_s
    GROUP BY ALL
), compared AS (
    SELECT o.run, o.node, o.started_unix_s, o.opened_unix_s,
           b.serial <> '' AND (b.serial, b.boot_id, b.driver, b.gpu_model, b.gpus, b.devices)
                            = (e.serial, e.boot_id, e.driver, e.gpu_model, e.gpus, e.devices) AS same
    FROM opened o
    ASOF JOIN node_spans b ON b.node = o.node AND o.started_unix_s >= b.from_unix_s
    ASOF JOIN node_spans e ON e.node = o.node AND o.opened_unix_s >= e.from_unix_s
), unchanged AS (
    SELECT c.run
    FROM compared c
    ANTI JOIN (SELECT r.node, r.started_unix_s FROM runs r JOIN plans p ON p.plan = r.plan AND p.runbook = 'reset') x
         ON x.node = c.node AND x.started_unix_s BETWEEN c.started_unix_s AND c.opened_unix_s
    WHERE c.same
), judged AS (
    SELECT scope,
           CASE verdict WHEN 'true_fault' THEN 'true' WHEN 'false_alarm' THEN 'false' WHEN 'unknown' THEN 'unknown'
                ELSE CASE WHEN run IN (SELECT run FROM unchanged) THEN 'unchanged' ELSE 'unmarked' END END AS word
    FROM moved
), counted AS (
    SELECT scope,
           count(*)                                AS preemptions,
           count(*) FILTER (word = 'true')         AS true_faults,
           count(*) FILTER (word = 'false')        AS false_alarms,
           count(*) FILTER (word = 'unchanged')    AS opened_unchanged,
           count(*) FILTER (word = 'unknown')      AS said_unknown,
           count(*) FILTER (word = 'unmarked')     AS unmarked
    FROM judged
    GROUP BY scope
)
SELECT *,
       CASE WHEN true_faults + false_alarms + opened_unchanged > 0
            THEN (false_alarms + opened_unchanged) / (true_faults + false_alarms + opened_unchanged) END AS false_share,
       share_low(false_alarms + opened_unchanged, true_faults + false_alarms + opened_unchanged)         AS false_low,
       share_high(false_alarms + opened_unchanged, true_faults + false_alarms + opened_unchanged)        AS false_high,
       nullif(concat_ws('; ',
           CASE WHEN scope IS NULL THEN 'what these nodes were was never journaled' END,
           CASE WHEN true_faults + false_alarms + opened_unchanged = 0
                THEN 'none is judged: gridctl incident close --verdict' END,
           CASE WHEN said_unknown + unmarked > 0 THEN 'those that nobody judged are in no share' END), '') AS note
FROM counted
ORDER BY scope
