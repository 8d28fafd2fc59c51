"""What may be asked for because of a finding, as one ladder: of two actions, one is always the stronger.

A rung does what those below it do for the node, or makes them needless: who replaces a GPU need not reset it.
Actions that concern the application, the site or a checkpoint leave the node as it is and stand lowest.
"""

#: A job stands for want of a rank's process: it is the job that is brought on, not the node that is left.
RECOVER = "recover_rank"

#: From the mildest to the strongest.
ACTIONS = (
    "none",
    "observe",
    "per_gpu",
    "per_node",
    # somebody looks, or changes something that is not the node
    "run_ab_test",
    "collect_stacks",
    "gather_shards_before_evacuation",
    "fail_verification",
    "reject_checkpoint",
    "use_previous_checkpoint",
    "fix_config",
    "fix_app",
    "restart_app",
    "collect_stacks_then_restart",
    RECOVER,
    "refuse_spare",
    "manual_review",
    "page_facility",
    "check_cooling",
    "check_power",
    # later, while the job runs on
    "defer_reset_to_window",
    "replace_dimm_in_window",
    "reset_gpu_before_reuse",
    "rollback_driver",
    # the node leaves its job when that ends, and comes back
    "drain_and_check_cable",
    "drain_then_restart_fabricmanager",
    "drain_and_reset_gpu",
    "drain_and_diagnose",
    "drain_and_reseat",
    "drain_and_replace_drive",
    # it leaves now
    "isolate_suspect_rank",
    "isolate_suspect_peer",
    "evacuate_and_reset_gpu",
    "evacuate_and_reboot",
    "evacuate_and_inspect_pcie",
    "evacuate_domain_check_switch",
    # and stays out until a part is new
    "keep_drained",
    "hold_node_out_of_service",
    "drain_and_replace_gpu",
    "replace_gpu",
    "evacuate_and_replace_gpu",
    "quarantine",
)
_RUNG = {action: rung for rung, action in enumerate(ACTIONS)}


def rung(action: str) -> int:
    """Where an action stands; a word that is not known stands with `manual_review`: a person looks."""
    return _RUNG.get(action, _RUNG["manual_review"])


def stronger(one: str, other: str) -> str:
    """The stronger of two actions. Of words on one rung the first by name, so that order changes nothing."""
    return max(sorted((one, other)), key=rung)
