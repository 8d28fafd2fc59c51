-- title: Hand-overs, one by one
-- subject: handovers at started_unix_s
-- meaning: What moved from where to where, how long the job paused, how much was moved, and whether it came
--   out right.
-- computed: One row a run that was to move ranks. A commit means that the digests of every part of the state
--   were equal at source and target; `gridctl sql "SELECT digests FROM handovers"` shows them.
-- unknown: Where no cut was tried there was no pause, and nothing was moved.
-- columns:
--   scope           whose: the fleet, or as --by asks of the node that was left; null where that is not known
--   started_unix_s  when the run began
--   run             its id
--   job             whose ranks moved
--   node            that they left
--   targets         nodes that took them, a list
--   ranks_moved     a list
--   state           of the run
--   outcome         commit, abort, or null where no cut was tried
--   pause_ms        how long the job stood still for the cut
--   state_bytes     that were moved
--   digests         how many digests were compared
--   steps_slower    median step after it over the one before, less 1
--   note            what to know about this row
SELECT scope, started_unix_s, run, job, node, targets, ranks_moved, state, outcome, pause_ms, state_bytes,
       CASE WHEN digests IS NOT NULL THEN
           list_sum([len(json_keys(value)) FOR value IN map_values(TRY_CAST(digests AS MAP(VARCHAR, JSON)))])
       END AS digests,
       CASE WHEN step_s_before > 0 THEN step_s_after / step_s_before - 1 END AS steps_slower,
       nullif(concat_ws('; ',
           CASE WHEN outcome IS NULL THEN 'no cut was tried' END,
           CASE WHEN standing THEN 'the job stood before: the pause is only that of the cut' END,
           CASE WHEN ended_unix_s IS NULL THEN 'not ended' END), '') AS note
FROM subject
ORDER BY started_unix_s, run
