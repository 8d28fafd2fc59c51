-- What `gridctl sql` and `History.query` can ask. `_unix_s` are seconds since 1970 UTC, `_s` seconds, `_ms`
-- milliseconds, `_bytes` bytes, `_h` hours. A value that is not known is null. Below lie `records`, the journal
-- one row a record, the tables `row_NAME`, one typed row a record (`rows/NAME.sql`), samples and progress.
-- After a view's name stands what its rows are, then each column with its meaning: `gridctl sql --schema`.

-- events: every record, with what most questions are about taken out of its data
--   seq             its number in the journal
--   t_unix_s        when it was written
--   t_utc           the same as a timestamp
--   kind            finding, incident, decision, plan, gate, run, step, audit, lease, note, facts
--   actor           the controller that wrote it
--   incident        to which it belongs
--   run             to which it belongs
--   node            that it is about
--   job             that it is about
--   data            JSON, the record's own
--   prev            hash of the record before
--   hash            its own
CREATE VIEW events AS
SELECT seq,
       t_unix_s,
       make_timestamp(TRY_CAST(t_unix_s * 1000000 AS BIGINT)) AS t_utc,
       kind,
       actor,
       data ->> '$.incident' AS incident,
       data ->> '$.run'      AS run,
       data ->> '$.node'     AS node,
       data ->> '$.job'      AS job,
       data,
       prev,
       hash
FROM records;

-- incidents: one row an incident
--   incident        its id
--   state           open or closed
--   kind            of its first cause; manual where a person began it
--   node            that it is about
--   job             that it is about
--   title           in words
--   opened_unix_s   when what it began with happened
--   closed_unix_s   when it was closed; null while it is open
--   findings        how many, without suppressed ones
--   decisions       how many, with choices of the assessor and with suppressed findings
--   plans           how many
--   runs            how many
--   verdict         what people say it was: true_fault, false_alarm or unknown; null where nobody said
--   verdict_by      who said so
--   merged_into     the incident of which it turned out to be a part
--   acked_unix_s    when somebody first took it in hand
--   duration_s      from opened to closed
CREATE VIEW incidents AS
WITH begun AS (
    SELECT incident, coalesce(max(seq) FILTER (state = 'open'), 0) AS opened_seq
    FROM row_incidents
    WHERE incident IS NOT NULL AND incident <> ''
    GROUP BY incident
), folded AS (
    SELECT incident,
           arg_max(state, seq)    AS state,
           arg_max(kind, seq)     AS kind,
           arg_max(node, seq)     AS node,
           arg_max(job, seq)      AS job,
           arg_max(title, seq)    AS title,
           arg_min(t_unix_s, seq) AS opened_unix_s,
           arg_min(recorded_unix_s, seq) FILTER (state = 'closed' AND seq > opened_seq)
               AS ended_unix_s,
           arg_max(verdict, seq)  FILTER (seq >= opened_seq AND verdict <> '') AS verdict,
           arg_max(who, seq)      FILTER (seq >= opened_seq AND verdict <> '') AS verdict_by,
           arg_max(merged_into, seq) FILTER (seq >= opened_seq AND merged_into <> '')
               AS merged_into
    FROM row_incidents JOIN begun USING (incident)
    GROUP BY incident
), found AS (
    SELECT incident, count(*) FILTER (NOT suppressed) AS findings, count(*) FILTER (suppressed) AS held_back
    FROM row_findings GROUP BY incident
), decided AS (
    SELECT incident, count(*) AS decisions FROM row_decisions GROUP BY incident
), planned AS (
    SELECT incident, count(*) AS plans FROM row_plans GROUP BY incident
), ran AS (
    SELECT incident, count(DISTINCT run) AS runs FROM row_runs GROUP BY incident
), taken AS (
    SELECT incident, min(t_unix_s) AS acked_unix_s FROM row_audit WHERE what = 'ack' GROUP BY incident
)
SELECT incident, state, kind, node, job, title, opened_unix_s,
       CASE WHEN state = 'closed' THEN ended_unix_s END AS closed_unix_s,
       coalesce(findings, 0)                            AS findings,
       coalesce(decisions, 0) + coalesce(held_back, 0)  AS decisions,
       coalesce(plans, 0)                               AS plans,
       coalesce(runs, 0)                                AS runs,
       verdict, verdict_by, merged_into, acked_unix_s,
       CASE WHEN state = 'closed' THEN ended_unix_s - opened_unix_s END AS duration_s
FROM folded
LEFT JOIN found USING (incident)
LEFT JOIN decided USING (incident)
LEFT JOIN planned USING (incident)
LEFT JOIN ran USING (incident)
LEFT JOIN taken USING (incident);

-- findings: what detection saw, also what it saw and did not act on
--   seq             number of its record
--   t_unix_s        when it happened, by the clock of who saw it
--   incident        to which it belongs
--   type            finding; verdict (the state of a node has changed); suppressed
--   suppressed      whether it was held back; `rule` and `why` say for what reason
--   kind            what it is; of a verdict: healthy, suspect, faulty, blind
--   node            that it is about
--   device          gpu:3, nic:mlx5_0, pci:ADDRESS, or node
--   job             that it is about, where it is about one
--   rule            that found it
--   layer           who saw it: kernel, device, heartbeat, progress
--   fault           whose: node, app, fabric, driver, config, environment, monitor, unknown
--   severity        info, warning, critical, fatal
--   action          that it asks for
--   due             when: none, now, after_job, after_restart, window, before_admission
--   preempt_job     whether a running job must be moved off
--   xid             number of the driver's error
--   pci             address of the device
--   why             the evidence, a list of lines
CREATE VIEW findings AS
SELECT seq, t_unix_s, incident, type, suppressed, kind, node, device, job, rule, layer, fault, severity,
       action,
       due, preempt_job, xid, pci, why
FROM row_findings;

-- decisions: what ought to be done, and by whose reckoning
--   seq             number of its record
--   t_unix_s        when what it rests on happened
--   incident        to which it belongs
--   type            decision (of detection: the node must be left) or choice (of the assessor: costs weighed)
--   kind            the first cause
--   node            that it is about
--   device          that it is about
--   job             that it is about
--   decision        of type decision: swap_now or quarantine
--   action          what is asked for
--   wanted          of type choice: what would be done if nothing forbade it
--   cheapest        of type choice: the alternative that costs least
--   automatic       of type choice: whether gridctl may do it by itself
--   uncertain       of type choice: whether within the range of the forecast another one could be cheaper
--   p_24h           probability of a fault of the node within 24 h
--   basis           what that rests on
--   rule            that decided
--   rules           every rule that it rests on, a list
--   severity        info, warning, critical, fatal
--   alternatives    JSON: each with its cost, and why it was refused
--   why             reasons, a list of lines
CREATE VIEW decisions AS
SELECT seq, t_unix_s, incident, type, kind, node, device, job, decision, action, wanted, cheapest, automatic,
       uncertain, p_24h, basis, rule, rules, severity, alternatives, why
FROM row_decisions;

-- plans: one row a plan
--   plan            its id
--   incident        to which it belongs
--   runbook         hot-swap or reset
--   node            that is left, or reset
--   job             whose ranks move
--   who             asked for it
--   devices         only these of the node, a list
--   handover        id of the hand-over that it would make
--   epoch_from      epoch of the job before
--   epoch_to        epoch of the job after
--   standing        whether the job stood for want of a rank
--   assume_dead     whether a person said that a silent node is dead
--   bit_identical   whether all later losses will be the same bits
--   ranks_moved     a list
--   origins         nodes of these ranks, a list
--   targets         nodes that take them, a list
--   ranks           of the whole job
--   gpus            of the whole job: ranks times the GPUs of one that moves; on CPU a rank counts as one
--   pause_estimate_s  how long the job would pause
--   steps_lost      steps that would be done again
--   state_bytes     that would be moved
--   p_fault         probability of the fault that it forestalls
--   p_fault_basis   what that rests on
--   now_gpu_h       expected cost of acting now, in GPU-hours
--   deferred_gpu_h  expected cost of waiting, in GPU-hours
--   created_unix_s  when it was made
--   expires_unix_s  until when it could be confirmed
--   action          of a reset: what it is
--   waiver          of a reset: why it goes on without evidence
--   notes           what a person should know, a list of lines
--   digest          over everything in the plan
CREATE VIEW plans AS
SELECT plan, incident, runbook, node, job, who, devices, handover, epoch_from, epoch_to, standing,
       assume_dead,
       bit_identical, ranks_moved, origins, targets, ranks, ranks * gpus_a_rank AS gpus, pause_estimate_s,
       steps_lost, state_bytes, p_fault, p_fault_basis, now_gpu_h, deferred_gpu_h, created_unix_s,
       expires_unix_s,
       action, waiver, notes, digest
FROM row_plans;

-- gates: who confirmed a plan
--   seq             number of its record
--   t_unix_s        when
--   incident        to which it belongs
--   plan            that was confirmed
--   run             that began with it
--   digest          of the plan as it was shown
--   who             confirmed
--   reason          as given
--   typed           what was typed to confirm
--   yes             whether --yes took the place of typing
CREATE VIEW gates AS
SELECT seq, t_unix_s, incident, plan, run, digest, who, reason, typed, yes FROM row_gates;

-- runs: one row a run
--   run             its id
--   incident        to which it belongs
--   plan            that it carries out
--   node            that is left, or reset
--   job             whose ranks move
--   who             began it
--   state           running, held, done, aborted, rolled-back, failed
--   code            why it is held or has failed
--   text            the same in words
--   started_unix_s  when it began
--   ended_unix_s    null while it has not ended
--   duration_s      null while it has not ended
CREATE VIEW runs AS
WITH folded AS (
    SELECT run,
           arg_max(incident, seq) AS incident,
           arg_max(plan, seq)     AS plan,
           arg_max(node, seq)     AS node,
           arg_max(job, seq)      AS job,
           arg_min(who, seq)      AS who,
           arg_max(state, seq)    AS state,
           arg_max(code, seq)     AS code,
           arg_max(text, seq)     AS text,
           arg_min(t_unix_s, seq) AS started_unix_s,
           arg_max(t_unix_s, seq) AS last_unix_s
    FROM row_runs
    WHERE run IS NOT NULL
    GROUP BY run
)
SELECT * EXCLUDE (last_unix_s),
       CASE WHEN state IN ('done', 'aborted', 'rolled-back', 'failed') THEN last_unix_s END AS ended_unix_s,
       CASE WHEN state IN ('done', 'aborted', 'rolled-back', 'failed')
            THEN last_unix_s - started_unix_s END AS duration_s
FROM folded;

-- steps: one row a step of a run
--   run             to which it belongs
--   step            its name
--   incident        to which it belongs
--   position        its place in the plan, from 0
--   state           started, done, failed, undoing, undone, undo-failed
--   attempts        how often it was started
--   code            why it failed
--   text            the same in words
--   started_unix_s  when it began first
--   ended_unix_s    null while it is under way
--   duration_s      null while it is under way
CREATE VIEW steps AS
WITH folded AS (
    SELECT run,
           step,
           arg_max(incident, seq)              AS incident,
           min(position)                       AS position,
           arg_max(state, seq)                 AS state,
           count(*) FILTER (state = 'started') AS attempts,
           arg_max(code, seq)                  AS code,
           arg_max(text, seq)                  AS text,
           arg_min(t_unix_s, seq)              AS started_unix_s,
           arg_max(t_unix_s, seq)              AS last_unix_s
    FROM row_steps
    WHERE run IS NOT NULL
    GROUP BY run, step
)
SELECT * EXCLUDE (last_unix_s),
       CASE WHEN state NOT IN ('started', 'undoing') THEN last_unix_s END AS ended_unix_s,
       CASE WHEN state NOT IN ('started', 'undoing') THEN last_unix_s - started_unix_s END AS duration_s
FROM folded;

-- handovers: one row a run that was to move ranks
--   handover        its id
--   run             that carried it out
--   plan            that it was made by
--   incident        to which it belongs
--   job             whose ranks moved
--   node            that they left
--   targets         nodes that took them, a list
--   ranks_moved     a list
--   gpus            of the whole job, all of which wait during a pause; on CPU a rank counts as one
--   standing        whether the job stood for want of a rank before
--   started_unix_s  when the run began
--   ended_unix_s    when it ended; null while it has not
--   state           of the run
--   who             began the run
--   outcome         commit where ranks moved, abort where the cut was turned back, null where none was tried
--   boundary_step   the step before which the job paused
--   epoch           of the job after a commit
--   pause_ms        how long the job stood still for the cut
--   state_bytes     that were moved
--   t_boundary_unix_s  when the pause began, by the clock of the chair
--   t_resume_unix_s    when it ended, by the same
--   digests         JSON: rank -> part -> SHA-256 of its state, equal at source and target at every commit
--   step_s_before   median seconds a step before
--   step_s_after    the same after
CREATE VIEW handovers AS
WITH cut AS (
    SELECT run, handover, outcome, boundary_step, epoch, cut_ms, state_bytes, t_boundary_unix_s,
        t_resume_unix_s,
           digests
    FROM row_steps WHERE step = 'cut' AND (outcome IS NOT NULL OR cut_ms IS NOT NULL)
    QUALIFY row_number() OVER (PARTITION BY run ORDER BY seq DESC) = 1
), watched AS (
    SELECT run, step_s_before, step_s_after FROM row_steps WHERE step = 'watch' AND step_s_after IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY run ORDER BY seq DESC) = 1
)
SELECT coalesce(c.handover, p.handover) AS handover, r.run, r.plan, r.incident, coalesce(r.job, p.job) AS job,
       coalesce(r.node, p.node) AS node, p.targets, p.ranks_moved, p.gpus, p.standing, r.started_unix_s,
       r.ended_unix_s, r.state, r.who, c.outcome, c.boundary_step, c.epoch, c.cut_ms AS pause_ms,
       c.state_bytes,
       c.t_boundary_unix_s, c.t_resume_unix_s, c.digests, w.step_s_before, w.step_s_after
FROM runs r
JOIN plans p ON p.plan = r.plan AND p.runbook = 'hot-swap'
LEFT JOIN cut c ON c.run = r.run
LEFT JOIN watched w ON w.run = r.run;

-- stands: one row a time that a job stood for want of a rank's process
--   incident        to which it belongs
--   job             that stood
--   node            whose rank it was
--   gpus            of the whole job; null where no hand-over brought it on
--   from_unix_s     the first finding that a rank has died or is silent
--   until_unix_s    when the job went on; null where no hand-over of gridctl brought it on
--   run             that brought it on
CREATE VIEW stands AS
WITH ended AS (
    SELECT incident, run, gpus, coalesce(t_resume_unix_s, ended_unix_s) AS until_unix_s
    FROM handovers WHERE outcome = 'commit' AND standing
), told AS (
    SELECT f.incident, f.job, f.node, f.t_unix_s, e.run, e.gpus, e.until_unix_s
    FROM (FROM row_findings WHERE kind IN ('rank_died', 'rank_silent') AND NOT suppressed
        AND incident <> '') f
    ASOF LEFT JOIN ended e ON e.incident = f.incident AND f.t_unix_s <= e.until_unix_s
)
SELECT incident, arg_min(job, t_unix_s) AS job, arg_min(node, t_unix_s) AS node, any_value(gpus) AS gpus,
       min(t_unix_s) AS from_unix_s, until_unix_s, run
FROM told
GROUP BY incident, run, until_unix_s;

-- checkpoints: what is known of checkpoints of jobs
--   seq             number of its record
--   t_unix_s        when
--   job             whose
--   step            of the job
--   path            where it lies
--   bytes           its size
--   sha256          over its bytes
--   state           as journaled
CREATE VIEW checkpoints AS SELECT seq, t_unix_s, job, step, path, bytes, sha256, state FROM row_checkpoints;

-- node_spans: what a node was, and from when to when; a time before its first facts has none
--   node            its name
--   from_unix_s     from then on
--   until_unix_s    until then; null: still
--   rack            where it stands
--   node_class      model and number of its GPUs
--   nvlink_domain   to which it belongs
--   cooling_zone    in which it stands
--   driver          version of the GPUs' driver
--   gpu_model       of its GPUs
--   gpus            how many
--   serial          of the chassis
--   boot_id         of the kernel
--   version         of its agent
--   spare           whether a process waited there for a rank
--   jobs            JSON: job -> its ranks there
--   devices         JSON: device -> what identifies it
CREATE VIEW node_spans AS
WITH named AS (
    SELECT node, min(t_unix_s) AS first_unix_s
    FROM (SELECT node, t_unix_s FROM row_findings UNION ALL BY NAME
          SELECT node, t_unix_s FROM row_decisions UNION ALL BY NAME
          SELECT node, t_unix_s FROM row_incidents UNION ALL BY NAME
          SELECT node, t_unix_s FROM row_plans UNION ALL BY NAME
          SELECT node, t_unix_s FROM row_audit UNION ALL BY NAME
          SELECT node, t_unix_s FROM row_notes UNION ALL BY NAME
          SELECT node, t_unix_s FROM row_facts)
    WHERE node <> ''
    GROUP BY node
), known AS (
    SELECT node, t_unix_s AS from_unix_s, rack, node_class, nvlink_domain, cooling_zone, driver, gpu_model,
        gpus,
           serial, boot_id, version, spare, jobs, devices
    FROM row_facts
    WHERE node <> ''
    QUALIFY row_number() OVER (PARTITION BY node, t_unix_s ORDER BY seq DESC) = 1
), told AS (
    SELECT node, min(from_unix_s) AS told_unix_s FROM known GROUP BY node
), spans AS (
    FROM known UNION ALL BY NAME
    SELECT node, first_unix_s AS from_unix_s FROM named LEFT JOIN told USING (node)
    WHERE told_unix_s IS NULL OR first_unix_s < told_unix_s
)
SELECT node, from_unix_s,
       lead(from_unix_s) OVER (PARTITION BY node ORDER BY from_unix_s) AS until_unix_s,
       rack, node_class, nvlink_domain, cooling_zone, driver, gpu_model, gpus, serial, boot_id, version,
       spare,
       jobs, devices
FROM spans;

-- faults: decisions of detection to leave a node; those less than an hour after the one before are one fault
--   fault           number of its first record
--   t_unix_s        when it began
--   node            that it is about
--   kind            the first cause
--   device          that it is about
--   job             that it is about
--   incident        to which it belongs
--   decisions       how many it has
CREATE VIEW faults AS
WITH decided AS (
    SELECT *, t_unix_s - lag(t_unix_s) OVER (PARTITION BY node ORDER BY t_unix_s, seq) AS gap_s
    FROM row_decisions
    WHERE type = 'decision' AND node <> '' AND action IS DISTINCT FROM 'recover_rank'
), counted AS (
    SELECT *, count(*) FILTER (gap_s IS NULL OR gap_s >= 3600)
              OVER (PARTITION BY node ORDER BY t_unix_s, seq) AS number
    FROM decided
)
SELECT min(seq) AS fault, min(t_unix_s) AS t_unix_s, node, arg_min(kind, (t_unix_s, seq)) AS kind,
       arg_min(device, (t_unix_s, seq)) AS device, arg_min(job, (t_unix_s, seq)) AS job,
       arg_min(incident, (t_unix_s, seq)) AS incident, count(*) AS decisions
FROM counted
GROUP BY node, number;

-- nodes: one row a node that was ever named
--   node            its name
--   first_unix_s    when it was named first
--   rack            where it stands; this and what follows is null where its facts were never journaled
--   node_class      model and number of its GPUs
--   nvlink_domain   to which it belongs
--   cooling_zone    in which it stands
--   driver          version of the GPUs' driver
--   gpu_model       of its GPUs
--   gpus            how many
--   serial          of the chassis
--   boot_id         of the kernel
--   version         of its agent
--   spare           whether a process waits there for a rank
--   verdict         what detection thought of it last
--   incidents       how many
--   faults          how many
--   handovers       how often ranks left it
--   opened          how often a person opened it again
CREATE VIEW nodes AS
WITH counted AS (
    SELECT node, sum(incident) AS incidents, sum(fault) AS faults, sum(moved) AS handovers, sum(opened)
        AS opened
    FROM (SELECT node, 1 AS incident FROM incidents UNION ALL BY NAME
          SELECT node, 1 AS fault FROM faults UNION ALL BY NAME
          SELECT node, 1 AS moved FROM handovers WHERE outcome = 'commit' UNION ALL BY NAME
          SELECT node, 1 AS opened FROM row_audit WHERE what = 'uncordon')
    GROUP BY node
), judged AS (
    SELECT node, arg_max(kind, seq) AS verdict FROM row_findings WHERE type = 'verdict' GROUP BY node
), began AS (
    SELECT node, min(from_unix_s) AS first_unix_s FROM node_spans GROUP BY node
)
SELECT node, first_unix_s, rack, node_class, nvlink_domain, cooling_zone, driver, gpu_model, gpus, serial,
       boot_id,
       version, spare, verdict, coalesce(incidents, 0)::BIGINT AS incidents, coalesce(faults, 0)::BIGINT
           AS faults,
       coalesce(handovers, 0)::BIGINT AS handovers, coalesce(opened, 0)::BIGINT AS opened
FROM (FROM node_spans WHERE until_unix_s IS NULL)
JOIN began USING (node)
LEFT JOIN judged USING (node)
LEFT JOIN counted USING (node);

-- devices: one row a device of a node, known from facts or from findings
--   node            that has it
--   device          gpu:3, nic:mlx5_0, pci:ADDRESS
--   uuid            of the device
--   serial          of the device
--   pci             its address
--   name            its model
--   findings        how many, without suppressed ones
--   last_unix_s     when the newest of them happened
CREATE VIEW devices AS
WITH told AS (
    SELECT node, unnest(map_entries(TRY_CAST(devices AS MAP(VARCHAR, JSON))), recursive := true)
    FROM node_spans WHERE until_unix_s IS NULL
), found AS (
    SELECT node, device, count(*) FILTER (NOT suppressed) AS findings,
           max(t_unix_s) FILTER (NOT suppressed) AS last_unix_s
    FROM row_findings WHERE device IS NOT NULL AND device NOT IN ('', 'node') AND node <> ''
    GROUP BY node, device
)
SELECT node, device, value ->> '$.uuid' AS uuid, value ->> '$.serial' AS serial, value ->> '$.pci' AS pci,
       value ->> '$.name' AS name, coalesce(findings, 0) AS findings, last_unix_s
FROM (SELECT node, key AS device, value FROM told)
FULL JOIN found USING (node, device);

-- jobs: one row a job that was ever named
--   job             its name
--   first_unix_s    when it was named first
--   last_unix_s     when it was named last
--   nodes           that have ranks of it by their newest facts, a list
--   incidents       how many
--   handovers       how many committed
--   pause_ms        all their pauses
CREATE VIEW jobs AS
WITH placed AS (
    SELECT node, from_unix_s, until_unix_s, unnest(json_keys(jobs)) AS job FROM node_spans
), named AS (
    SELECT job, t_unix_s FROM row_incidents UNION ALL BY NAME
    SELECT job, t_unix_s FROM row_findings UNION ALL BY NAME
    SELECT job, t_unix_s FROM row_plans UNION ALL BY NAME
    SELECT job, t_unix_s FROM row_runs UNION ALL BY NAME
    SELECT job, from_unix_s AS t_unix_s FROM placed UNION ALL BY NAME
    SELECT job, until_unix_s AS t_unix_s FROM placed
), began AS (
    SELECT job, min(t_unix_s) AS first_unix_s, max(t_unix_s) AS last_unix_s FROM named
        WHERE job <> '' GROUP BY job
), present AS (
    SELECT job, list(node ORDER BY node) AS nodes FROM placed WHERE until_unix_s IS NULL GROUP BY job
), troubled AS (
    SELECT job, count(*) AS incidents FROM incidents GROUP BY job
), moved AS (
    SELECT job, count(*) AS handovers, sum(pause_ms) AS pause_ms FROM handovers
        WHERE outcome = 'commit' GROUP BY job
)
SELECT job, first_unix_s, last_unix_s, coalesce(nodes, []) AS nodes, coalesce(incidents, 0) AS incidents,
       coalesce(handovers, 0) AS handovers, coalesce(pause_ms, 0.0) AS pause_ms
FROM began
LEFT JOIN present USING (job)
LEFT JOIN troubled USING (job)
LEFT JOIN moved USING (job);

-- spares: one row a time during which a process waited on a node for a rank
--   node            its name
--   rack            where it stands
--   node_class      model and number of its GPUs
--   gpus            how many
--   from_unix_s     since when
--   until_unix_s    until when; null: still
--   taken_by        the run that took ranks there within it or at its end; null where none did
CREATE VIEW spares AS
WITH marked AS (
    SELECT *, lag(spare) OVER (PARTITION BY node ORDER BY from_unix_s) AS before FROM node_spans
), counted AS (
    SELECT *, count(*) FILTER (spare AND before IS DISTINCT FROM true)
              OVER (PARTITION BY node ORDER BY from_unix_s) AS number
    FROM marked
), waited AS (
    SELECT node, arg_max(rack, from_unix_s) AS rack, arg_max(node_class, from_unix_s) AS node_class,
           arg_max(gpus, from_unix_s) AS gpus, min(from_unix_s) AS from_unix_s,
           CASE WHEN count(*) = count(until_unix_s) THEN max(until_unix_s) END AS until_unix_s
    FROM counted WHERE spare
    GROUP BY node, number
), taken AS (
    SELECT run, unnest(list_distinct(targets)) AS node, started_unix_s, ended_unix_s FROM handovers
    WHERE outcome = 'commit'
)
SELECT w.node, w.rack, w.node_class, w.gpus, w.from_unix_s, w.until_unix_s, any_value(t.run) AS taken_by
FROM waited w
LEFT JOIN taken t ON t.node = w.node AND t.started_unix_s >= w.from_unix_s
                 AND (w.until_unix_s IS NULL OR t.started_unix_s <= w.until_unix_s)
GROUP BY ALL;

-- audit: what people and programs did
--   seq             number of its record
--   t_unix_s        when
--   what            freeze, thaw, relayed, aborted, rolled-back, resume, rollback, uncordon, evidence, ack ...
--   who             did it
--   actor           the controller that wrote it down
--   reason          as given
--   value           what was said along with it
--   incident        to which it belongs
--   node            that it is about
--   run             that it is about
--   scope           of a freeze: fleet, or a job
--   state           of a collection of evidence: asked, collected, failed
--   code            why it failed
--   text            in words
--   file            where the evidence lies
--   bytes           its size
--   sha256          over its bytes
CREATE VIEW audit AS
SELECT seq, t_unix_s, what, who, actor, reason, value, incident, node, run, scope, state, code, text, file,
       bytes,
       sha256
FROM row_audit;

-- samples: what devices told of themselves, by the second, minute or hour; tiers never overlap in time
--   t_unix_s        when the span begins, by the node's clock
--   span_s          1, 60 or 3600
--   node            that told it
--   device          gpu:3, nic:mlx5_0, node
--   metric          its name, unit included
--   value           mean within the span
--   low             smallest within the span
--   high            largest within the span
--   last            newest within the span
--   n               how many were told within the span

-- progress: steps of ranks as they told of them
--   t_unix_s        when the step ended, by the node's clock
--   node            that told it
--   job             whose
--   rank            of the job
--   epoch           of the job
--   step            its number
--   step_s          how long it took
--   loss            as the script told it
--   grad_norm       as the script told it

-- Limits of the 90 % interval of the mean number of events where n were counted (Poisson; exact up to 30,
-- then by Wilson and Hilferty), and of a share where k of n were counted (Wilson; null where n is 0).
CREATE MACRO poisson_low(n) AS CASE
    WHEN n = 0 THEN 0.0
    WHEN n <= 30 THEN [
        0.05129, 0.35536, 0.81769, 1.36632, 1.97015, 2.61301, 3.28532, 3.98082, 4.69523, 5.42541, 6.16901,
        6.92421, 7.68958, 8.46394, 9.24633, 10.03596, 10.83214, 11.63430, 12.44195, 13.25465, 14.07202,
        14.89374, 15.71950, 16.54904, 17.38213, 18.21855, 19.05811, 19.90064, 20.74598, 21.59398
    ][n::INTEGER]
    ELSE n * (1 - 1 / (9.0 * n) - 1.644854 / (3 * sqrt(n))) ** 3 END;
CREATE MACRO poisson_high(n) AS CASE
    WHEN n <= 30 THEN [
        2.99573, 4.74386, 6.29579, 7.75366, 9.15352, 10.51303, 11.84240, 13.14811, 14.43465, 15.70522,
        16.96222, 18.20751, 19.44257, 20.66857, 21.88649, 23.09713, 24.30118, 25.49923, 26.69177, 27.87924,
        29.06202, 30.24044, 31.41481, 32.58538, 33.75240, 34.91608, 36.07661, 37.23416, 38.38890, 39.54097,
        40.69051
    ][n::INTEGER + 1]
    ELSE (n + 1) * (1 - 1 / (9.0 * (n + 1)) + 1.644854 / (3 * sqrt(n + 1))) ** 3 END;
CREATE MACRO share_low(k, n) AS CASE WHEN n > 0 AND k = 0 THEN 0.0 WHEN n > 0 THEN (k + 1.352773
    - 1.644854 * sqrt(k * (n - k) / n::DOUBLE + 0.676386)) / (n + 2.705545) END;
CREATE MACRO share_high(k, n) AS CASE WHEN n > 0 AND k = n THEN 1.0 WHEN n > 0 THEN (k + 1.352773
    + 1.644854 * sqrt(k * (n - k) / n::DOUBLE + 0.676386)) / (n + 2.705545) END;
