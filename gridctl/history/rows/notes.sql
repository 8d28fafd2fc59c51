-- What a node or the controller told in passing: phases of a hand-over, why there is no plan.
SELECT seq,
       coalesce(TRY_CAST(data ->> '$.t_unix_s' AS DOUBLE), t_unix_s) AS t_unix_s,
       t_unix_s                                            AS recorded_unix_s,
       data ->> '$.incident'                               AS incident,
       data ->> '$.run'                      AS run,
       data ->> '$.node'                     AS node,
       data ->> '$.phase'                    AS phase,
       data ->> '$.handover'                 AS handover,
       TRY_CAST(data ->> '$.rank' AS BIGINT) AS rank,
       data ->> '$.role'                     AS role,
       data ->> '$.session'                  AS session,
       data ->> '$.code'                     AS code,
       data ->> '$.text'                     AS text,
       data -> '$.detail'                    AS detail,
       data
FROM records
WHERE kind = 'note'
