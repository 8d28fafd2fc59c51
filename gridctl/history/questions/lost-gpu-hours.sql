-- title: GPU-hours that were lost
-- subject: incidents at opened_unix_s
-- meaning: How long GPUs of jobs stood idle, by cause.
-- computed: pause: a running job's pause for a committed hand-over. turned back: the pause of a cut that was
--   aborted. standing: from the first finding that a rank has died or is silent until the job went on. Each
--   times all GPUs of the job; on CPU a rank counts as one. Money is that times price_usd_per_gpu_h of
--   policy.toml.
-- unknown: Crashes and restarts that gridctl had no hand in are not seen. Where a job stood and no hand-over
--   ended that, or a run failed after its cut, nobody knows how long it was until the job trained again: such
--   rows have no hours. Clocks of nodes may differ by seconds.
-- columns:
--   scope   whose: the fleet, or as --by asks of the node of the incident; null where that is not known
--   cause   pause, turned back, standing, stood and not brought on, failed after the cut
--   events  how many
--   known   of them, how long is known
--   gpu_h   GPU-hours of those; null where none is known
--   usd     the same in money; null without a price
--   note    what to know about these figures
WITH cut AS (
    SELECT s.scope, s.incident, h.state, h.outcome, coalesce(h.standing, false) AS standing,
           h.gpus * h.pause_ms / 3.6e6 AS pause_gpu_h,
           h.gpus * (t.until_unix_s - t.from_unix_s) / 3600 AS stood_gpu_h
    FROM subject s
    JOIN handovers h ON h.incident = s.incident AND h.outcome IS NOT NULL
    LEFT JOIN stands t ON t.run = h.run
), lost AS (
    SELECT scope,
           CASE WHEN outcome <> 'commit' THEN 'turned back' WHEN standing THEN 'standing' ELSE 'pause' END
               AS cause,
           CASE WHEN outcome = 'commit' AND standing THEN stood_gpu_h
                WHEN standing THEN 0  -- it stood anyway
                ELSE pause_gpu_h END AS gpu_h
    FROM cut
    UNION ALL
    SELECT s.scope, 'stood and not brought on', NULL
    FROM subject s JOIN stands t ON t.incident = s.incident AND t.run IS NULL
    WHERE s.merged_into IS NULL
    UNION ALL
    SELECT scope, 'failed after the cut', NULL FROM cut WHERE outcome = 'commit' AND state = 'failed'
)
SELECT scope, cause, count(*) AS events, count(gpu_h) AS known, sum(gpu_h) AS gpu_h,
       sum(gpu_h) * any_value(usd_per_gpu_h) AS usd,
       nullif(concat_ws('; ',
           CASE WHEN scope IS NULL THEN 'what these nodes were was never journaled' END,
           CASE WHEN count(*) > count(gpu_h)
               THEN 'how long is not known of ' || (count(*) - count(gpu_h)) END,
           CASE WHEN any_value(usd_per_gpu_h) IS NULL
               THEN 'no price: price_usd_per_gpu_h in policy.toml' END), '')
           AS note
FROM lost, asked
GROUP BY scope, cause
ORDER BY scope, cause
