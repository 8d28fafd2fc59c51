SELECT seq,
       COALESCE(TRY_CAST(data ->> '$.t_unix_s' AS DOUBLE), t_unix_s) AS t_unix_s,
       t_unix_s                 AS recorded_unix_s,
       data ->> '$.incident'    AS incident,
       data ->> '$.state'       AS state,
       data ->> '$.kind'        AS kind,
       data ->> '$.node'        AS node,
       data ->> '$.job'         AS job,
       data ->> '$.title'       AS title,
       data
FROM records
WHERE kind = 'incident'
