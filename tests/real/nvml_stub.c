/* A libnvidia-ml.so.1 without GPUs, for tests; see gpu_stub.h. Of its own:
 *
 *   garbled                1: the driver's version is no text
 *   event                  "GPU XID GPU_INSTANCE COMPUTE_INSTANCE": told once, then the file is removed
 *
 * Compiled with -DFIXED it has no events.
 *
 * Signatures after NVIDIA's public NVML API reference (docs.nvidia.com/deploy/nvml-api). */
#include "gpu_stub.h"

typedef unsigned int U;
typedef unsigned long long ULL;

enum { INVALID = 2, NOT_SUPPORTED = 3, SMALL = 7, TIMEOUT = 10 };

static Return as_uint(Device device, const char *name, long long fallback, U *out) {
    long long value;
    Return r = get(device, name, fallback, &value);
    *out = (U)value;
    return r;
}

static Return as_ull(Device device, const char *name, long long fallback, ULL *out) {
    long long value;
    Return r = get(device, name, fallback, &value);
    *out = (ULL)value;
    return r;
}

static Return as_text(Device device, const char *name, const char *format, char *out, U size) {
    long long value;
    Return r = get(device, name, device->index, &value);
    snprintf(out, size, format, (int)value);
    return r;
}

Return nvmlInitWithFlags(U flags) {
    long long value;
    (void)flags;
    return answer("init", 0, &value);
}

const char *nvmlErrorString(Return r) {
    switch (r) {
    case NOT_SUPPORTED: return "Not Supported";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
    }
}

Return nvmlDeviceGetCount_v2(U *count) {
    long long value;
    Return r = answer("count", 1, &value);
    *count = (U)value;
    return r;
}

Return nvmlSystemGetDriverVersion(char *out, U size) {
    long long garbled;
    Return r = answer("garbled", 0, &garbled);
    snprintf(out, size, garbled ? "999\xff" : "999.10");
    return r;
}

Return nvmlDeviceGetHandleByIndex_v2(U index, Device *out) {
    long long value;
    if (index >= 16) return INVALID;
    gpus[index].index = (int)index;
    *out = &gpus[index];
    return get(*out, "handle", 0, &value);
}

struct pci { char legacy[16]; U domain, bus, device, ids, subsystem; char bus_id[32]; };

Return nvmlDeviceGetPciInfo_v3(Device d, struct pci *out) {
    long long bus;
    Return r = get(d, "bus", 0x1a + 0x10 * d->index, &bus);
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", (U)bus);
    return r;
}

Return nvmlDeviceGetUUID(Device d, char *out, U size) {
    return as_text(d, "uuid", "GPU-00000000-0000-4000-8000-%012d", out, size);
}
Return nvmlDeviceGetSerial(Device d, char *out, U size) { return as_text(d, "serial", "77%08d", out, size); }
Return nvmlDeviceGetName(Device d, char *out, U size) { return as_text(d, "name", "Stub %d", out, size); }

Return nvmlDeviceGetTemperature(Device d, int sensor, U *out) { (void)sensor; return as_uint(d, "temp", 41, out); }
struct margin { U version; int margin; };
Return nvmlDeviceGetMarginTemperature(Device d, struct margin *out) {
    return as_uint(d, "margin", 33, (U *)&out->margin);
}
Return nvmlDeviceGetPowerUsage(Device d, U *out) { return as_uint(d, "power_mw", 123456, out); }
Return nvmlDeviceGetEnforcedPowerLimit(Device d, U *out) { return as_uint(d, "power_limit_mw", 700000, out); }
Return nvmlDeviceGetClockInfo(Device d, int type, U *out) {
    return as_uint(d, type == 1 ? "sm_clock" : "mem_clock", type == 1 ? 1980 : 2619, out);
}
#ifndef OLD_DRIVER
Return nvmlDeviceGetCurrentClocksEventReasons(Device d, ULL *out) { return as_ull(d, "throttle", 1, out); }
#else
Return nvmlDeviceGetCurrentClocksThrottleReasons(Device d, ULL *out) { return as_ull(d, "throttle", 1, out); }
#endif
Return nvmlDeviceGetUtilizationRates(Device d, U *out) { out[1] = 0; return as_uint(d, "util", 97, out); }

#ifndef OLD_DRIVER
struct memory_v2 { U version; ULL total, reserved, free, used; };
Return nvmlDeviceGetMemoryInfo_v2(Device d, struct memory_v2 *out) {
    out->total = 80ULL << 30;
    return as_ull(d, "mem_used", 3ULL << 30, &out->used);
}
#endif
struct memory { ULL total, free, used; };
Return nvmlDeviceGetMemoryInfo(Device d, struct memory *out) {
    out->total = 40ULL << 30;
    return as_ull(d, "mem_used", 2ULL << 30, &out->used);
}

Return nvmlDeviceGetTotalEccErrors(Device d, int type, int counter, ULL *out) {
    (void)counter;
    return as_ull(d, type ? "dbe" : "sbe", type ? 0 : 5, out);
}
#ifndef OLD_DRIVER
struct sram { U version; ULL total[3]; ULL unc_parity, unc_sec_ded, cor; ULL buckets[5]; U threshold; };
Return nvmlDeviceGetSramEccErrorStatus(Device d, struct sram *out) {
    out->unc_sec_ded = 2;
    Return r = as_uint(d, "sram_threshold", 0, &out->threshold);
    return r ? r : as_ull(d, "sram_parity", 1, &out->unc_parity);
}
#endif
Return nvmlDeviceGetMemoryErrorCounter(Device d, int type, int counter, int place, ULL *out) {
    if (type != 1 || counter != 0 || place != 7) return INVALID;
    return as_ull(d, "sram_old", 4, out);
}

Return nvmlDeviceGetPcieReplayCounter(Device d, U *out) { return as_uint(d, "replay", 6, out); }
Return nvmlDeviceGetCurrPcieLinkGeneration(Device d, U *out) { return as_uint(d, "gen", 4, out); }
Return nvmlDeviceGetMaxPcieLinkGeneration(Device d, U *out) { return as_uint(d, "gen_max", 5, out); }
Return nvmlDeviceGetCurrPcieLinkWidth(Device d, U *out) { return as_uint(d, "width", 16, out); }
Return nvmlDeviceGetMaxPcieLinkWidth(Device d, U *out) { return as_uint(d, "width_max", 16, out); }

Return nvmlDeviceGetMigMode(Device d, U *current, U *pending) {
    *pending = 1;
    return as_uint(d, "mig", 0, current);
}

struct process { U pid; ULL used; U gi, ci; };
Return nvmlDeviceGetComputeRunningProcesses_v3(Device d, U *count, struct process *out) {
    U room = *count;
    Return r = as_uint(d, "processes", 2, count);
    if (r || *count == 0) return r;
    if (!out || room < *count) return SMALL;
    memset(out, 0, *count * sizeof *out);
    return OK;
}

struct field { U id, scope; long long when, took; int type; Return r; ULL value; };
static int is_link_counter(U id) { return id == 38 || id == 45 || id == 52 || id == 59 || id == 215; }

Return nvmlDeviceGetFieldValues(Device d, int count, struct field *fields) {
    for (int i = 0; i < count; i++) {
        char name[32];
        long long value;
        struct field *f = &fields[i];
        snprintf(name, sizeof name, f->id == 215 ? "field%u.%u" : "field%u", f->id, f->scope);
        f->type = f->id == 230 ? 1 : 3;
        f->r = (is_link_counter(f->id) ? firmware : get)(d, name, f->id == 230 ? 0 : f->id, &value);
        f->value = (ULL)value;
    }
    return OK;
}

Return nvmlDeviceGetRemappedRows(Device d, U *corr, U *unc, U *pending, U *failed) {
    long long value;
    Return r = firmware(d, "remap_unc", 1, &value);
    *corr = 7, *unc = (U)value;
    if (!r) r = as_uint(d, "remap_pending", 0, pending);
    return r ? r : as_uint(d, "remap_failed", 0, failed);
}

Return nvmlDeviceGetRetiredPages(Device d, int cause, U *count, ULL *pages) {
    long long value;
    U room = *count;
    Return r = firmware(d, cause ? "retired_dbe" : "retired_sbe", cause ? 1 : 2, &value);
    *count = (U)value;
    if (r || !*count) return r;
    if (!pages || room < *count) return SMALL;
    memset(pages, 0, *count * sizeof *pages);
    return OK;
}

Return nvmlDeviceGetNvLinkState(Device d, U link, U *active) {
    char name[32];
    long long links;
    Return r = get(d, "links", 4, &links);
    if (r || link >= (U)links) return r ? r : INVALID;
    snprintf(name, sizeof name, "link%u", link);
    return as_uint(d, name, 1, active);
}
Return nvmlDeviceGetNvLinkRemoteDeviceType(Device d, U link, U *type) {
    (void)link;
    return as_uint(d, "remote", 2, type);
}

struct event { Device device; ULL type, data; U gi, ci; };
Return nvmlEventSetCreate(void **set) {
    long long value;
    *set = gpus;
    return answer("events", 0, &value);
}
Return nvmlDeviceRegisterEvents(Device d, ULL types, void *set) {
    long long value;
    (void)set;
    Return r = types == 8 ? get(d, "register", 0, &value) : INVALID;
    char line[32];
    snprintf(line, sizeof line, "%d", d->index);
    if (!r) append("registered", line);
    return r;
}
Return nvmlEventSetWait_v2(void *set, struct event *out, U timeout_ms) {
    (void)set;
#ifdef FIXED
    usleep(timeout_ms * 1000);
    return TIMEOUT;
#endif
    for (U waited_ms = 0; waited_ms < timeout_ms; waited_ms += 5) {
        FILE *f = stub("r", "event");
        if (f) {
            int gpu, xid, read = fscanf(f, "%d %d %u %u", &gpu, &xid, &out->gi, &out->ci);
            char path[4096];
            fclose(f);
            snprintf(path, sizeof path, "%s/event", getenv("GPU_STUB"));
            unlink(path);
            if (read == 4) {
                out->device = &gpus[gpu], out->type = 8, out->data = (ULL)xid;
                return OK;
            }
        }
        usleep(5000);
    }
    return TIMEOUT;
}
