-- title: Mean time between faults of a node
-- subject: node_spans
-- meaning: How many node-hours pass for each fault, with the interval in which the true figure lies with 90
--   %.
-- computed: Faults are rows of the view faults. A node's hours count from the first record that names it. The
--   interval is that of a Poisson count: hours / poisson_high(faults) to hours / poisson_low(faults).
-- unknown: While no controller ran nothing was seen, and that time is not left out: the figure errs high. A
--   fault that detection misses is none here, a false alarm is one (`gridctl ask false-preemptions`).
-- columns:
--   scope               whose: the fleet, or as --by asks; null where that is not known
--   nodes               how many
--   node_h              their hours
--   faults              how many
--   mtbf_h              hours for each fault; null where there was none
--   mtbf_low_h          not below that, with 95 %
--   mtbf_high_h         not above that, with 95 %; null where there was no fault
--   per_1000_node_days  faults in 1,000 node-days
--   note                what to know about these figures
WITH hours AS (
    SELECT scope, count(DISTINCT node) AS nodes, sum(until_unix_s - from_unix_s) / 3600 AS node_h
    FROM subject
    GROUP BY scope
), found AS (
    SELECT scope, count(*) AS faults
    FROM subject s
    JOIN faults f ON f.node = s.node AND f.t_unix_s >= s.from_unix_s AND f.t_unix_s < s.until_unix_s
    GROUP BY scope
), counted AS (
    SELECT h.*, coalesce(f.faults, 0) AS faults
    FROM hours h
    LEFT JOIN found f ON f.scope IS NOT DISTINCT FROM h.scope
)
SELECT scope, nodes, node_h, faults,
       CASE WHEN faults > 0 THEN node_h / faults END               AS mtbf_h,
       node_h / poisson_high(faults)                               AS mtbf_low_h,
       CASE WHEN faults > 0 THEN node_h / poisson_low(faults) END  AS mtbf_high_h,
       CASE WHEN node_h > 0 THEN 24000 * faults / node_h END       AS per_1000_node_days,
       nullif(concat_ws('; ',
           CASE WHEN scope IS NULL THEN 'what these nodes were was never journaled' END,
           CASE WHEN faults = 0 THEN 'no fault: only a lower limit is known'
                WHEN faults < 5 THEN 'fewer than 5 faults: look at the interval' END), '') AS note
FROM counted
ORDER BY scope
