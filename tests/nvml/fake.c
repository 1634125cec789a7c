/* A libnvidia-ml.so.1 without a GPU, for tests: what it answers stands in a text file.
 *
 * The file is named by FAKE_NVML and holds lines `key=value`; it is read at every call, so that a test
 * changes the world by writing it anew. Keys (N, M: numbers of GPUs, I: of a partition):
 *   driver, cuda, count           count is taken at nvmlInit, as the real one does
 *   return.FUNCTION=CODE          what a function returns; gpuN.return.FUNCTION for one GPU
 *   hang.FUNCTION=1               a function does not return while the line is there
 *   gpuN.uuid bus name brand arch major minor_cc minor memory numa temp util power ...
 *   gpuN.lost=1                   every call about it returns GPU_IS_LOST
 *   gpuN.mig=1, gpuN.migI.uuid gi ci g c memory start size name
 *   gpuN.switch=LINKS             NVLinks to a switch
 *   link.N.M=LINKS level.N.M=LEVEL (N < M)
 * Events are lines `N XID GI CI` (GI, CI: -1 for none; XID -1 for a change of partitions) appended to the
 * file FAKE_NVML.events; each event set begins at the end that the file has when the set is made.
 *
 * The declarations are written from NVIDIA's public documentation of NVML's binary interface.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION "535.104.05"
#endif

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       TIMEOUT = 10, GPU_IS_LOST = 15, MISMATCH = 18 };
enum { GPUS = 64, MIGS = 8, ANY = -1 };

typedef struct { int gpu, mig; } Device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { Device *device; unsigned long long type, data; unsigned gi, ci; } Event;
typedef struct { long offset; int any; unsigned long long masks[GPUS]; } Events;
typedef struct { unsigned sm, ce, dec, enc, jpeg, ofa, gi_slices, ci_slices; unsigned long long memory; } Attributes;
typedef struct { Device *device; unsigned id, profile, start, size; } InstanceInfo;
typedef struct { unsigned field, scope; long long timestamp, latency; unsigned type, status;
                 union { double d; unsigned ui; unsigned long long ull; } value; } Field;

static Device devices[GPUS][MIGS + 1];
static int initialized, counted, calls;
static struct { char name[64]; int count; } seen[256];

static char *whole(void) {
    static __thread char text[1 << 16];
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t size = 0;
    text[0] = '\n';
    if (file) { size = fread(text + 1, 1, sizeof text - 2, file); fclose(file); }
    text[size + 1] = 0;
    return text;
}

static const char *value(const char *key) {
    static __thread char found[4][256];
    static __thread int turn;
    char line[160], *at, *out = found[turn = (turn + 1) % 4];
    snprintf(line, sizeof line, "\n%s=", key);
    if (!(at = strstr(whole(), line))) return NULL;
    at += strlen(line);
    size_t length = strcspn(at, "\n");
    if (length > 255) length = 255;
    memcpy(out, at, length);
    out[length] = 0;
    return out;
}

static const char *get(const Device *device, const char *key) {
    char full[128];
    if (device->mig) snprintf(full, sizeof full, "gpu%d.mig%d.%s", device->gpu, device->mig - 1, key);
    else snprintf(full, sizeof full, "gpu%d.%s", device->gpu, key);
    return value(full);
}

static long long number(const char *text, long long otherwise) { return text ? strtoll(text, NULL, 10) : otherwise; }

/* What comes before every answer: counting, hanging, failing. */
static int begin(const char *function, const Device *device) {
    char key[128];
    const char *code;
    int at;
    calls++;
    for (at = 0; at < 255 && seen[at].name[0] && strcmp(seen[at].name, function); at++);
    snprintf(seen[at].name, sizeof seen[at].name, "%s", function);
    seen[at].count++;
    snprintf(key, sizeof key, "hang.%s", function);
    while (value(key)) usleep(1000);
    snprintf(key, sizeof key, "return.%s", function);
    if ((code = value(key))) return (int)number(code, 0);
    if (!initialized && strcmp(function, "nvmlInitWithFlags")) return UNINITIALIZED;
    if (device) {
        Device whole_gpu = { device->gpu, 0 };
        if (number(get(&whole_gpu, "lost"), 0)) return GPU_IS_LOST;
        if ((code = get(&whole_gpu, key))) return (int)number(code, 0);
    }
    return OK;
}
#define BEGIN(device) do { int code = begin(__func__, device); if (code) return code; } while (0)
#define WANTED(expression, into) do { const char *text = (expression); if (!text) return NOT_SUPPORTED; into = number(text, 0); } while (0)

/* For tests: how often a function was called. */
int fake_calls(const char *function) {
    for (int at = 0; at < 256 && seen[at].name[0]; at++) if (!strcmp(seen[at].name, function)) return seen[at].count;
    return 0;
}

int nvmlInitWithFlags(unsigned flags) {
    const char *driver = value("driver");
    (void)flags;
    BEGIN(NULL);
    if (driver && strcmp(driver, VERSION)) return MISMATCH;
    for (int gpu = 0; gpu < GPUS; gpu++)
        for (int mig = 0; mig <= MIGS; mig++) devices[gpu][mig] = (Device){ gpu, mig };
    if (!initialized++) counted = (int)number(value("count"), 0);
    return OK;
}
int nvmlShutdown(void) { BEGIN(NULL); initialized--; return OK; }
const char *nvmlErrorString(int code) { static __thread char text[32]; snprintf(text, sizeof text, "error %d", code); return text; }

static int string(const char *text, char *out, unsigned size) {
    if (!text) return NOT_SUPPORTED;
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}
int nvmlSystemGetDriverVersion(char *out, unsigned size) { BEGIN(NULL); return string(value("driver"), out, size); }
int nvmlSystemGetCudaDriverVersion(int *out) { BEGIN(NULL); WANTED(value("cuda"), *out); return OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { BEGIN(NULL); *out = (unsigned)counted; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    if ((int)index >= counted) return INVALID_ARGUMENT;
    BEGIN(&devices[index][0]);
    *out = &devices[index][0];
    return OK;
}
int nvmlDeviceGetUUID(Device *device, char *out, unsigned size) { BEGIN(device); return string(get(device, "uuid"), out, size); }
int nvmlDeviceGetName(Device *device, char *out, unsigned size) { BEGIN(device); return string(get(device, "name"), out, size); }
int nvmlDeviceGetSerial(Device *device, char *out, unsigned size) { BEGIN(device); return string(get(device, "serial"), out, size); }

#define NUMBER(function, key) int function(Device *device, unsigned *out) { BEGIN(device); WANTED(get(device, key), *out); return OK; }
NUMBER(nvmlDeviceGetMinorNumber, "minor")
NUMBER(nvmlDeviceGetBrand, "brand")
NUMBER(nvmlDeviceGetArchitecture, "arch")
NUMBER(nvmlDeviceGetPowerUsage, "power")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit")
NUMBER(nvmlDeviceGetPcieReplayCounter, "replays")
NUMBER(nvmlDeviceGetFanSpeed, "fan")
NUMBER(nvmlDeviceGetGpuInstanceId, "gi")
NUMBER(nvmlDeviceGetComputeInstanceId, "ci")
#define LONG(function, key) int function(Device *device, unsigned long long *out) { BEGIN(device); WANTED(get(device, key), *out); return OK; }
LONG(nvmlDeviceGetTotalEnergyConsumption, "energy")
LONG(nvmlDeviceGetCurrentClocksThrottleReasons, "throttle")
LONG(nvmlDeviceGetSupportedEventTypes, "events")
#define CODEC(function, key) int function(Device *device, unsigned *out, unsigned *period) { BEGIN(device); *period = 1000; WANTED(get(device, key), *out); return OK; }
CODEC(nvmlDeviceGetEncoderUtilization, "encoder")
CODEC(nvmlDeviceGetDecoderUtilization, "decoder")

int nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor) {
    BEGIN(device);
    WANTED(get(device, "major"), *major);
    *minor = (int)number(get(device, "minor_cc"), 0);
    return OK;
}
static void fill(Pci *out, const char *bus) {
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "0000%s", bus);
    for (char *at = out->bus_id; *at; at++) if (*at >= 'a' && *at <= 'f') *at -= 'a' - 'A';
}
int nvmlDeviceGetPciInfo_v3(Device *device, Pci *out) {
    BEGIN(device);
    if (!get(device, "bus")) return NOT_SUPPORTED;
    fill(out, get(device, "bus"));
    return OK;
}
int nvmlDeviceGetMemoryInfo(Device *device, Memory *out) {
    BEGIN(device);
    long long mib, used = number(get(device, "used"), 0);
    WANTED(get(device, "memory"), mib);
    *out = (Memory){ (unsigned long long)mib << 20, (unsigned long long)(mib - used) << 20, (unsigned long long)used << 20 };
    return OK;
}
int nvmlDeviceGetMemoryAffinity(Device *device, unsigned size, unsigned long *out, unsigned scope) {
    long long node;
    (void)size; (void)scope;
    BEGIN(device);
    WANTED(get(device, "numa"), node);
    out[0] = 1ul << node;
    return OK;
}
int nvmlDeviceGetUtilizationRates(Device *device, Utilization *out) {
    BEGIN(device);
    WANTED(get(device, "util"), out->gpu);
    out->memory = (unsigned)number(get(device, "util_memory"), 0);
    return OK;
}
int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *out) { (void)sensor; BEGIN(device); WANTED(get(device, "temp"), *out); return OK; }
int nvmlDeviceGetClockInfo(Device *device, unsigned kind, unsigned *out) {
    char key[16];
    BEGIN(device);
    snprintf(key, sizeof key, "clock%u", kind);
    WANTED(get(device, key), *out);
    return OK;
}
int nvmlDeviceGetPcieThroughput(Device *device, unsigned counter, unsigned *out) { BEGIN(device); WANTED(get(device, counter ? "pcie_rx" : "pcie_tx"), *out); return OK; }
int nvmlDeviceGetTotalEccErrors(Device *device, unsigned kind, unsigned counter, unsigned long long *out) {
    (void)counter;
    BEGIN(device);
    WANTED(get(device, kind ? "ecc_uncorrected" : "ecc_corrected"), *out);
    return OK;
}
int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    BEGIN(device);
    for (int at = 0; at < count; at++) {
        char key[32];
        snprintf(key, sizeof key, "field%u", fields[at].field);
        const char *text = get(device, key);
        fields[at].status = text ? OK : NOT_SUPPORTED;
        fields[at].type = 3;
        fields[at].value.ull = (unsigned long long)number(text, 0);
    }
    return OK;
}

/* Partitions. */
int nvmlDeviceGetMigMode(Device *device, unsigned *now, unsigned *pending) { BEGIN(device); WANTED(get(device, "mig"), *now); *pending = *now; return OK; }
int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *out) { BEGIN(device); *out = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **out) {
    BEGIN(device);
    *out = &devices[device->gpu][index + 1];
    return index < MIGS && get(*out, "uuid") ? OK : NOT_FOUND;
}
int nvmlDeviceGetAttributes_v2(Device *device, Attributes *out) {
    BEGIN(device);
    memset(out, 0, sizeof *out);
    WANTED(get(device, "g"), out->gi_slices);
    out->ci_slices = (unsigned)number(get(device, "c"), out->gi_slices);
    WANTED(get(device, "memory"), out->memory);
    return OK;
}
int nvmlDeviceGetGpuInstanceById(Device *device, unsigned id, Device **out) {
    BEGIN(device);
    for (int at = 1; at <= MIGS; at++) {
        *out = &devices[device->gpu][at];
        if (get(*out, "uuid") && number(get(*out, "gi"), -1) == (long long)id) return OK;
    }
    return NOT_FOUND;
}
int nvmlGpuInstanceGetInfo(Device *device, InstanceInfo *out) {
    BEGIN(device);
    memset(out, 0, sizeof *out);
    WANTED(get(device, "start"), out->start);
    WANTED(get(device, "size"), out->size);
    return OK;
}

/* Links. A GPU's NVLinks are numbered by its peers, those to a switch come last. */
static long long pair(const char *what, int one, int other) {
    char key[32];
    snprintf(key, sizeof key, "%s.%d.%d", what, one < other ? one : other, one < other ? other : one);
    return number(value(key), -1);
}
/* Returns the peer at the other end, GPUS for a switch, -1 for no such link. */
static int end_of(const Device *device, int link) {
    for (int other = 0; other < counted; other++) {
        long long count = other == device->gpu ? 0 : pair("link", device->gpu, other);
        if (count > 0 && link < count) return other;
        if (count > 0) link -= (int)count;
    }
    return link < number(get(device, "switch"), 0) ? GPUS : -1;
}
int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *out) {
    BEGIN(device);
    if (link >= 18) return INVALID_ARGUMENT;
    *out = end_of(device, (int)link) >= 0;
    return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(Device *device, unsigned link, unsigned *out) {
    BEGIN(device);
    int end = end_of(device, (int)link);
    if (end < 0) return INVALID_ARGUMENT;
    *out = end == GPUS ? 2 : 0;
    return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *device, unsigned link, Pci *out) {
    BEGIN(device);
    int end = end_of(device, (int)link);
    if (end < 0 || end == GPUS) return NOT_SUPPORTED;
    fill(out, get(&devices[end][0], "bus"));
    return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(Device *one, Device *other, unsigned *out) {
    BEGIN(one);
    long long level = pair("level", one->gpu, other->gpu);
    if (level < 0) return NOT_SUPPORTED;
    *out = (unsigned)level;
    return OK;
}

/* Events. */
static FILE *event_file(void) {
    char path[512];
    const char *state = getenv("FAKE_NVML");
    snprintf(path, sizeof path, "%s.events", state ? state : "");
    return fopen(path, "r");
}
int nvmlEventSetCreate(Events **out) {
    BEGIN(NULL);
    FILE *file = event_file();
    *out = calloc(1, sizeof **out);
    if (file) { fseek(file, 0, SEEK_END); (*out)->offset = ftell(file); fclose(file); }
    return OK;
}
int nvmlEventSetFree(Events *set) { BEGIN(NULL); free(set); return OK; }
int nvmlDeviceRegisterEvents(Device *device, unsigned long long mask, Events *set) {
    BEGIN(device);
    set->masks[device->gpu] |= mask;
    return OK;
}
int nvmlEventSetWait_v2(Events *set, Event *out, unsigned milliseconds) {
    struct timespec now, begun;
    BEGIN(NULL);
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (;;) {
        FILE *file = event_file();
        char line[128];
        while (file && !fseek(file, set->offset, SEEK_SET) && fgets(line, sizeof line, file)) {
            int gpu, xid, gi, ci;
            if (!strchr(line, '\n')) break;
            set->offset += (long)strlen(line);
            if (sscanf(line, "%d %d %d %d", &gpu, &xid, &gi, &ci) != 4) continue;
            unsigned long long type = xid < 0 ? 0x100 : 0x8;
            if (gpu >= 0 && !(set->masks[gpu] & type)) continue;
            *out = (Event){ gpu < 0 ? NULL : &devices[gpu][0], type, (unsigned long long)(xid < 0 ? 0 : xid), (unsigned)gi, (unsigned)ci };
            fclose(file);
            return OK;
        }
        if (file) fclose(file);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((now.tv_sec - begun.tv_sec) * 1000 + (now.tv_nsec - begun.tv_nsec) / 1000000 >= (long)milliseconds) return TIMEOUT;
        usleep(1000);
        BEGIN(NULL);
    }
}
