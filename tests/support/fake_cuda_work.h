/* The queued work of fake GPUs, their events, and main memory that is pinned for them; included by fake_cuda.c.
 *
 * Work runs as late as is legal: a stream advances only up to an event that is queried for the second time, or that
 * another stream waits for, or to its end when its context is synchronised, the youngest stream first. With
 * FAKE_CUDA_ORDER "others", the first query of an event runs all that no event holds back on all other streams.
 */
enum { FILL, COPY, RECORD, WAIT };
enum { HOST = 1, DEVICE = 2, PORTABLE = 1, READ_ONLY_PIN = 8, MOST_PITCH = 0x7fffffff };

typedef struct {
    size_t src_x, src_y; int src_type; void *src_host; uint64_t src_device; void *src_array; size_t src_pitch;
    size_t dst_x, dst_y; int dst_type; void *dst_host; uint64_t dst_device; void *dst_array; size_t dst_pitch;
    size_t width, height;
} Copy2D;
typedef struct { int kind, gpu; uint64_t stream, at; size_t size; unsigned char value; Copy2D copy; long record; } Work;
typedef struct { int live, gpu, asked; long record; } Event;

static Work *queued;
static int queued_count, queued_room;
static Event events[MAX]; /* an event's handle is its index */
static int event_count = 1, failures[MAX_GPUS]; /* of work: every later call of the context answers it */
static long record_count;
static Range pins[MAX];

static size_t reach(size_t pitch, const Copy2D *c) { return (c->height - 1) * pitch + c->width; }

static int touches(const Work *w, uint64_t at, size_t size) { /* whether queued work uses some of these addresses */
    struct { uint64_t at; size_t size; } ends[2] = {{w->at, w->size}, {0, 0}};
    if (w->kind > COPY) return 0;
    if (w->kind == COPY) {
        ends[0].at = w->copy.src_type == HOST ? (uint64_t)(uintptr_t)w->copy.src_host : w->copy.src_device;
        ends[1].at = w->copy.dst_type == HOST ? (uint64_t)(uintptr_t)w->copy.dst_host : w->copy.dst_device;
        ends[0].size = reach(w->copy.src_pitch, &w->copy), ends[1].size = reach(w->copy.dst_pitch, &w->copy);
    }
    for (int i = 0; i < 2; i++)
        if (ends[i].at < at + size && at < ends[i].at + ends[i].size) return 1;
    return 0;
}

static int is_in_use(uint64_t at, size_t size) {
    for (int i = 0; i < queued_count; i++)
        if (touches(&queued[i], at, size)) return 1;
    return 0;
}

static int may(int gpu, uint64_t at, size_t size, int access) { /* whether a GPU may read (1) or write (3) memory */
    Range *range = overlapping(mapped, at, size);
    if (!range || at < range->at || at + size > range->at + range->size) return 0;
    return (range->access[gpu] & access) == access;
}

static void perform(const Work *w) {
    const Copy2D *c = &w->copy;
    if (w->kind == FILL) {
        if (may(w->gpu, w->at, w->size, 3)) memset((void *)(uintptr_t)w->at, w->value, w->size);
        else failures[w->gpu] = ILLEGAL_ADDRESS;
    } else if (w->kind == COPY) {
        char *from = c->src_type == HOST ? c->src_host : (void *)(uintptr_t)c->src_device;
        char *to = c->dst_type == HOST ? c->dst_host : (void *)(uintptr_t)c->dst_device;
        int is_legal = c->src_type == HOST ? may(w->gpu, c->dst_device, reach(c->dst_pitch, c), 3)
                                           : may(w->gpu, c->src_device, reach(c->src_pitch, c), 1);
        if (!is_legal) failures[w->gpu] = ILLEGAL_ADDRESS;
        for (size_t i = 0; is_legal && i < c->height; i++) memcpy(to + i * c->dst_pitch, from + i * c->src_pitch, c->width);
    }
}

static void run(uint64_t stream, long until) { /* the work of a stream up to this record, or all of it */
    for (int i = 0; i < queued_count; i++) {
        if (queued[i].stream != stream) continue;
        Work work = queued[i];
        memmove(&queued[i], &queued[i + 1], (size_t)(--queued_count - i) * sizeof work);
        if (work.kind == RECORD && work.record == until) return;
        perform(&work);
        for (int j = 0; work.kind == WAIT && j < queued_count; j++)
            if (queued[j].kind == RECORD && queued[j].record == work.record) {
                run(queued[j].stream, work.record);
                break;
            }
        i = -1; /* the other stream's work has left the queue too */
    }
}

static int is_pending(long record) {
    for (int i = 0; i < queued_count; i++)
        if (queued[i].kind == RECORD && queued[i].record == record) return 1;
    return 0;
}

static void run_others(uint64_t stream) {
    char is_blocked[MAX] = {0};
    is_blocked[stream] = 1;
    for (int i = 0; i < queued_count; i++) {
        Work work = queued[i];
        if (work.kind == WAIT && is_pending(work.record)) is_blocked[work.stream] = 1;
        if (is_blocked[work.stream]) continue;
        memmove(&queued[i], &queued[i + 1], (size_t)(--queued_count - i) * sizeof work);
        perform(&work);
        i--;
    }
}

static int add_work(uint64_t stream, Work work) {
    if (!depth) return INVALID_CONTEXT;
    int gpu = stack[depth - 1] - 1;
    if (stream >= (uint64_t)stream_count || (stream > PER_THREAD && (!streams[stream].live || streams[stream].gpu != gpu)))
        return INVALID_HANDLE;
    if (waits_for_capture(stream)) return CAPTURE_IMPLICIT;
    if (streams[stream].capture) return streams[stream].capture == ACTIVE ? OK : CAPTURE_INVALIDATED;
    if (failures[gpu]) return failures[gpu];
    if (queued_count == queued_room) queued = realloc(queued, (size_t)(queued_room += MAX) * sizeof *queued);
    work.stream = stream, work.gpu = gpu;
    queued[queued_count++] = work;
    return OK;
}

int cuMemsetD8Async(uint64_t at, unsigned char value, size_t size, uint64_t stream) {
    ENTER();
    if (!size) return INVALID_VALUE;
    return add_work(stream, (Work){.kind = FILL, .at = at, .size = size, .value = value});
}

/* For tests: what other libraries of this process have queued; a synchronise of any context performs it. */
static void (*others)(void);
void fakeCudaOnSynchronize(void (*work)(void)) { others = work; }

int cuCtxSynchronize(void) {
    ENTER();
    if (!depth) return INVALID_CONTEXT;
    int gpu = stack[depth - 1] - 1, found = 0;
    for (int i = 0; i < stream_count; i++)
        if (streams[i].capture && streams[i].gpu == gpu) streams[i].capture = BROKEN, found = 1;
    if (found) return CAPTURE_UNSUPPORTED; /* in any mode: it would wait for what has not been launched */
    if (others) others();
    for (int i = queued_count - 1; i >= 0; i--)
        if (queued[i].gpu == gpu) run(queued[i].stream, -1), i = queued_count;
    int status = failures[gpu];
    failures[gpu] = OK; /* a real context stays broken; tests go on with this one */
    return status;
}

int cuStreamDestroy_v2(uint64_t stream) {
    ENTER();
    if (stream <= PER_THREAD || stream >= (uint64_t)stream_count || !streams[stream].live) return INVALID_HANDLE;
    for (int i = 0; i < queued_count; i++)
        if (queued[i].stream == stream) return INVALID_VALUE;
    streams[stream].live = 0;
    return OK;
}

static Event *event_of(uint64_t event) {
    return event && event < (uint64_t)event_count && events[event].live ? &events[event] : NULL;
}

int cuEventCreate(uint64_t *event, unsigned flags) {
    ENTER();
    if (!depth) return INVALID_CONTEXT;
    if (flags != 2) return INVALID_VALUE; /* refitd times nothing by events */
    for (int i = 1; i < MAX; i++)
        if (!events[i].live) {
            events[i] = (Event){1, stack[depth - 1] - 1, 0, 0};
            *event = (uint64_t)i;
            event_count = i < event_count ? event_count : i + 1;
            return OK;
        }
    return OUT_OF_MEMORY;
}

int cuEventRecord(uint64_t event, uint64_t stream) {
    ENTER();
    Event *found = event_of(event);
    if (!found || !depth || found->gpu != stack[depth - 1] - 1) return INVALID_HANDLE;
    int status = add_work(stream, (Work){.kind = RECORD, .record = ++record_count});
    if (!status) found->record = record_count, found->asked = 0;
    return status;
}

int cuStreamWaitEvent(uint64_t stream, uint64_t event, unsigned flags) {
    ENTER();
    Event *found = event_of(event);
    if (!found || flags) return INVALID_VALUE;
    return add_work(stream, (Work){.kind = WAIT, .record = found->record});
}

int cuEventQuery(uint64_t event) {
    ENTER();
    Event *found = event_of(event);
    if (!found) return INVALID_HANDLE;
    if (failures[found->gpu]) return failures[found->gpu];
    for (int i = 0; i < queued_count; i++)
        if (queued[i].kind == RECORD && queued[i].record == found->record) {
            if (!found->asked++) {
                if (is("FAKE_CUDA_ORDER", "others")) run_others(queued[i].stream);
                return NOT_READY;
            }
            run(queued[i].stream, found->record);
            break;
        }
    return failures[found->gpu];
}

int cuEventDestroy_v2(uint64_t event) {
    ENTER();
    Event *found = event_of(event);
    if (!found) return INVALID_HANDLE;
    found->live = 0;
    return OK;
}

static int is_accessible(uint64_t at, size_t size, int writes) { /* whether this process has mapped these addresses so */
    FILE *maps = fopen("/proc/self/maps", "r");
    uint64_t reached = at;
    char line[1000];
    while (maps && reached < at + size && fgets(line, sizeof line, maps)) {
        unsigned long first, last;
        char may_read, may_write;
        if (sscanf(line, "%lx-%lx %c%c", &first, &last, &may_read, &may_write) != 4 || last <= reached) continue;
        if (first > reached || may_read != 'r' || (writes && may_write != 'w')) break;
        reached = last;
    }
    if (maps) fclose(maps);
    return reached >= at + size;
}

static void mark(Range *pin, unsigned flags) { /* the contexts that pinned memory is pinned for */
    for (int i = 0; i < MAX_GPUS; i++) pin->access[i] = flags & PORTABLE || i == stack[depth - 1] - 1;
}

int cuMemHostRegister_v2(void *memory_at, size_t size, unsigned flags) {
    ENTER_UNSAFE();
    uint64_t at = (uint64_t)(uintptr_t)memory_at;
    Range *entry = unused(pins);
    if (!depth) return INVALID_CONTEXT;
    if (!size || flags & ~(unsigned)(PORTABLE | READ_ONLY_PIN) || !entry) return INVALID_VALUE;
    if (is("FAKE_CUDA_PINS", "refused")) return NOT_PERMITTED;
    if (flags & READ_ONLY_PIN && is("FAKE_CUDA_PINS", "writable")) return NOT_SUPPORTED;
    if (overlapping(pins, at, size)) return ALREADY_REGISTERED;
    if (!is_accessible(at, size, !(flags & READ_ONLY_PIN))) return INVALID_VALUE;
    *entry = (Range){.at = at, .size = size, .gpu = flags & READ_ONLY_PIN ? -1 : -2};
    mark(entry, flags);
    return OK;
}

int cuMemHostUnregister(void *memory_at) {
    ENTER_UNSAFE();
    Range *found = entry(pins, (uint64_t)(uintptr_t)memory_at);
    if (!found || found->gpu == -3) return NOT_REGISTERED;
    if (is_in_use(found->at, found->size)) return INVALID_VALUE;
    found->size = 0;
    return OK;
}

int cuMemHostAlloc(void **memory_at, size_t size, unsigned flags) {
    ENTER_UNSAFE();
    Range *entry = unused(pins);
    if (!depth) return INVALID_CONTEXT;
    if (!size || flags & ~(unsigned)PORTABLE || !entry) return INVALID_VALUE;
    *memory_at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*memory_at == MAP_FAILED) return OUT_OF_MEMORY;
    memset(*memory_at, 0xdd, size < 1 << 16 ? size : 1 << 16); /* stale bytes must not look like zeros */
    *entry = (Range){.at = (uint64_t)(uintptr_t)*memory_at, .size = size, .gpu = -3};
    mark(entry, flags);
    return OK;
}

int cuMemFreeHost(void *memory_at) {
    ENTER_UNSAFE();
    Range *found = entry(pins, (uint64_t)(uintptr_t)memory_at);
    if (!found || found->gpu != -3 || is_in_use(found->at, found->size)) return INVALID_VALUE;
    size_t size = found->size;
    found->size = 0;
    return munmap(memory_at, size) ? INVALID_VALUE : OK;
}

static int is_pinned(void *memory_at, size_t size, int writes) {
    uint64_t at = (uint64_t)(uintptr_t)memory_at;
    Range *pin = overlapping(pins, at, size);
    if (!pin || !depth || !pin->access[stack[depth - 1] - 1]) return 0;
    return at >= pin->at && at + size <= pin->at + pin->size && !(writes && pin->gpu == -1);
}

int cuMemcpy2DAsync_v2(const Copy2D *c, uint64_t stream) {
    ENTER();
    if (c->src_x || c->src_y || c->dst_x || c->dst_y || !c->width || !c->height) return INVALID_VALUE;
    if (c->src_pitch < c->width || c->dst_pitch < c->width) return INVALID_VALUE;
    if (c->height > 1 && (c->src_pitch > MOST_PITCH || c->dst_pitch > MOST_PITCH)) return INVALID_VALUE;
    if (c->src_type + c->dst_type != HOST + DEVICE || c->src_type < HOST || c->dst_type < HOST) return INVALID_VALUE;
    if (c->src_type == HOST && !is_pinned(c->src_host, reach(c->src_pitch, c), 0)) return INVALID_VALUE;
    if (c->dst_type == HOST && !is_pinned(c->dst_host, reach(c->dst_pitch, c), 1)) return INVALID_VALUE;
    return add_work(stream, (Work){.kind = COPY, .copy = *c});
}

/* For tests: the access that a GPU has at an address. */
int fakeCudaMay(int gpu, uint64_t at) { return may(gpu, at, 1, 3) ? 3 : may(gpu, at, 1, 1); }
