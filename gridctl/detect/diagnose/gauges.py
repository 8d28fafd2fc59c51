"""What samples of GPUs mean: levels, rates and values that are none. One state a GPU, of constant size."""

from collections.abc import Iterator

from gridagent.signals.nvidia import recovery_value
from gridagent.signals.values import number
from gridctl.detect.device import CorrectedRate
from gridctl.detect.diagnose.samples import Sample
from gridctl.detect.policy import DetectPolicy
from gridctl.detect.policy.hardware import hardware

_ONSETS_MAX = 64
_GPUS_MAX = 4096
_NAMES_MAX = 4 * _GPUS_MAX
#: NVML clock-event reasons: the hardware's power brake; heat, seen by software or hardware.
POWER_BRAKE, HEAT = 0x80, 0x60
#: How tools print values that they could not read.
_UNREADABLE = (
    ("is lost", "lost"),
    ("requires reset", "requires_reset"),
    ("reset required", "requires_reset"),
    ("unknown error", "unknown_error"),
    ("err!", "unknown_error"),
    ("insufficient permission", "denied"),
    ("no permission", "denied"),
    ("not supported", "not_supported"),
    ("n/a", "not_supported"),
    ("not found", "not_supported"),
)
#: A status of the fabric may be worded as an unreadable value.
_WORDED = ("fabric_state", "fabric_status", "fabric_cluster", "product")


def unreadable(value: object) -> str | None:
    """Why a value is none (lost, requires_reset, unknown_error, denied, not_supported, blank), else None."""
    if isinstance(value, str):
        text = value.strip().lower()[:80]
        for words, why in _UNREADABLE:
            if words in text:
                return why
    if number(value) is None and _plain(value) is not None:
        return "blank"
    return None


def _plain(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        return None


class Gpu:
    """What is known of one GPU."""

    def __init__(self, policy: DetectPolicy, host: str, name: str) -> None:
        self.host = host
        self.name = name  #: its address, else "#index", else its UUID
        self.index: int | None = None
        self.pci = ""
        self.last: dict[str, object] = {}
        self.unreadable: dict[str, str] = {}  #: metric -> why its last value is none
        self.onsets: list[tuple[float | None, int]] = []  #: when the gauge of the last Xid changed, to what
        self.level = ""  #: of corrected errors: "", watch or critical
        self.rate_per_s = 0.0
        self.polls = {POWER_BRAKE: 0, HEAT: 0}  #: in a row that show it, at present
        self.most_polls = {POWER_BRAKE: 0, HEAT: 0}
        self.narrow: tuple[float | None, float | None] | None = None  #: generation and width under load
        self.samples = 0
        self._rate = CorrectedRate(policy)

    def feed(self, sample: Sample) -> None:
        """Takes one sample."""
        self.samples += 1
        self.index = sample.index if sample.index is not None else self.index
        self.pci = sample.pci or self.pci
        for metric, value in sample.values.items():
            why = unreadable(value) if metric not in _WORDED else None
            if why is None:
                self.unreadable.pop(metric, None)
            else:
                self.unreadable[metric] = why
            self._take(sample.t_s, metric, value)
            self.last[metric] = value
        if "ecc_sbe_total" in sample.values and sample.t_s is not None:
            level, rate = self._rate.feed(sample.t_s, self.number("ecc_sbe_total"), self.number("util_pct"))
            self.level = "" if level == "clear" else level or self.level
            self.rate_per_s = max(self.rate_per_s, rate)
        if any(metric.startswith("pcie_") for metric in sample.values):
            self._link()
        self._clocks(sample)

    def number(self, metric: str) -> float | None:
        """The last value as a number; "98 %" is one, "[N/A]" is none."""
        value = self.last.get(metric)
        if isinstance(value, str):
            value = value.strip().removesuffix("%").removesuffix("x").strip()
        return number(value)

    def flag(self, metric: str) -> bool | None:
        """The last value as yes or no; None if it is not known."""
        value = self.last.get(metric)
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip().lower() in ("yes", "active", "true"):
            return True
        if isinstance(value, str) and value.strip().lower() in ("no", "not active", "false"):
            return False
        amount = self.number(metric)
        return None if amount is None else amount != 0

    @property
    def label(self) -> str:
        """Its name for people."""
        return f"GPU {self.name if self.index is None else self.index}"

    @property
    def recovery(self) -> int | None:
        """What the driver asks for, as NVML field 230; a GPU that requires a reset says so in any value."""
        value = recovery_value(self.last["recovery_action"]) if "recovery_action" in self.last else None
        if value is None and "requires_reset" in self.unreadable.values():
            return 1
        return value

    @property
    def loaded(self) -> bool:
        """Is the GPU at work? By its load where that is known, else by its performance state."""
        util_pct = self.number("util_pct")
        if util_pct is not None:
            return util_pct >= hardware().limit("load", "util_pct")
        return str(self.last.get("pstate", "")).strip().upper() in hardware().words("load", "pstates")

    def _take(self, t_s: float | None, metric: str, value: object) -> None:
        if metric == "xid":
            self._gauge(t_s, value)

    def _gauge(self, t_s: float | None, value: object) -> None:
        """The gauge keeps the last Xid: only its change is an event, the first value one of unknown time."""
        now, before = number(value), number(self.last.get("xid"))
        if now and now != before and now == int(now) and len(self.onsets) < _ONSETS_MAX:
            self.onsets.append((t_s, int(now)))

    def _clocks(self, sample: Sample) -> None:
        """One poll of the reasons why clocks are held down, told as a mask or one by one."""
        mask = _mask(sample.values.get("throttle"))
        told: dict[int, list[bool]] = {POWER_BRAKE: [], HEAT: []}
        if mask is not None:
            told = {reason: [bool(mask & reason)] for reason in told}
        for metric, reason in (("0x80", POWER_BRAKE), ("0x40", HEAT), ("0x20", HEAT)):
            word = str(sample.values.get(f"throttle_{metric}", "")).strip().lower()
            if word in ("active", "not active"):
                told[reason].append(word == "active")
        for reason, flags in told.items():
            if flags:
                self.polls[reason] = self.polls[reason] + 1 if any(flags) else 0
                self.most_polls[reason] = max(self.most_polls[reason], self.polls[reason])

    def _link(self) -> None:
        """The width never falls by design; the generation does when the GPU is idle."""
        gen, gen_max = self.number("pcie_gen"), self.number("pcie_gen_max")
        width, width_max = self.number("pcie_width"), self.number("pcie_width_max")
        slow = self.loaded and gen is not None and gen_max is not None and 0 < gen < gen_max
        narrow = width is not None and width_max is not None and 0 < width < width_max
        if slow or narrow:
            self.narrow = (gen, width)
        elif self.loaded:
            self.narrow = None


class Gpus:
    """All GPUs that samples tell of."""

    def __init__(self, policy: DetectPolicy) -> None:
        self._policy = policy
        self._gpus: dict[tuple[str, str], Gpu] = {}
        self._names: dict[tuple[str, str], str] = {}  #: index or UUID -> the name under which a GPU is kept

    def feed(self, sample: Sample) -> None:
        """Takes one sample of any GPU."""
        keys = [
            (sample.host, key)
            for key in (sample.pci, f"#{sample.index}", sample.uuid)
            if key and key != "#None"
        ]
        known = next((self._names[key] for key in keys if key in self._names), None)
        name = known or keys[0][1]
        if (sample.host, name) not in self._gpus:
            if len(self._gpus) >= _GPUS_MAX:
                return
            self._gpus[(sample.host, name)] = Gpu(self._policy, sample.host, name)
        for key in keys:
            if len(self._names) < _NAMES_MAX:
                self._names.setdefault(key, name)
        self._gpus[(sample.host, name)].feed(sample)

    def __iter__(self) -> Iterator[Gpu]:
        return iter(self._gpus.values())

    def __len__(self) -> int:
        return len(self._gpus)


def _mask(value: object) -> int | None:
    """A bit mask, printed as a decimal or hexadecimal number."""
    if isinstance(value, str):
        text = value.strip().lower()[:40]
        if text.startswith("0x"):
            try:
                return int(text, 16)
            except ValueError:
                return None
    amount = number(value)
    return int(amount) if amount is not None and 0 <= amount < 2**53 else None
