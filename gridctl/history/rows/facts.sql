-- What a node is, from this moment on.
SELECT seq,
       coalesce(TRY_CAST(data ->> '$.t_unix_s' AS DOUBLE), t_unix_s) AS t_unix_s,
       t_unix_s                                            AS recorded_unix_s,
       data ->> '$.incident'                               AS incident,
       data ->> '$.node'                       AS node,
       data ->> '$.rack'                       AS rack,
       data ->> '$.node_class'                 AS node_class,
       data ->> '$.nvlink_domain'              AS nvlink_domain,
       data ->> '$.cooling_zone'               AS cooling_zone,
       data ->> '$.driver'                     AS driver,
       data ->> '$.gpu_model'                  AS gpu_model,
       TRY_CAST(data ->> '$.gpus' AS BIGINT)   AS gpus,
       data ->> '$.serial'                     AS serial,
       data ->> '$.boot_id'                    AS boot_id,
       data ->> '$.version'                    AS version,
       TRY_CAST(data ->> '$.spare' AS BOOLEAN) AS spare,
       data -> '$.jobs'                        AS jobs,
       data -> '$.devices'                     AS devices,
       data
FROM records
WHERE kind = 'facts'
