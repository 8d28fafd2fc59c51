"""Source `edac`: memory errors that the host's memory controllers corrected (ce) or could not (ue)."""

import time
from collections.abc import Callable

from gridagent.telemetry import Reading
from gridagent.telemetry.counters import Total
from gridagent.telemetry.polled import Probe
from gridagent.telemetry.tree import Tree, sample

_CONTROLLERS = "sys/devices/system/edac/mc"


class Edac(Probe):
    """Device `node`: the sums. Devices `dimm:CONTROLLER/DIMM`: those that have counted an error."""

    def __init__(self, tree: Tree, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(tree, clock)
        self._corrected, self._uncorrected = Total(), Total()

    def read(self) -> list[Reading]:
        found: list[Reading] = []
        corrected: dict[str, float | None] = {}
        uncorrected: dict[str, float | None] = {}
        for controller in self.tree.names(_CONTROLLERS, "mc"):
            folder = f"{_CONTROLLERS}/{controller}"
            if not self.tree.has(f"{folder}/ce_count") and not self.tree.has(f"{folder}/ue_count"):
                continue
            corrected[controller] = self.tree.count(f"{folder}/ce_count")
            uncorrected[controller] = self.tree.count(f"{folder}/ue_count")
            found += self._dimms(controller, folder)
        if corrected:
            sums = {
                "edac_ce_total": self._corrected.add(corrected),
                "edac_ue_total": self._uncorrected.add(uncorrected),
            }
            found.append(sample("node", sums))
        return found

    def _dimms(self, controller: str, folder: str) -> list[Reading]:
        found = []
        for name in [*self.tree.names(folder, "dimm"), *self.tree.names(folder, "rank")]:
            values = {
                "edac_ce_total": self.tree.count(f"{folder}/{name}/dimm_ce_count"),
                "edac_ue_total": self.tree.count(f"{folder}/{name}/dimm_ue_count"),
            }
            if any(values.values()):
                label = self.tree.text(f"{folder}/{name}/dimm_label") or ""
                found.append(sample(f"dimm:{controller}/{name}", values, label=label[:80]))
        return found
