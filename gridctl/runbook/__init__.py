"""Plan -> gates -> steps -> rollback. Everything here is pure: values and a `now` in, values out.

`engine` decides what is done next in a run, `progress` folds the journal into where a run stands,
`gates` holds what must be true before a run may start, and every runbook is one file.
"""
