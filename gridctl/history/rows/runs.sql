-- A state that a run came to.
SELECT seq,
       coalesce(TRY_CAST(data ->> '$.t_unix_s' AS DOUBLE), t_unix_s) AS t_unix_s,
       t_unix_s                                            AS recorded_unix_s,
       data ->> '$.incident'                               AS incident,
       data ->> '$.run'   AS run,
       data ->> '$.plan'  AS plan,
       data ->> '$.node'  AS node,
       data ->> '$.job'   AS job,
       data ->> '$.who'   AS who,
       data ->> '$.state' AS state,
       data ->> '$.code'  AS code,
       data ->> '$.text'  AS text,
       data
FROM records
WHERE kind = 'run'
