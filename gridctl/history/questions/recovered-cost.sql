-- title: What a recovered GPU-hour costs
-- subject: handovers at started_unix_s
-- meaning: What committed hand-overs have cost for each GPU-hour that they are expected to have saved.
-- computed: Recovered is what waiting was expected to cost when the plan was made (deferred_gpu_h; of a job
--   that stood: the choice to watch, a restart from a checkpoint). Spent are the measured pause, or of a job
--   that stood the time until it went on, times all its GPUs, and the GPUs of the moved ranks for as long as
--   the run prepared them. Money by price_usd_per_gpu_h of policy.toml; energy by the mean of power_w of the
--   GPUs of the nodes left and taken during the runs.
-- unknown: What would have happened without the move nobody knows: recovered hours are an expectation, often
--   from a base rate. Prices of spares that stand by are not in it (`gridctl ask spare-use`).
-- columns:
--   scope            whose: the fleet, or as --by asks of the node left; null where that is not known
--   swaps            committed hand-overs for which both sides are known
--   recovered_gpu_h  expected
--   spent_gpu_h      measured
--   gpu_h_per_recovered_gpu_h  spent over recovered
--   usd_per_recovered_gpu_h    the same in money; null without a price
--   mean_power_w     of a GPU; null where no sample tells it
--   kwh_per_recovered_gpu_h    energy; null where no sample tells the power
--   note             what to know about these figures
WITH waited AS (
    SELECT incident, arg_max(TRY_CAST(list_filter(TRY_CAST(alternatives AS JSON[]),
               lambda a: a ->> '$.action' = 'watch')[1] ->> '$.cost.gpu_h' AS DOUBLE), seq) AS watch_gpu_h
    FROM decisions
    WHERE type = 'choice' AND action = 'swap_now'
    GROUP BY incident
), moved AS (
    SELECT s.scope, s.run, s.node, s.targets, s.started_unix_s, s.ended_unix_s,
           CASE WHEN s.standing THEN w.watch_gpu_h ELSE p.deferred_gpu_h END AS recovered_gpu_h,
           s.gpus * CASE WHEN s.standing THEN f.until_unix_s - f.from_unix_s
                         ELSE s.pause_ms / 1000 END / 3600
           + s.gpus * len(s.ranks_moved) / p.ranks * (s.t_resume_unix_s - s.started_unix_s) / 3600
               AS spent_gpu_h
    FROM subject s
    JOIN plans p ON p.plan = s.plan
    LEFT JOIN stands f ON f.run = s.run
    LEFT JOIN waited w ON w.incident = s.incident
    WHERE s.outcome = 'commit'
), powered AS (
    SELECT m.scope, sum(x.value * x.n) / sum(x.n) AS mean_power_w
    FROM (SELECT scope, started_unix_s, ended_unix_s, unnest(list_append(targets, node)) AS node FROM moved) m
    JOIN samples x ON x.node = m.node AND x.metric = 'power_w' AND x.device LIKE 'gpu:%'
                  AND x.t_unix_s + x.span_s > m.started_unix_s AND x.t_unix_s <= m.ended_unix_s
    GROUP BY m.scope
), summed AS (
    SELECT scope, count(*) AS all_swaps,
           count(*) FILTER (recovered_gpu_h + spent_gpu_h IS NOT NULL)             AS swaps,
           sum(recovered_gpu_h) FILTER (spent_gpu_h IS NOT NULL)                   AS recovered_gpu_h,
           sum(spent_gpu_h) FILTER (recovered_gpu_h IS NOT NULL)                   AS spent_gpu_h
    FROM moved
    GROUP BY scope
)
SELECT s.scope, swaps, recovered_gpu_h, spent_gpu_h,
       spent_gpu_h / nullif(recovered_gpu_h, 0)                              AS gpu_h_per_recovered_gpu_h,
       spent_gpu_h / nullif(recovered_gpu_h, 0) * usd_per_gpu_h              AS usd_per_recovered_gpu_h,
       mean_power_w,
       spent_gpu_h / nullif(recovered_gpu_h, 0) * mean_power_w / 1000        AS kwh_per_recovered_gpu_h,
       nullif(concat_ws('; ',
           CASE WHEN s.scope IS NULL THEN 'what these nodes were was never journaled' END,
           CASE WHEN all_swaps > swaps
               THEN (all_swaps - swaps) || ' more, of which one side is not known' END,
           CASE WHEN usd_per_gpu_h IS NULL THEN 'no price: price_usd_per_gpu_h in policy.toml' END,
           CASE WHEN mean_power_w IS NULL THEN 'no sample tells the power' END,
           'recovered hours are an expectation'), '') AS note
FROM asked, summed s
LEFT JOIN powered w ON w.scope IS NOT DISTINCT FROM s.scope
ORDER BY s.scope
