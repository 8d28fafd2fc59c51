-- Who confirmed a plan, how and why.
SELECT seq,
       coalesce(TRY_CAST(data ->> '$.t_unix_s' AS DOUBLE), t_unix_s) AS t_unix_s,
       t_unix_s                                            AS recorded_unix_s,
       data ->> '$.incident'                               AS incident,
       data ->> '$.plan'                     AS plan,
       data ->> '$.run'                      AS run,
       data ->> '$.digest'                   AS digest,
       data ->> '$.who'                      AS who,
       data ->> '$.reason'                   AS reason,
       data ->> '$.typed'                    AS typed,
       TRY_CAST(data ->> '$.yes' AS BOOLEAN) AS yes,
       data
FROM records
WHERE kind = 'gate'
