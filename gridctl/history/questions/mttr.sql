-- title: Mean time to repair
-- subject: incidents at opened_unix_s
-- meaning: How long incidents last, and how soon something was decided, begun and done about them.
-- computed: Over incidents that began within the time asked for, without those that a person opened by a plan
--   and those merged into others. Means and quantiles are of closed ones; the other medians of those that
--   came so far.
-- unknown: An incident that is still open will last longer than any of the figures says; what took place
--   while no controller ran was not seen. A closed incident is not always a repaired node.
-- columns:
--   scope             whose: the fleet, or as --by asks; null where that is not known
--   incidents         how many
--   closed            of them
--   still_open        of them: not in the figures below
--   mean_s            from its beginning until it was closed
--   median_s          the same
--   p90_s             the same
--   decided_median_s  until detection decided to leave the node
--   begun_median_s    until a run was begun
--   moved_median_s    until a run was done
--   note              what to know about these figures
SELECT scope,
       count(*)                                 AS incidents,
       count(closed_unix_s)                     AS closed,
       count(*) - count(closed_unix_s)          AS still_open,
       avg(duration_s)                          AS mean_s,
       median(duration_s)                       AS median_s,
       quantile_cont(duration_s, 0.9)           AS p90_s,
       median(decided_unix_s - opened_unix_s)   AS decided_median_s,
       median(begun_unix_s - opened_unix_s)     AS begun_median_s,
       median(done_unix_s - opened_unix_s)      AS moved_median_s,
       nullif(concat_ws('; ',
           CASE WHEN scope IS NULL THEN 'what these nodes were was never journaled' END,
           CASE WHEN count(closed_unix_s) = 0 THEN 'none was closed'
                WHEN count(closed_unix_s) < 5 THEN 'fewer than 5 were closed: hardly a mean' END,
           CASE WHEN count(*) > count(closed_unix_s) THEN 'those still open will last longer' END), '')
           AS note
FROM subject
LEFT JOIN (SELECT incident, min(t_unix_s) AS decided_unix_s
           FROM decisions WHERE type = 'decision' GROUP BY incident)
    USING (incident)
LEFT JOIN (SELECT incident, min(started_unix_s) AS begun_unix_s,
                  min(ended_unix_s) FILTER (state = 'done') AS done_unix_s
           FROM runs GROUP BY incident)
    USING (incident)
WHERE kind IS DISTINCT FROM 'manual' AND merged_into IS NULL
GROUP BY scope
ORDER BY scope
