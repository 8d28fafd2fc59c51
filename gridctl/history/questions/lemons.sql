-- title: Nodes that fail again and again
-- subject: node_spans
-- meaning: Which nodes came back from repair and failed again, or fail more often than chance explains.
-- computed: A relapse is a fault within 30 days after a person opened the node again; two of them make a
--   lemon, as in the rules of `gridctl diagnose`. Expected are the faults that the fleet's rate gives for the
--   node's hours; more than chance: the lower limit of the 90 % interval of its count is above that. Listed
--   are nodes with two faults or a relapse.
-- unknown: Among many nodes some lie above their limit by chance: one in twenty. Whether a repair was one,
--   nobody journals.
-- columns:
--   scope             whose: the fleet, or as --by asks; null where that is not known
--   node              its name
--   lemon             two relapses or more
--   relapses          faults within 30 days after it was opened again
--   opened            how often a person opened it again
--   faults            how many
--   expected          by the rate of all nodes asked about
--   more_than_chance  whether that many are unlikely for a node like the others
--   kinds             first causes, a list
--   last_unix_s       the newest fault
--   node_h            hours that it was watched
--   note              what to know about these figures
WITH watched AS (
    SELECT node, arg_max(scope, from_unix_s) AS scope, sum(until_unix_s - from_unix_s) / 3600 AS node_h
    FROM subject
    GROUP BY node
), failed AS (
    SELECT f.*
    FROM subject s
    JOIN faults f ON f.node = s.node AND f.t_unix_s >= s.from_unix_s AND f.t_unix_s < s.until_unix_s
), found AS (
    SELECT node, count(*) AS faults, list_sort(list(DISTINCT kind)) AS kinds, max(t_unix_s) AS last_unix_s
    FROM failed
    GROUP BY node
), back AS (
    SELECT a.node, a.t_unix_s
    FROM subject s
    JOIN audit a ON a.node = s.node AND a.what = 'uncordon'
                AND a.t_unix_s >= s.from_unix_s AND a.t_unix_s < s.until_unix_s
), again AS (
    SELECT b.node, count(DISTINCT b.t_unix_s) AS opened, count(DISTINCT f.fault) AS relapses
    FROM back b
    LEFT JOIN failed f ON f.node = b.node
                      AND f.t_unix_s > b.t_unix_s AND f.t_unix_s <= b.t_unix_s + 30 * 86400
    GROUP BY b.node
), counted AS (
    SELECT w.scope, w.node, w.node_h,
           coalesce(a.relapses, 0) AS relapses, coalesce(a.opened, 0) AS opened,
           coalesce(f.faults, 0) AS faults, f.kinds, f.last_unix_s,
           w.node_h * sum(coalesce(f.faults, 0)) OVER () / nullif(sum(w.node_h) OVER (), 0) AS expected
    FROM watched w
    LEFT JOIN found f USING (node)
    LEFT JOIN again a USING (node)
)
SELECT scope, node, relapses >= 2 AS lemon, relapses, opened, faults, expected,
       poisson_low(faults) > expected AS more_than_chance,
       kinds, last_unix_s, node_h,
       CASE WHEN node_h < 24 THEN 'watched for less than a day' END AS note
FROM counted
WHERE faults >= 2 OR relapses >= 1
ORDER BY lemon DESC, relapses DESC, faults DESC, node
