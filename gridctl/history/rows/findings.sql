-- What detection saw, and what it saw and held back (`suppressed`). Verdicts on a node have type verdict.
SELECT seq,
       coalesce(TRY_CAST(data ->> '$.t_unix_s' AS DOUBLE), t_unix_s) AS t_unix_s,
       t_unix_s                                            AS recorded_unix_s,
       data ->> '$.incident'                               AS incident,
       data ->> '$.type'                             AS type,
       kind = 'decision'                             AS suppressed,
       data ->> '$.kind'                             AS kind,
       data ->> '$.node'                             AS node,
       data ->> '$.device'                           AS device,
       data ->> '$.job'                              AS job,
       data ->> '$.rule'                             AS rule,
       data ->> '$.layer'                            AS layer,
       data ->> '$.fault'                            AS fault,
       data ->> '$.severity'                         AS severity,
       data ->> '$.action'                           AS action,
       data ->> '$.when'                             AS due,
       TRY_CAST(data ->> '$.preempt_job' AS BOOLEAN) AS preempt_job,
       TRY_CAST(data ->> '$.xid' AS BIGINT)          AS xid,
       data ->> '$.pci'                              AS pci,
       TRY_CAST(data -> '$.why' AS VARCHAR[])        AS why,
       data
FROM records
WHERE kind = 'finding' OR (kind = 'decision' AND data ->> '$.type' = 'suppressed')
