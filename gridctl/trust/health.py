"""What `gridctl doctor` and a status line say about clocks, versions and attestation."""

from collections.abc import Mapping

from gridctl.trust.certificates import BACKDATE_S

#: Below this, ordering what happened on two machines is still right to the eye.
SKEW_WARN_S = 2.0


def skew_warning(local_unix_s: float, remote_unix_s: float) -> str | None:
    """A line where two clocks, read at the same moment, differ by more than 2 s; else None.

    A hand-over itself uses no wall clock; certificates, token expiry and timelines do.
    """
    skew_s = remote_unix_s - local_unix_s
    if abs(skew_s) <= SKEW_WARN_S:
        return None
    text = f"clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    if abs(skew_s) > BACKDATE_S:
        return f"{text}: certificates may be refused; set the time (NTP) before anything else"
    return f"{text}: times in timelines are off by that; check NTP"


def version_warnings(local: str, remote: Mapping[str, str]) -> list[str]:
    """One line for each node (name -> version) that runs another version than this one."""
    return [
        f"node {node} runs gridagent {version}, this gridctl is {local}: bring them to one version"
        for node, version in sorted(remote.items())
        if version != local
    ]


def attestation_state(node: str) -> str:
    """Whether a node has proven its boot state: always "not_attested" today.

    Attestation (a quote of the node's TPM against known measurements) comes later. Until then nothing
    is claimed, and a policy with `require_attestation` refuses every node.
    """
    return "not_attested"
