-- What is said of an incident: opened, closed, and what people made of it.
SELECT seq,
       coalesce(TRY_CAST(data ->> '$.t_unix_s' AS DOUBLE), t_unix_s) AS t_unix_s,
       t_unix_s                                            AS recorded_unix_s,
       data ->> '$.incident'                               AS incident,
       data ->> '$.state'   AS state,
       data ->> '$.kind'    AS kind,
       data ->> '$.node'    AS node,
       data ->> '$.job'     AS job,
       data ->> '$.title'   AS title,
       data ->> '$.verdict' AS verdict,
       data ->> '$.who'     AS who,
       data ->> '$.reason'  AS reason,
       data ->> '$.merged_into'                             AS merged_into,
       data
FROM records
WHERE kind = 'incident'
