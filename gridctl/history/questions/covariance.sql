-- title: Do NIC errors and accelerator faults come together?
-- subject: node_spans
-- meaning: Whether days on which a node's network adapter shows errors are days on which its accelerators
--   fail.
-- computed: Over days (UTC) of nodes. A day has NIC errors with a finding on a device nic:..., accelerator
--   faults with one on gpu:..., of severity warning or above and not suppressed. Expected is what chance
--   gives (both shares multiplied); lift is found over expected, with the 90 % interval of a Poisson count;
--   phi is the correlation of the two, from -1 to 1.
-- unknown: What comes first or is the cause: a loose riser or a power fault shows in both. Days on which no
--   controller ran count as quiet. With fewer than 3 days of either kind nothing is said.
-- columns:
--   scope          whose: the fleet, or as --by asks; null where that is not known
--   node_days      how many
--   nic_days       with errors of a NIC
--   gpu_days       with faults of an accelerator
--   both_days      with both
--   expected_days  with both, by chance
--   lift           found over expected; null where too little is known
--   lift_low       not below that, with 95 %
--   lift_high      not above that, with 95 %
--   phi            correlation; null where too little is known
--   nic_first      accelerator days' first faults that had a NIC error within the hour before
--   note           what to know about these figures
WITH watched AS (
    SELECT scope, node,
           floor(max(until_unix_s) / 86400) - floor(min(from_unix_s) / 86400) + 1 AS days
    FROM subject
    GROUP BY scope, node
), seen AS (
    SELECT s.scope, f.node, floor(f.t_unix_s / 86400) AS day, f.t_unix_s, f.device LIKE 'nic:%' AS nic
    FROM subject s
    JOIN findings f ON f.node = s.node AND f.t_unix_s >= s.from_unix_s AND f.t_unix_s < s.until_unix_s
    WHERE f.type = 'finding' AND f.severity IN ('warning', 'critical', 'fatal')
      AND (f.device LIKE 'nic:%' OR f.device LIKE 'gpu:%')
), days AS (
    SELECT scope, node, day, bool_or(nic) AS nic, bool_or(NOT nic) AS gpu,
           min(t_unix_s) FILTER (NOT nic) AS gpu_unix_s
    FROM seen
    GROUP BY scope, node, day
), led AS (
    SELECT d.scope, count(*) AS nic_first
    FROM days d
    SEMI JOIN (FROM seen WHERE nic) n
         ON n.node = d.node AND n.t_unix_s BETWEEN d.gpu_unix_s - 3600 AND d.gpu_unix_s
    GROUP BY d.scope
), counted AS (
    SELECT w.scope, w.node_days::DOUBLE AS n, coalesce(d.x, 0) AS x, coalesce(d.y, 0) AS y,
           coalesce(d.both_days, 0) AS both_days
    FROM (SELECT scope, sum(days) AS node_days FROM watched GROUP BY scope) w
    LEFT JOIN (SELECT scope, count(*) FILTER (nic) AS x, count(*) FILTER (gpu) AS y,
                      count(*) FILTER (nic AND gpu) AS both_days
               FROM days GROUP BY scope) d ON d.scope IS NOT DISTINCT FROM w.scope
)
SELECT c.scope, n::BIGINT AS node_days, x AS nic_days, y AS gpu_days, both_days,
       CASE WHEN n > 0 THEN x * y / n END AS expected_days,
       CASE WHEN x >= 3 AND y >= 3 THEN both_days * n / (x * y) END AS lift,
       CASE WHEN x >= 3 AND y >= 3 THEN poisson_low(both_days) * n / (x * y) END AS lift_low,
       CASE WHEN x >= 3 AND y >= 3 THEN poisson_high(both_days) * n / (x * y) END AS lift_high,
       CASE WHEN x >= 3 AND y >= 3 AND x < n AND y < n
            THEN (both_days * n - x * y) / sqrt(x * y * (n - x) * (n - y)) END AS phi,
       coalesce(nic_first, 0) AS nic_first,
       nullif(concat_ws('; ',
           CASE WHEN c.scope IS NULL THEN 'what these nodes were was never journaled' END,
           CASE WHEN x < 3 OR y < 3 THEN 'fewer than 3 days of either kind: nothing can be said' END), '')
           AS note
FROM counted c
LEFT JOIN led l ON l.scope IS NOT DISTINCT FROM c.scope
ORDER BY c.scope
