-- What people and programs did, and in whose name.
SELECT seq,
       coalesce(TRY_CAST(data ->> '$.t_unix_s' AS DOUBLE), t_unix_s) AS t_unix_s,
       t_unix_s                                            AS recorded_unix_s,
       data ->> '$.incident'                               AS incident,
       actor,
       data ->> '$.what'                             AS what,
       data ->> '$.who'                              AS who,
       data ->> '$.reason'                           AS reason,
       data ->> '$.node'                             AS node,
       data ->> '$.run'                              AS run,
       data ->> '$.scope'                            AS scope,
       data ->> '$.id'                               AS id,
       data ->> '$.state'                            AS state,
       data ->> '$.code'                             AS code,
       data ->> '$.text'                             AS text,
       data ->> '$.file'                             AS file,
       TRY_CAST(data ->> '$.bytes' AS BIGINT)        AS bytes,
       data ->> '$.sha256'                           AS sha256,
       TRY_CAST(data ->> '$.taken_unix_s' AS DOUBLE) AS taken_unix_s,
       data ->> '$.value'                                   AS value,
       data
FROM records
WHERE kind = 'audit'
