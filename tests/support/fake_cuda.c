/* A CUDA driver without a GPU: what refitd.buffers calls of libcuda, over memory files.
 *
 * An allocation is a memfd, a mapping an mmap of it, so "device" addresses are addresses of main memory. Memory counts
 * as used while any process has a descriptor or a mapping of it, as the kernel says (/proc). Every rule of the real
 * driver is an error here, also where the real driver's behaviour is undefined:
 *
 *   map over a mapping, outside a reservation, of a released handle; unmap of a part or of an unmapped range, or while
 *   queued work uses it; free of a mapped range; access for a device without a link to the memory's device; export of
 *   a type that the handle was not made for; a memory call during a capture; a synchronise of a context that captures
 *
 * Queued work runs late (fake_cuda_work.h), and copies need pinned main memory. An unmapped address is inaccessible.
 *
 *   FAKE_CUDA_TAG      one word that tells this machine's "GPUs" from those of other tests
 *   FAKE_CUDA_VISIBLE  numbers of the GPUs this process sees, in its order: "0,1"; unset: none
 *   FAKE_CUDA_BYTES    memory of each GPU
 *   FAKE_CUDA_PEERS    pairs of linked GPUs: "01,10" lets GPU 0 access memory of GPU 1, and 1 that of 0
 *   FAKE_CUDA_RDMA     "0": the devices do not support gpuDirectRDMACapable; "refused": creation with it fails
 *   FAKE_CUDA_FABRIC   "1": the devices support fabric handles; "refused": they say so, but creation fails
 *   FAKE_CUDA_PINS     "refused": no main memory can be pinned; "writable": none that is mapped for reading only
 *   FAKE_CUDA_ALONE    "1": no other process uses the GPUs; looking for their memory takes long on a busy machine
 *   FAKE_CUDA_FAIL     "cuMemMap:3": the third call of cuMemMap answers out of memory; "cuMemMap:3+": also all later
 *                      ones; "cuMem:3": counts calls of every function whose name begins so; joined by commas;
 *                      "/a/file": the file has the rules, and each failed call adds a line to "/a/file.failed"
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, ILLEGAL_ADDRESS = 700, NOT_PERMITTED = 800, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
       CAPTURE_INVALIDATED = 901, NOT_READY = 600,
       ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, CAPTURE_UNMATCHED = 903, CAPTURE_IMPLICIT = 906 };
enum { PAGE = 2 << 20, MAX_GPUS = 16, MAX_DEPTH = 64, MAX_FILES = 4096, MAX = 1024 };
enum { FD = 1, FABRIC = 8, LEGACY = 1, PER_THREAD = 2, GLOBAL = 0, RELAXED = 2, ACTIVE = 1, BROKEN = 2 };

typedef struct { int type, id; } Location;
typedef struct { int type, types; Location location; void *win32; unsigned char compression, rdma, rest[6]; } Properties;
typedef struct { Location location; int flags; } Access;
typedef struct { int live, fd, gpu, types; size_t size; } Handle;
typedef struct { uint64_t at; size_t size; int gpu; unsigned char access[MAX_GPUS]; } Range; /* size 0: a free entry */
typedef struct { int live, gpu, non_blocking, capture, mode; pthread_t thread; } Stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int retained[MAX_GPUS], handle_count;
static Handle handles[MAX * 64]; /* never used twice, so that a released one is noticed */
static Range reserved[MAX], mapped[MAX];
static Stream streams[MAX]; /* a stream's handle is its index; 0 to 2 are the driver's own streams */
static int stream_count = 3;
static __thread int stack[MAX_DEPTH], depth, thread_mode;

static void unlock(int *unused) { (void)unused; pthread_mutex_unlock(&lock); }

/* Whether FAKE_CUDA_FAIL names this call. The counts start again whenever the variable changes. */
static int fails(const char *name) {
    static char last[200];
    static int counts[8];
    const char *path = getenv("FAKE_CUDA_FAIL"), *text = path;
    char read_now[200] = "";
    FILE *file = path && *path == '/' ? fopen(path, "r") : NULL;
    if (path && *path == '/') text = read_now;
    if (file) {
        if (!fgets(read_now, sizeof read_now, file)) read_now[0] = 0;
        fclose(file);
    }
    if (strcmp(text ? text : "", last)) {
        memset(counts, 0, sizeof counts);
        snprintf(last, sizeof last, "%s", text ? text : "");
    }
    int found = 0, index = 0;
    for (const char *rule = last; rule && *rule && index < 8; index++) {
        const char *colon = strchr(rule, ':');
        if (!colon) break;
        char *end;
        long number = strtol(colon + 1, &end, 10);
        if (!strncmp(name, rule, (size_t)(colon - rule))) {
            counts[index]++;
            found |= *end == '+' ? counts[index] >= number : counts[index] == number;
        }
        rule = strchr(rule, ',');
        rule = rule ? rule + 1 : NULL;
    }
    if (found && text == read_now) {
        char failed[300];
        snprintf(failed, sizeof failed, "%s.failed", path);
        if ((file = fopen(failed, "a"))) fprintf(file, "%d %s\n", getpid(), name), fclose(file);
    }
    return found;
}

/* Every function that may fail for want of memory begins with this. */
#define ENTER() \
    int guard __attribute__((cleanup(unlock))) = pthread_mutex_lock(&lock); \
    if (fails(__func__)) return OUT_OF_MEMORY

/* The calls that may invalidate a graph: refused while this thread captures, or another one does so globally. */
#define ENTER_UNSAFE() \
    ENTER(); \
    if (breaks_capture()) return CAPTURE_UNSUPPORTED

static int breaks_capture(void) {
    int found = 0;
    for (int i = 0; i < stream_count; i++) {
        Stream *s = &streams[i];
        if (!s->capture || thread_mode == RELAXED) continue;
        int mine = pthread_equal(s->thread, pthread_self());
        if (mine ? s->mode == RELAXED : s->mode != GLOBAL || thread_mode != GLOBAL) continue;
        s->capture = BROKEN;
        found = 1;
    }
    return found;
}

static int is(const char *variable, const char *value) {
    const char *text = getenv(variable);
    return text && !strcmp(text, value);
}

static int visible(int *gpus) {
    const char *text = getenv("FAKE_CUDA_VISIBLE");
    int count = 0;
    while (text && *text && count < MAX_GPUS) {
        gpus[count++] = atoi(text);
        text = strchr(text, ',');
        text = text ? text + 1 : NULL;
    }
    return count;
}

static int gpu_of(int device) { /* the GPU that this process numbers so, -1 for none */
    int gpus[MAX_GPUS], count = visible(gpus);
    return device >= 0 && device < count ? gpus[device] : -1;
}

static int is_linked(int gpu, int owner) {
    char pair[24];
    snprintf(pair, sizeof pair, "%d%d", gpu, owner);
    const char *text = getenv("FAKE_CUDA_PEERS");
    return gpu == owner || (text && strstr(text, pair));
}

static size_t memory(void) { const char *text = getenv("FAKE_CUDA_BYTES"); return text ? strtoull(text, NULL, 10) : 0; }
static const char *tag(void) { const char *text = getenv("FAKE_CUDA_TAG"); return text ? text : "untagged"; }

#include "fake_cuda_memory.h"

int cuInit(unsigned flags) { int gpus[MAX_GPUS]; return flags ? INVALID_VALUE : visible(gpus) ? OK : NO_DEVICE; }
int cuDeviceGetCount(int *count) { int gpus[MAX_GPUS]; *count = visible(gpus); return OK; }

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return gpu_of(ordinal) < 0 ? INVALID_DEVICE : OK;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 102: case 103: *value = 1; break; /* memory management, descriptors */
    case 110: *value = !is("FAKE_CUDA_RDMA", "0"); break;
    case 128: *value = is("FAKE_CUDA_FABRIC", "1") || is("FAKE_CUDA_FABRIC", "refused"); break;
    default: return INVALID_VALUE;
    }
    return gpu_of(device) < 0 ? INVALID_DEVICE : OK;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 0xfa, 16);
    uuid[15] = (unsigned char)gpu_of(device);
    return gpu_of(device) < 0 ? INVALID_DEVICE : OK;
}

int cuDeviceGetPCIBusId(char *address, int length, int device) {
    int gpu = gpu_of(device);
    return gpu < 0 || snprintf(address, (size_t)length, "0000:%02X:00.0", 0x1a + 0x10 * gpu) >= length ? INVALID_DEVICE : OK;
}

int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    int gpu = gpu_of(device), other = gpu_of(peer);
    *can = gpu >= 0 && gpu != other && is_linked(gpu, other);
    return gpu < 0 || other < 0 ? INVALID_DEVICE : OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER();
    int gpu = gpu_of(device);
    if (gpu < 0) return INVALID_DEVICE;
    retained[gpu]++;
    *context = (void *)(intptr_t)(gpu + 1);
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER();
    int gpu = gpu_of(device);
    if (gpu < 0) return INVALID_DEVICE;
    if (!retained[gpu]) return INVALID_CONTEXT;
    for (int i = 0; retained[gpu] == 1 && i < MAX; i++) /* the context's mappings would end with it */
        if (mapped[i].size && mapped[i].gpu == gpu) return INVALID_CONTEXT;
    retained[gpu]--;
    return OK;
}

int cuCtxPushCurrent_v2(void *context) {
    int gpu = (int)(intptr_t)context - 1;
    if (gpu < 0 || gpu >= MAX_GPUS || !retained[gpu] || depth == MAX_DEPTH) return INVALID_CONTEXT;
    stack[depth++] = gpu + 1;
    return OK;
}

int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = (void *)(intptr_t)stack[--depth];
    return OK;
}

static Range *entry(Range *table, uint64_t at) { /* the entry that begins at an address */
    for (int i = 0; i < MAX; i++)
        if (table[i].size && table[i].at == at) return &table[i];
    return NULL;
}

static Range *overlapping(Range *table, uint64_t at, size_t size) {
    for (int i = 0; i < MAX; i++)
        if (table[i].size && at < table[i].at + table[i].size && table[i].at < at + size) return &table[i];
    return NULL;
}

static Range *unused(Range *table) {
    for (int i = 0; i < MAX; i++)
        if (!table[i].size) return &table[i];
    return NULL;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    if (*mode < GLOBAL || *mode > RELAXED) return INVALID_VALUE;
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return OK;
}

int cuStreamCreate(uint64_t *stream, unsigned flags) {
    ENTER_UNSAFE();
    if (!depth) return INVALID_CONTEXT;
    int made = 3;
    while (made < stream_count && streams[made].live) made++;
    if (flags > 1 || made == MAX) return INVALID_VALUE;
    streams[made] = (Stream){.live = 1, .gpu = stack[depth - 1] - 1, .non_blocking = (int)flags};
    stream_count = made < stream_count ? stream_count : made + 1;
    *stream = (uint64_t)made;
    return OK;
}

static int waits_for_capture(uint64_t stream) { /* the legacy stream does, of blocking streams */
    if (stream > LEGACY || !depth) return 0;
    for (int i = 3; i < stream_count; i++)
        if (streams[i].capture && !streams[i].non_blocking && streams[i].gpu == stack[depth - 1] - 1) return 1;
    return 0;
}

int cuStreamBeginCapture_v2(uint64_t stream, int mode) {
    ENTER();
    if (stream <= LEGACY || stream >= (uint64_t)stream_count) return CAPTURE_UNSUPPORTED;
    if (streams[stream].capture || mode < GLOBAL || mode > RELAXED) return INVALID_VALUE;
    streams[stream].capture = ACTIVE, streams[stream].mode = mode, streams[stream].thread = pthread_self();
    return OK;
}

int cuStreamEndCapture(uint64_t stream, void **graph) {
    ENTER();
    if (stream >= (uint64_t)stream_count || !streams[stream].capture) return CAPTURE_UNMATCHED;
    int status = streams[stream].capture == ACTIVE ? OK : CAPTURE_INVALIDATED;
    streams[stream].capture = 0;
    *graph = NULL;
    return status;
}

int cuStreamIsCapturing(uint64_t stream, int *status) {
    ENTER();
    if (!depth) return INVALID_CONTEXT;
    if (stream >= (uint64_t)stream_count) return INVALID_HANDLE;
    if (waits_for_capture(stream)) return CAPTURE_IMPLICIT; /* without an effect on the capture */
    *status = streams[stream].capture;
    return OK;
}

#include "fake_cuda_work.h"

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER();
    if (!depth) return INVALID_CONTEXT;
    size_t taken = used(stack[depth - 1] - 1);
    *total = memory();
    *free_bytes = taken < *total ? *total - taken : 0;
    return OK;
}

static int refusal(const Properties *p) { /* why no memory can have these properties, OK if it can */
    if (gpu_of(p->location.id) < 0) return INVALID_DEVICE;
    if (p->type != 1 || p->location.type != 1 || p->win32 || p->compression) return INVALID_VALUE;
    for (size_t i = 0; i < sizeof p->rest; i++)
        if (p->rest[i]) return INVALID_VALUE;
    if (p->types & ~(FD | FABRIC) || p->rdma > 1) return INVALID_VALUE;
    if (p->rdma && is("FAKE_CUDA_RDMA", "0")) return INVALID_VALUE;
    return p->types & FABRIC && !is("FAKE_CUDA_FABRIC", "1") && !is("FAKE_CUDA_FABRIC", "refused") ? NOT_SUPPORTED : OK;
}

int cuMemGetAllocationGranularity(size_t *page, const Properties *properties, int option) {
    ENTER();
    *page = PAGE;
    return option ? INVALID_VALUE : refusal(properties);
}

static int add_handle(uint64_t *handle, Handle made) {
    if (made.fd < 0 || handle_count == MAX * 64 - 1) return OUT_OF_MEMORY;
    handles[++handle_count] = made;
    *handle = (uint64_t)handle_count;
    return OK;
}

static Handle *live(uint64_t handle) {
    return handle && handle <= (uint64_t)handle_count && handles[handle].live ? &handles[handle] : NULL;
}

int cuMemCreate(uint64_t *handle, size_t size, const Properties *properties, unsigned long long flags) {
    ENTER_UNSAFE();
    int status = refusal(properties), gpu = gpu_of(properties->location.id);
    if (status) return status;
    if (flags || !size || size % PAGE) return INVALID_VALUE;
    if (properties->types & FABRIC && is("FAKE_CUDA_FABRIC", "refused")) return NOT_PERMITTED;
    if (properties->rdma && is("FAKE_CUDA_RDMA", "refused")) return NOT_SUPPORTED;
    if (used(gpu) + size > memory()) return OUT_OF_MEMORY;
    char name[200];
    int types = properties->types | (properties->rdma ? 256 : 0);
    snprintf(name, sizeof name, "fake-cuda:%s:%d:%zu:%d", tag(), gpu, size, types);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)size)) close(fd), fd = -1;
    return add_handle(handle, (Handle){1, fd, gpu, types, size});
}

int cuMemRelease(uint64_t handle) {
    ENTER_UNSAFE();
    Handle *found = live(handle);
    if (!found) return INVALID_HANDLE;
    close(found->fd);
    found->live = 0;
    return OK;
}

int cuMemExportToShareableHandle(int *fd, uint64_t handle, int type, unsigned long long flags) {
    ENTER_UNSAFE();
    Handle *found = live(handle);
    if (!found) return INVALID_HANDLE;
    if (type != FD || flags || !(found->types & FD)) return INVALID_VALUE;
    *fd = fcntl(found->fd, F_DUPFD_CLOEXEC, 0);
    return *fd < 0 ? OUT_OF_MEMORY : OK;
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *descriptor, int type) {
    ENTER_UNSAFE();
    char path[64], link[600];
    int gpu, types, fd = (int)(intptr_t)descriptor;
    size_t size;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(path, link, sizeof link - 1);
    if (n < 0 || type != FD) return INVALID_VALUE;
    link[n] = 0;
    if (!is_ours(link, &gpu, &size, &types)) return INVALID_VALUE;
    return add_handle(handle, (Handle){1, fcntl(fd, F_DUPFD_CLOEXEC, 0), gpu, types, size});
}

int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t wanted, unsigned long long flags) {
    ENTER_UNSAFE();
    Range *entry = unused(reserved);
    if (flags || wanted || alignment || !size || size % PAGE) return INVALID_VALUE;
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *found = entry ? mmap(NULL, size + PAGE, PROT_NONE, how, -1, 0) : MAP_FAILED;
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    size_t before = -(uintptr_t)found % PAGE;
    if (before) munmap(found, before);
    if (before < PAGE) munmap(found + before + size, PAGE - before);
    *address = (uint64_t)(uintptr_t)found + before;
    *entry = (Range){.at = *address, .size = size};
    return OK;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    ENTER_UNSAFE();
    Handle *memory_of = live(handle);
    Range *within = overlapping(reserved, address, size), *entry = unused(mapped);
    if (!memory_of) return INVALID_HANDLE;
    if (flags || offset || !size || size % PAGE || address % PAGE || size > memory_of->size) return INVALID_VALUE;
    if (!within || address < within->at || address + size > within->at + within->size) return INVALID_VALUE;
    if (overlapping(mapped, address, size)) return INVALID_VALUE;
    void *at = (void *)(uintptr_t)address;
    if (!entry || mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory_of->fd, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    *entry = (Range){.at = address, .size = size, .gpu = memory_of->gpu};
    return OK;
}

int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t count) {
    ENTER_UNSAFE();
    Range *range = entry(mapped, address);
    if (!range || range->size != size || !count) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        int gpu = access[i].location.type == 1 ? gpu_of(access[i].location.id) : -1;
        if (gpu < 0 || (access[i].flags != 0 && access[i].flags != 1 && access[i].flags != 3)) return INVALID_VALUE;
        if (!is_linked(gpu, range->gpu)) return NOT_SUPPORTED;
    }
    int most = 0;
    for (size_t i = 0; i < count; i++) range->access[gpu_of(access[i].location.id)] = (unsigned char)access[i].flags;
    for (int i = 0; i < MAX_GPUS; i++) most |= range->access[i];
    int protection = most == 3 ? PROT_READ | PROT_WRITE : most ? PROT_READ : PROT_NONE;
    return mprotect((void *)(uintptr_t)address, size, protection) ? INVALID_VALUE : OK;
}

int cuMemUnmap(uint64_t address, size_t size) {
    ENTER_UNSAFE();
    Range *range = entry(mapped, address);
    if (!range || range->size != size) return INVALID_VALUE;
    if (is_in_use(address, size)) return INVALID_VALUE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    if (mmap((void *)(uintptr_t)address, size, PROT_NONE, flags, -1, 0) == MAP_FAILED) return INVALID_VALUE;
    range->size = 0;
    return OK;
}

int cuMemAddressFree(uint64_t address, size_t size) {
    ENTER_UNSAFE();
    Range *range = entry(reserved, address);
    if (!range || range->size != size || overlapping(mapped, address, size)) return INVALID_VALUE;
    range->size = 0;
    return munmap((void *)(uintptr_t)address, size) ? INVALID_VALUE : OK;
}

/* For tests: what this process has not given back yet. */
int fakeCudaLeft(const char *what) {
    int count = 0, of_events = !strcmp(what, "events"), is_blocking = !strcmp(what, "blocking streams");
    int of_streams = is_blocking || !strcmp(what, "streams"), of_handles = !strcmp(what, "handles"), of_contexts = !strcmp(what, "contexts");
    Range *table = !strcmp(what, "mappings") ? mapped : !strcmp(what, "reservations") ? reserved
                 : !strcmp(what, "pins") ? pins : NULL;
    for (int i = 1; of_handles && i <= handle_count; i++) count += handles[i].live;
    for (int i = 1; of_events && i < event_count; i++) count += events[i].live;
    for (int i = 3; of_streams && i < stream_count; i++) count += streams[i].live && (!is_blocking || !streams[i].non_blocking);
    for (int i = 0; of_contexts && i < MAX_GPUS; i++) count += retained[i];
    for (int i = 0; table && i < MAX; i++) count += table[i].size != 0;
    return of_handles || of_contexts || of_events || of_streams || table ? count : -1;
}

int cuGetErrorString(int status, const char **text) {
    switch (status) {
    case OUT_OF_MEMORY: *text = "out of memory"; return OK;
    case NO_DEVICE: *text = "no CUDA-capable device is detected"; return OK;
    case INVALID_DEVICE: *text = "invalid device ordinal"; return OK;
    case INVALID_CONTEXT: *text = "invalid device context"; return OK;
    case INVALID_HANDLE: *text = "invalid resource handle"; return OK;
    case ILLEGAL_ADDRESS: *text = "an illegal memory access was encountered"; return OK;
    case ALREADY_REGISTERED: *text = "part or all of the requested memory range is already mapped"; return OK;
    case NOT_REGISTERED: *text = "pointer does not correspond to a registered memory region"; return OK;
    case NOT_PERMITTED: *text = "operation not permitted"; return OK;
    case NOT_SUPPORTED: *text = "operation not supported"; return OK;
    case CAPTURE_UNSUPPORTED: *text = "operation not permitted when stream is capturing"; return OK;
    case CAPTURE_INVALIDATED: *text = "operation failed due to a previous error during capture"; return OK;
    case CAPTURE_IMPLICIT: *text = "operation would make the legacy stream depend on a capturing blocking stream"; return OK;
    }
    *text = "invalid argument";
    return OK;
}
