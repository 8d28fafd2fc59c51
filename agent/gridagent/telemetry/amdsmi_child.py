"""What calls AMD SMI: `python -m gridagent.telemetry.amdsmi_child ROOT LOST_S`, see `gpu_child`."""

import sys
from pathlib import Path

from gridagent.telemetry.amdsmi_gpu import GpuReader
from gridagent.telemetry.gpu_child import Out, Unusable, serve


def _start(out: Out) -> tuple[str, list[GpuReader]]:
    try:
        import amdsmi
    except ImportError:
        raise Unusable("amdsmi is missing: pip install that of the node's ROCm") from None
    except (
        KeyError,
        AttributeError,
    ) as error:  # it looks up the library and every function as it is imported
        why = "libamd_smi.so is missing, or of another release than amdsmi"
        raise Unusable(f"AMD SMI cannot be used: {why}: {error}") from None
    try:
        amdsmi.amdsmi_init(amdsmi.AmdSmiInitFlags.INIT_AMD_GPUS)
        handles = amdsmi.amdsmi_get_processor_handles()
    except amdsmi.AmdSmiLibraryException as error:
        raise Unusable(f"AMD SMI cannot be used: {error.get_error_info()}") from None
    root, lost_s = Path(sys.argv[1]), float(sys.argv[2])
    return "", [GpuReader(amdsmi, index, handle, root, lost_s) for index, handle in enumerate(handles)]


if __name__ == "__main__":
    serve(_start)
