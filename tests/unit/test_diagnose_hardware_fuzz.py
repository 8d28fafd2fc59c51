"""Whatever materials say: no crash, the same twice, valid diagnoses; more evidence never lowers the worst."""

import time
import unicodedata

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gridctl.detect.diagnose.devices import devices
from gridctl.detect.policy import PREEMPT, WHEN
from gridctl.detect.policy.hardware import hardware
from gridctl.model.diagnosis import Diagnosis, Material
from gridctl.model.findings import SEVERITIES

PCI = ("0000:41:00", "00000000:C2:00.0", "0008:01:00.0", "", "x", "0000:41:00.0.0")
NAMES = ("python3", "my job, v3", "Xid (PCI:0000:", "a]: NVRM: ", "", "<unknown>", "é\x1b[31m", "%s{0}")
TEXTS = """\
GPU has fallen off the bus.
Ch 00000008
Ch 1 caused by previous Xid 149
DBE
Contained: SM (0x1). RST: Yes, D-RST: No
NETIR_LINK_EVT Fatal XC0 i0 Link 03 (0x1 0x2)
NVLink: fatal error detected on link 2(0x10, 0x0)
NVLink: fatal error detected on link 2(zz)
GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
GPU recovery action changed from 0x2 (x) to 0x0 (None)
Graphics SM Warp Exception on (GPC 1, TPC 2, SM 0): x
[GPU is lost]
[N/A]
Completed
Drain and Reset""".splitlines()
FORMS = """\
NVRM: Xid (PCI:{pci}): {n}, pid={n}, name={name}, {text}
NVRM: Xid (PCI:{pci}): {n}, {text}
NVRM: GPU {pci}: {text}
NVRM: The NVIDIA GPU {pci}
NVRM: fallen off the bus and is not responding to commands.
NVRM: GPU {pci}: RmInitAdapter failed! ({n})
NVRM: Rate limiting GSP RPC error prints for GPU at PCI:{pci} (x)
NVRM: GPU at PCI:{pci}: GPU-00000000-1111-4222-8333-444444444444
nvidia-nvswitch{n}: SXid (PCI:{pci}): {n}, Fatal, Link {n} {text}
nvidia-nvswitch0: SXid (PCI:{pci}): {n}, Severity {n} Engine
pcieport {pci}: AER: Uncorrected (Fatal) error received: {pci}
nvidia {pci}: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer, (x)
nvidia {pci}:    [{n}] {text}
nvidia {pci}: AER: can't recover (no error_detected callback)
pcieport {pci}: AER: device recovery {text}
EDAC MC{n}: {n} CE memory read error on {name} (channel:{n} {text})
EDAC MC0: {n} UE x
mce: CPU{n}: Package temperature/speed normal
CPU{n}: Core temperature above threshold, cpu clock throttled (total events = {n})
INFO: task {name}:{n} blocked for more than {n} seconds.
mlx5_core {pci}: x: Detected insufficient power on the PCIe slot ({n}W).
Out of memory: Killed process {n} ({name})
nvme nvme{n}: Removing after probe failure status: -{n}
blk_update_request: I/O error, dev nvme{n}n1, sector {n}
amdgpu {pci}: amdgpu: {n} uncorrectable hardware errors detected in {name} block
amdgpu {pci}: amdgpu: GPU reset begin!
Linux version {n}
-- Reboot --
Unable to determine the device handle for GPU{pci}: {text}
GPU {pci}
    Fabric
        State     : {text}
        Status  : {name}
    GPU Recovery Action : {text}
index, pci.bus_id, gpu_recovery_action, clocks_event_reasons.active
{n}, {pci}, {text}, {n}
t_s,gpu,util_pct,sbe_volatile_total
{n},{n},{n},{n}
#Entity XIDER
GPU {n}     {n}
gpu {n}: state={name} status={text}
DCGM_FI_DEV_XID_ERRORS{{gpu="{n}",UUID="{name}",pci_bus_id="{pci}"}} {n} {n}
$ systemctl is-active nvidia-fabricmanager
failed
{{"ts": {n}, "gpu": {n}, "xid": {n}}}
{{"source": "kmsg", "line": "NVRM: Xid (PCI:{pci}): {n}, x"}}
{{"probe": "{n}", "mode": "local", "state": "timeout"}}
{{"p2p_ok": false, "fabric_state": [{n}], "fabric_status": [null], "links": [{n}, {n}]}}
{{"pci": "{pci}", "incidents": [{{"xid": {n}}}]}}
{text}
{{
$ {name}
|   {n}  NVIDIA H100   On  |   {pci} Off |
| ERR!  ERR! |
{pci} 3D controller: NVIDIA Corporation x (rev ff)""".splitlines()
WRAPPERS = (
    "",
    "[ {n}.5] ",
    "[Sun Feb 22 16:24:18 2026] ",
    "Feb 22 16:24:18 n7 kernel: ",
    "Feb 22 16:24:18 n8 python3[7]: ",
    "3,{n},{n},-;",
    "2026-02-22T16:24:18.5+00:00 n7 kernel: ",
    "kern  :err   : [ {n}.1] ",
    "user  :err   : [ {n}.1] ",
    "<12>[ {n}.0] ",
)
#: These take evidence back: what was before a boot, or is called resolved, is over.
TAKES_BACK = ("Linux version", "-- Reboot", "to 0x0", "AER: device recovery", ": {n}, x", "cool", "normal")

numbers = st.one_of(st.sampled_from((0, 1, 13, 45, 48, 74, 79, 94, 95, 149, 154, 999)), st.integers(0, 10**9))
json_keys = st.sampled_from(
    "pci uuid xid gpu index t v line source probe state incidents history remapped_rows before after host "
    "value nvlink_links_active fabric_state fabric_status p2p expected_busbw_gb busbw_gb body".split()
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(json_keys, inner, max_size=6),
    max_leaves=25,
)


@st.composite
def lines(draw: st.DrawFn) -> str:
    """A line of any kind that is read, in any wrapper, filled with what does and does not fit."""
    words = {
        "n": draw(numbers),
        "pci": draw(st.sampled_from(PCI)),
        "name": draw(st.sampled_from(NAMES)),
        "text": draw(st.one_of(st.sampled_from(TEXTS), st.text(max_size=30))),
    }
    wrapper = draw(st.sampled_from(WRAPPERS))
    return wrapper.format(**words) + draw(st.sampled_from(FORMS)).format(**words)


texts = st.one_of(st.lists(lines(), max_size=25).map("\n".join), st.text(max_size=300))


def diagnosed(*texts: str) -> list[Diagnosis]:
    return list(devices([Material(f"input.{index}", text) for index, text in enumerate(texts)]))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(texts, min_size=1, max_size=3))
def test_no_text_crashes_and_every_diagnosis_is_valid(inputs: list[str]) -> None:
    found = diagnosed(*inputs)
    for diagnosis in found:
        assert diagnosis.when in WHEN
        assert diagnosis.why.rule
        assert diagnosis.why.source
        assert not any(unicodedata.category(c) == "Cc" for line in diagnosis.why.evidence for c in line)
        assert not diagnosis.preempt_job or diagnosis.severity in ("critical", "fatal")
    assert msgspec.json.encode(found) == msgspec.json.encode(diagnosed(*inputs))


@settings(deadline=None)
@given(json_values)
def test_no_document_crashes(value: object) -> None:
    text = msgspec.json.encode(value).decode()
    diagnosed(text)
    diagnosed(f"[ 1.0] x\n{text}\n{text}")


@settings(deadline=None)
@given(st.lists(lines(), max_size=12), st.lists(lines(), max_size=4))
def test_more_of_a_log_never_lowers_the_worst(first: list[str], more: list[str]) -> None:
    log = [line for line in [*first, *more] if line.startswith("[ ") and "NVRM: " in line]
    log = [line for line in log if not any(word in line for word in TAKES_BACK)]
    less = [line for line in log if line in first]

    def worst(found: list[Diagnosis]) -> int:
        return max((SEVERITIES.index(diagnosis.severity) for diagnosis in found), default=0)

    assert worst(diagnosed("\n".join(log))) >= worst(diagnosed("\n".join(less)))


@pytest.mark.parametrize("form", FORMS)
def test_time_grows_no_faster_than_the_log(form: str) -> None:
    """Ten times the lines may cost some ten times as much (generous: loaded machines)."""

    def cost_s(count: int) -> float:
        words = [
            {"n": n, "pci": PCI[n % len(PCI)], "name": f"job{n}", "text": TEXTS[n % 9]} for n in range(count)
        ]
        text = "\n".join(f"[ {n}.5] " * (n % 3) + form.format(**word) for n, word in enumerate(words))
        begin = time.process_time()
        diagnosed(text)
        return time.process_time() - begin

    assert cost_s(3000) < 100 * max(min(cost_s(300) for _ in range(2)), 0.004)


def test_every_rule_is_valid_and_has_a_source() -> None:
    for rule in hardware().rules.values():
        assert rule.preempt in PREEMPT
        assert rule.source
        assert rule.preempt == "no" or rule.when == "now"
    assert {row.rule for row in hardware().switches.values()} <= set(hardware().rules)
