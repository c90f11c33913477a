/* A CUDA driver without a GPU: what refitd.buffers.cuda calls of libcuda, over memory files.
 *
 * An allocation is a memfd, a mapping an mmap of it, so "device" addresses are addresses of main memory. Memory counts
 * as used while any process has a descriptor or a mapping of it, as the kernel says (/proc). It is stricter than the
 * real driver where refitd could be wrong: no context, a wrong device, a descriptor that is none: an error.
 *
 *   FAKE_CUDA_TAG      one word that tells this machine's "GPUs" from those of other tests
 *   FAKE_CUDA_VISIBLE  numbers of the GPUs this process sees, in its order: "0,1"; unset: none
 *   FAKE_CUDA_BYTES    memory of each GPU
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_SUPPORTED = 801 };
enum { PAGE = 2 << 20, MAX_GPUS = 16, MAX_DEPTH = 64, MAX_FILES = 4096 };

typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *win32; unsigned char flags[8]; } Properties;
typedef struct { Location location; int flags; } Access;
typedef struct { uint64_t magic; int fd, gpu; size_t size; } Handle;

static const uint64_t MAGIC = 0x66616b6563756461ull;
static int retained[MAX_GPUS];
static __thread int stack[MAX_DEPTH], depth;

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

static size_t memory(void) { const char *text = getenv("FAKE_CUDA_BYTES"); return text ? strtoull(text, NULL, 10) : 0; }
static const char *tag(void) { const char *text = getenv("FAKE_CUDA_TAG"); return text ? text : "untagged"; }

/* Whether a link of /proc names an allocation of this tag; which GPU's, and how long. */
static int is_ours(const char *link, int *gpu, size_t *size) {
    char prefix[200];
    snprintf(prefix, sizeof prefix, "/memfd:fake-cuda:%s:", tag());
    size_t n = strlen(prefix);
    return strncmp(link, prefix, n) == 0 && sscanf(link + n, "%d:%zu", gpu, size) == 2;
}

static size_t used(int gpu) {
    static __thread ino_t seen[MAX_FILES];
    int count = 0;
    size_t total = 0;
    DIR *proc = opendir("/proc");
    struct dirent *process;
    while (proc && (process = readdir(proc))) {
        char path[600], link[600], line[1000];
        if (process->d_name[0] < '0' || process->d_name[0] > '9') continue;
        ino_t found[2];
        snprintf(path, sizeof path, "/proc/%s/fd", process->d_name);
        DIR *fds = opendir(path);
        struct dirent *fd;
        snprintf(path, sizeof path, "/proc/%s/maps", process->d_name);
        FILE *maps = fopen(path, "r");
        for (;;) {
            int whose;
            size_t size;
            if (fds && (fd = readdir(fds))) {
                struct stat stat_of;
                snprintf(path, sizeof path, "/proc/%s/fd/%s", process->d_name, fd->d_name);
                ssize_t n = readlink(path, link, sizeof link - 1);
                if (n < 0) continue;
                link[n] = 0;
                if (!is_ours(link, &whose, &size) || stat(path, &stat_of)) continue;
                found[0] = stat_of.st_ino;
            } else if (maps && fgets(line, sizeof line, maps)) {
                char *name = strstr(line, "/memfd:fake-cuda:");
                unsigned long inode;
                if (!name || !is_ours(name, &whose, &size) || sscanf(line, "%*s %*s %*s %*s %lu", &inode) != 1) continue;
                found[0] = inode;
            } else {
                break;
            }
            int known = whose != gpu;
            for (int i = 0; i < count && !known; i++) known = seen[i] == found[0];
            if (!known && count < MAX_FILES) {
                seen[count++] = found[0];
                total += size;
            }
        }
        if (fds) closedir(fds);
        if (maps) fclose(maps);
    }
    if (proc) closedir(proc);
    return total;
}

int cuInit(unsigned flags) { int gpus[MAX_GPUS]; return flags ? INVALID_VALUE : visible(gpus) ? OK : NO_DEVICE; }
int cuDeviceGetCount(int *count) { int gpus[MAX_GPUS]; *count = visible(gpus); return OK; }

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return gpu_of(ordinal) < 0 ? INVALID_DEVICE : OK;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 102 || attribute == 103; /* memory management, descriptors */
    return gpu_of(device) < 0 ? INVALID_DEVICE : OK;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 0xfa, 16);
    uuid[15] = (unsigned char)gpu_of(device);
    return gpu_of(device) < 0 ? INVALID_DEVICE : OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    int gpu = gpu_of(device);
    if (gpu < 0) return INVALID_DEVICE;
    __sync_fetch_and_add(&retained[gpu], 1);
    *context = (void *)(intptr_t)(gpu + 1);
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    int gpu = gpu_of(device);
    if (gpu < 0) return INVALID_DEVICE;
    return __sync_fetch_and_sub(&retained[gpu], 1) > 0 ? OK : INVALID_CONTEXT;
}

int cuCtxPushCurrent_v2(void *context) {
    if (!context || depth == MAX_DEPTH) return INVALID_CONTEXT;
    stack[depth++] = (int)(intptr_t)context;
    return OK;
}

int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = (void *)(intptr_t)stack[--depth];
    return OK;
}

int cuCtxSynchronize(void) { return depth ? OK : INVALID_CONTEXT; }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    if (!depth) return INVALID_CONTEXT;
    size_t taken = used(stack[depth - 1] - 1);
    *total = memory();
    *free_bytes = taken < *total ? *total - taken : 0;
    return OK;
}

int cuMemGetAllocationGranularity(size_t *page, const Properties *properties, int option) {
    *page = PAGE;
    return option || gpu_of(properties->location.id) < 0 ? INVALID_VALUE : OK;
}

int cuMemCreate(Handle **handle, size_t size, const Properties *properties, unsigned long long flags) {
    int gpu = gpu_of(properties->location.id);
    if (gpu < 0) return INVALID_DEVICE;
    if (flags || !size || size % PAGE || properties->type != 1 || properties->handle_types != 1) return INVALID_VALUE;
    if (used(gpu) + size > memory()) return OUT_OF_MEMORY;
    char name[200];
    snprintf(name, sizeof name, "fake-cuda:%s:%d:%zu", tag(), gpu, size);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) {
        if (fd >= 0) close(fd);
        return OUT_OF_MEMORY;
    }
    *handle = malloc(sizeof **handle);
    **handle = (Handle){MAGIC, fd, gpu, size};
    return OK;
}

int cuMemRelease(Handle *handle) {
    if (!handle || handle->magic != MAGIC) return INVALID_HANDLE;
    close(handle->fd);
    handle->magic = 0;
    free(handle);
    return OK;
}

int cuMemExportToShareableHandle(int *fd, Handle *handle, int type, unsigned long long flags) {
    if (!handle || handle->magic != MAGIC) return INVALID_HANDLE;
    if (type != 1 || flags) return INVALID_VALUE;
    *fd = fcntl(handle->fd, F_DUPFD_CLOEXEC, 0);
    return *fd < 0 ? OUT_OF_MEMORY : OK;
}

int cuMemImportFromShareableHandle(Handle **handle, void *descriptor, int type) {
    char path[64], link[600];
    int gpu, fd = (int)(intptr_t)descriptor;
    size_t size;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(path, link, sizeof link - 1);
    if (n < 0 || type != 1) return INVALID_VALUE;
    link[n] = 0;
    if (!is_ours(link, &gpu, &size)) return INVALID_VALUE;
    *handle = malloc(sizeof **handle);
    **handle = (Handle){MAGIC, fcntl(fd, F_DUPFD_CLOEXEC, 0), gpu, size};
    return OK;
}

int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t wanted, unsigned long long flags) {
    if (flags || wanted || alignment || !size || size % PAGE) return INVALID_VALUE;
    void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (uint64_t)(uintptr_t)found;
    return found == MAP_FAILED ? OUT_OF_MEMORY : OK;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, Handle *handle, unsigned long long flags) {
    if (!handle || handle->magic != MAGIC) return INVALID_HANDLE;
    if (flags || offset || size > handle->size || size % PAGE) return INVALID_VALUE;
    void *at = (void *)(uintptr_t)address;
    return mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, 0) == MAP_FAILED ? INVALID_VALUE : OK;
}

int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t count) {
    if (count != 1 || gpu_of(access->location.id) < 0) return INVALID_VALUE;
    /* memory of another GPU would need a link between the two: here it is a mix-up of their numbers */
    char line[1000];
    int whose = -1, known = 0;
    size_t length;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && !known && fgets(line, sizeof line, maps)) {
        char *name = strstr(line, "/memfd:fake-cuda:");
        known = name && strtoull(line, NULL, 16) == address && is_ours(name, &whose, &length);
    }
    if (maps) fclose(maps);
    if (!known) return INVALID_VALUE;
    if (whose != gpu_of(access->location.id)) return NOT_SUPPORTED;
    int protection = access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
    return mprotect((void *)(uintptr_t)address, size, protection) ? INVALID_VALUE : OK;
}

int cuMemUnmap(uint64_t address, size_t size) {
    void *at = (void *)(uintptr_t)address;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    return mmap(at, size, PROT_NONE, flags, -1, 0) == MAP_FAILED ? INVALID_VALUE : OK;
}

int cuMemAddressFree(uint64_t address, size_t size) {
    return munmap((void *)(uintptr_t)address, size) ? INVALID_VALUE : OK;
}

int cuGetErrorString(int status, const char **text) {
    switch (status) {
    case OUT_OF_MEMORY: *text = "out of memory"; return OK;
    case NO_DEVICE: *text = "no CUDA-capable device is detected"; return OK;
    case INVALID_DEVICE: *text = "invalid device ordinal"; return OK;
    case INVALID_CONTEXT: *text = "invalid device context"; return OK;
    case INVALID_HANDLE: *text = "invalid resource handle"; return OK;
    case NOT_SUPPORTED: *text = "operation not supported"; return OK;
    }
    *text = "invalid argument";
    return OK;
}
