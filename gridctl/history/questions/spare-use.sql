-- title: What spares are good for
-- subject: node_spans
-- meaning: How much stands by, how often it is taken, and how often none was there.
-- computed: A node is a spare while a process waits there for a rank. Taken: a committed hand-over moved
--   ranks there. Lacked: incidents for which a plan was refused with no-spare.
-- unknown: Without facts (journals of earlier versions) nobody knows which nodes were spares. Spares of other
--   programs are not seen.
-- columns:
--   scope         whose: the fleet, or as --by asks; null where that is not known
--   nodes         how many
--   spare_nodes   of them, at any time; null where it was never journaled
--   node_h        hours of all
--   spare_h       hours as spares
--   spare_share   of all hours
--   taken         hand-overs that took one
--   taken_per_1000_spare_h  of them
--   lacked        incidents on these nodes for which there was no spare
--   note          what to know about these figures
WITH held AS (
    SELECT scope,
           count(DISTINCT node)                                              AS nodes,
           count(DISTINCT node) FILTER (spare)                               AS spare_nodes,
           sum(until_unix_s - from_unix_s) / 3600                            AS node_h,
           coalesce(sum(until_unix_s - from_unix_s) FILTER (spare) / 3600, 0) AS spare_h,
           count(spare) > 0                                                  AS told
    FROM subject
    GROUP BY scope
), taken AS (
    SELECT s.scope, count(DISTINCT h.run) AS taken
    FROM (SELECT run, started_unix_s, unnest(list_distinct(targets)) AS node
          FROM handovers WHERE outcome = 'commit') h
    JOIN subject s ON s.node = h.node
                  AND h.started_unix_s >= s.from_unix_s AND h.started_unix_s < s.until_unix_s
    GROUP BY s.scope
), lacked AS (
    SELECT s.scope, count(DISTINCT e.incident) AS lacked
    FROM events e
    JOIN incidents i USING (incident)
    JOIN subject s ON s.node = i.node AND e.t_unix_s >= s.from_unix_s AND e.t_unix_s < s.until_unix_s
    WHERE e.kind = 'note' AND e.data ->> '$.code' = 'no-spare'
    GROUP BY s.scope
)
SELECT h.scope, nodes,
       CASE WHEN told THEN spare_nodes END AS spare_nodes,
       node_h,
       CASE WHEN told THEN spare_h END AS spare_h,
       CASE WHEN told AND node_h > 0 THEN spare_h / node_h END AS spare_share,
       coalesce(taken, 0) AS taken,
       CASE WHEN told AND spare_h > 0 THEN 1000 * coalesce(taken, 0) / spare_h END AS taken_per_1000_spare_h,
       coalesce(lacked, 0) AS lacked,
       CASE WHEN NOT told THEN 'which nodes were spares was never journaled' END AS note
FROM held h
LEFT JOIN taken t ON t.scope IS NOT DISTINCT FROM h.scope
LEFT JOIN lacked l ON l.scope IS NOT DISTINCT FROM h.scope
ORDER BY h.scope
