/* What the stubs of GPU libraries have in common: what they answer stands in files below $GPU_STUB.
 *
 *   count                  number of GPUs
 *   N/NAME                 the answer of GPU N: a number, "!CODE" (the library's error) or "hang"
 *   N/all                  "!CODE" for every call on GPU N
 *   init                   as N/NAME, for the library's start
 *   calls                  written here: one line for each call of what firmware keeps
 *   hanging                written here: one line for each call that hangs
 *
 * Compiled with -DFIXED it looks at "count" only: a benchmark measures its reader and not it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Return;
typedef struct gpu { int index; } *Device;

enum { OK = 0 };
static struct gpu gpus[16];

static FILE *stub(const char *mode, const char *name) {
    char path[4096];
    const char *root = getenv("GPU_STUB");
    snprintf(path, sizeof path, "%s/%s", root ? root : ".", name);
    return fopen(path, mode);
}

static void append(const char *file, const char *line) {
    FILE *f = stub("a", file);
    if (f) { fprintf(f, "%s\n", line); fclose(f); }
}

static Return answer(const char *name, long long fallback, long long *value) {
    char text[64] = "";
    FILE *f;
    *value = fallback;
#ifdef FIXED
    if (strcmp(name, "count")) return OK;
#endif
    f = stub("r", name);
    if (!f) return OK;
    if (!fgets(text, sizeof text, f)) text[0] = 0;
    fclose(f);
    if (!strncmp(text, "hang", 4)) {
        append("hanging", name);
        for (;;) pause();
    }
    if (!strncmp(text, "crash", 5)) abort();
    if (text[0] == '!') return atoi(text + 1);
    *value = atoll(text);
    return OK;
}

static Return get(Device device, const char *name, long long fallback, long long *value) {
    char path[128];
    Return all;
    snprintf(path, sizeof path, "%d/all", device->index);
    if ((all = answer(path, 0, value))) return all;
    snprintf(path, sizeof path, "%d/%s", device->index, name);
    return answer(path, fallback, value);
}

static Return firmware(Device device, const char *name, long long fallback, long long *value) {
    char line[128];
    snprintf(line, sizeof line, "%d %s", device->index, name);
    append("calls", line);
    return get(device, name, fallback, value);
}
