"""The process that calls NVML. It may hang, in the kernel too: then its parent leaves it behind.

`python -m gridagent.telemetry.nvml_child [--events]`, with a connected socket as standard input. The
parent writes "INDEX fast" or "INDEX slow" and gets an `Answer`; `XidEvent` and `Said` come unasked.
It ends when the parent does.
"""

import contextlib
import ctypes
import queue
import signal
import socket
import sys
import threading
from typing import Any

import msgspec

from gridagent.telemetry.nvml_gpu import Answer, GpuReader

PR_SET_PDEATHSIG = 1
EVENT_WAIT_MS = 1000
#: The wait for events fails at once and for ever while a GPU is lost.
EVENT_PAUSE_S = 5.0
#: NVML's mark for an event that concerns the whole GPU and no instance of it.
_NO_INSTANCE = 0xFFFFFFFF


class Ready(msgspec.Struct, tag="ready"):
    """NVML has started: it lists `gpus` GPUs."""

    gpus: int
    driver: str = ""


class Failed(msgspec.Struct, tag="failed"):
    """NVML cannot be used, and why. The child ends."""

    text: str


class Said(msgspec.Struct, tag="said"):
    """Something that a person should know about this source."""

    text: str


class XidEvent(msgspec.Struct, tag="xid"):
    """An Xid, told by NVML. `mig`: the instances it concerns, as the kernel writes them, or ""."""

    pci: str
    xid: int
    mig: str = ""


Message = Ready | Failed | Said | XidEvent | Answer


class _Out:
    """The socket to the parent; both threads write whole lines."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock:
            self._link.sendall(msgspec.json.encode(message) + b"\n")


class _Events(threading.Thread):
    """Waits for Xids of the GPUs that `add` names. A GPU joins between two waits."""

    def __init__(self, nvml: Any, out: _Out) -> None:
        super().__init__(daemon=True)
        self._nvml, self._out = nvml, out
        self._new: queue.SimpleQueue[GpuReader] = queue.SimpleQueue()
        self._pci: dict[int | None, str] = {}

    def add(self, gpu: GpuReader) -> None:
        self._new.put(gpu)

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


def main() -> None:
    """Serves the parent until it closes the socket."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(fileno=0) as link, contextlib.suppress(OSError):
        _serve(link, _Out(link))


def _serve(link: socket.socket, out: _Out) -> None:
    try:
        import pynvml as nvml
    except ImportError:
        out.send(Failed("nvidia-ml-py is missing: pip install 'gridctl-agent[nvml]'"))
        return
    try:
        nvml.nvmlInit()
        count, driver = nvml.nvmlDeviceGetCount(), str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        out.send(Failed(f"NVML cannot be used: {error}"))
        return
    out.send(Ready(count, driver))
    readers = [GpuReader(nvml, index) for index in range(count)]
    events = _Events(nvml, out) if "--events" in sys.argv else None
    if events is not None:
        events.start()
    joined: set[int] = set()
    with link.makefile("rb") as requests:
        for request in requests:
            index, pace = request.split()
            gpu = readers[int(index)]
            out.send(gpu.read(slow=pace == b"slow"))
            if events is not None and gpu.handle is not None and int(index) not in joined:
                joined.add(int(index))
                events.add(gpu)


if __name__ == "__main__":
    main()
