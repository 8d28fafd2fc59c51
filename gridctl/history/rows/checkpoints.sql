-- A checkpoint of a job. Nothing writes any yet.
SELECT seq,
       coalesce(TRY_CAST(data ->> '$.t_unix_s' AS DOUBLE), t_unix_s) AS t_unix_s,
       t_unix_s                                            AS recorded_unix_s,
       data ->> '$.incident'                               AS incident,
       data ->> '$.job'                       AS job,
       TRY_CAST(data ->> '$.step' AS BIGINT)  AS step,
       data ->> '$.path'                      AS path,
       TRY_CAST(data ->> '$.bytes' AS BIGINT) AS bytes,
       data ->> '$.sha256'                    AS sha256,
       data ->> '$.state'                     AS state,
       data
FROM records
WHERE kind = 'checkpoint'
