-- title: What was promised, and what is left of the error budget
-- subject: incidents at opened_unix_s
-- meaning: For each objective how much was good, and how much may still be bad.
-- computed: Targets and limits are [slo] of policy.toml. recover: incidents with the decision to swap now
--   whose ranks had moved within recover_s; younger open ones are not counted yet. pause: committed
--   hand-overs within pause_ms. swap: of all runs that were to move ranks and have ended, those done.
--   preemption: of moves of running jobs that people have judged, true faults. The budget is (1 - target) x
--   events; what is left of it can be below 0.
-- unknown: With few events a budget is a fraction of one event: one bad one overdraws it, and says little.
-- columns:
--   scope        whose: the fleet, or as --by asks of the node of the incident; null where that is not known
--   objective    recover, pause, swap, preemption
--   target       share that must be good
--   limit        recover: seconds; pause: milliseconds
--   events       how many count
--   good         of them
--   good_share   of them; null where nothing counts
--   good_low     not below that, with 95 %
--   budget       how many may be bad
--   budget_left  share of the budget that is left; null where nothing counts
--   met          whether the target holds; null where nothing counts
--   note         what to know about these figures
WITH scopes AS (
    SELECT DISTINCT scope FROM subject
), objectives AS (
    SELECT scope, unnest([
        {objective: 'recover', target: slo_recover_target, "limit": slo_recover_s},
        {objective: 'pause', target: slo_pause_target, "limit": slo_pause_ms},
        {objective: 'swap', target: slo_swap_target, "limit": NULL},
        {objective: 'preemption', target: slo_preemption_target, "limit": NULL}], recursive := true)
    FROM scopes, asked
), decided AS (
    SELECT DISTINCT incident FROM decisions WHERE decision = 'swap_now'
), moved AS (
    SELECT scope, h.incident, h.state, h.ended_unix_s, h.outcome, h.pause_ms, s.verdict,
           NOT coalesce(h.standing, false) AND s.kind IS DISTINCT FROM 'manual' AS preempted
    FROM subject s
    JOIN handovers h ON h.incident = s.incident
), done AS (
    SELECT incident, min(ended_unix_s) AS done_unix_s FROM moved WHERE state = 'done' GROUP BY incident
), counted AS (
    SELECT scope, 'recover' AS objective, done_unix_s - opened_unix_s <= slo_recover_s AS good
    FROM asked, subject s
    SEMI JOIN decided d ON d.incident = s.incident
    LEFT JOIN done ON done.incident = s.incident
    WHERE merged_into IS NULL AND (done_unix_s IS NOT NULL OR until_unix_s - opened_unix_s > slo_recover_s)
    UNION ALL
    SELECT scope, 'pause', pause_ms <= slo_pause_ms
    FROM asked, moved
    WHERE outcome = 'commit' AND pause_ms IS NOT NULL
    UNION ALL
    SELECT scope, 'swap', state = 'done'
    FROM moved
    WHERE ended_unix_s IS NOT NULL
    UNION ALL
    SELECT scope, 'preemption', verdict = 'true_fault'
    FROM (SELECT DISTINCT scope, incident, verdict FROM moved WHERE outcome = 'commit' AND preempted)
    WHERE verdict IN ('true_fault', 'false_alarm')
), summed AS (
    SELECT o.scope, o.objective, o.target, o."limit", count(c.objective) AS events,
        count(*) FILTER (c.good) AS good
    FROM objectives o
    LEFT JOIN counted c ON c.scope IS NOT DISTINCT FROM o.scope AND c.objective = o.objective
    GROUP BY ALL
)
SELECT scope, objective, target, "limit", events, good,
       CASE WHEN events > 0 THEN good / events END AS good_share,
       share_low(good, events) AS good_low,
       (1 - target) * events AS budget,
       CASE WHEN events > 0 THEN 1 - (events - good) / ((1 - target) * events) END AS budget_left,
       CASE WHEN events > 0 THEN good >= target * events END AS met,
       nullif(concat_ws('; ',
           CASE WHEN scope IS NULL THEN 'what these nodes were was never journaled' END,
           CASE WHEN events = 0 THEN 'nothing that counts'
                WHEN (1 - target) * events < 1 THEN 'less than one event in the budget' END), '') AS note
FROM summed
ORDER BY scope, objective
