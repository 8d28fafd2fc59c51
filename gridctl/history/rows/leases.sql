-- A lease that this home's controller took.
SELECT seq,
       coalesce(TRY_CAST(data ->> '$.t_unix_s' AS DOUBLE), t_unix_s) AS t_unix_s,
       t_unix_s                                            AS recorded_unix_s,
       data ->> '$.incident'                               AS incident,
       data ->> '$.run'                           AS run,
       TRY_CAST(data ->> '$.fence' AS BIGINT)     AS fence,
       data ->> '$.holder'                        AS holder,
       TRY_CAST(data -> '$.granted' AS VARCHAR[]) AS granted,
       data
FROM records
WHERE kind = 'lease'
