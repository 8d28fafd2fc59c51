"""The process that calls NVML: `python -m gridagent.telemetry.nvml_child [--events]`, see `gpu_child`."""

import contextlib
import ctypes
import queue
import sys
import threading
from typing import Any

from gridagent.telemetry.gpu_child import Answer, Out, Said, Unusable, XidEvent, serve
from gridagent.telemetry.nvml_gpu import GpuReader

EVENT_WAIT_MS = 1000
#: The wait for events fails at once and for ever while a GPU is lost.
EVENT_PAUSE_S = 5.0
#: NVML's mark for an event that concerns the whole GPU and no instance of it.
_NO_INSTANCE = 0xFFFFFFFF


class _Events(threading.Thread):
    """Waits for Xids of the GPUs that `add` names, from the first on. A GPU joins between two waits."""

    def __init__(self, nvml: Any, out: Out) -> None:
        super().__init__(daemon=True)
        self._nvml, self._out = nvml, out
        self._new: queue.SimpleQueue[GpuReader] = queue.SimpleQueue()
        self._pci: dict[int | None, str] = {}

    def add(self, gpu: GpuReader) -> None:
        self._new.put(gpu)
        if self.ident is None:
            self.start()

    def run(self) -> None:
        nvml = self._nvml
        with contextlib.suppress(OSError):  # the parent is gone, and so will be this process
            try:
                events = nvml.nvmlEventSetCreate()
                while True:
                    self._register(events)
                    self._wait(events)
            except nvml.NVMLError as error:
                self._out.send(Said(f"Xid events cannot be had from NVML: {error}"))

    def _register(self, events: Any) -> None:
        while not self._new.empty() or not self._pci:
            gpu = self._new.get()
            address = ctypes.cast(gpu.handle, ctypes.c_void_p).value
            self._pci[address] = gpu.identity.pci
            try:
                self._nvml.nvmlDeviceRegisterEvents(
                    gpu.handle, self._nvml.nvmlEventTypeXidCriticalError, events
                )
            except self._nvml.NVMLError as error:
                self._out.send(Said(f"no Xid events of {gpu.identity.pci}: {error}"))

    def _wait(self, events: Any) -> None:
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait(events, EVENT_WAIT_MS)
        except nvml.NVMLError_Timeout:
            return
        except nvml.NVMLError:  # what is wrong is told by the reads, GPU by GPU
            threading.Event().wait(EVENT_PAUSE_S)
            return
        mig = ""
        if event.gpuInstanceId != _NO_INSTANCE:
            mig = f"GPU-I:{event.gpuInstanceId:02d}"
            if event.computeInstanceId != _NO_INSTANCE:
                mig += f" GPU-CI:{event.computeInstanceId:02d}"
        pci = self._pci.get(ctypes.cast(event.device, ctypes.c_void_p).value, "")
        self._out.send(XidEvent(pci, event.eventData, mig))


class _Watched(GpuReader):
    """A GPU whose Xids are waited for once it has been read."""

    def __init__(self, nvml: Any, index: int, events: _Events) -> None:
        super().__init__(nvml, index)
        self._events: _Events | None = events

    def read(self, *, slow: bool) -> Answer:
        answer = super().read(slow=slow)
        if self._events is not None and self.handle is not None:
            self._events.add(self)
            self._events = None
        return answer


def _driver(nvml: Any) -> str:
    """The driver's version, "" where it is no text: a word for people, for which no GPU goes unread."""
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    except UnicodeDecodeError:
        return ""


def _start(out: Out) -> tuple[str, list[GpuReader]]:
    try:
        import pynvml as nvml
    except ImportError:
        raise Unusable("nvidia-ml-py is missing: pip install 'gridctl-agent[nvml]'") from None
    try:
        nvml.nvmlInit()
        count, driver = nvml.nvmlDeviceGetCount(), _driver(nvml)
    except nvml.NVMLError as error:
        raise Unusable(f"NVML cannot be used: {error}") from None
    if "--events" not in sys.argv:
        return driver, [GpuReader(nvml, index) for index in range(count)]
    events = _Events(nvml, out)
    return driver, [_Watched(nvml, index, events) for index in range(count)]


if __name__ == "__main__":
    serve(_start)
