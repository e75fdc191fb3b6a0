/* A double of NVIDIA's driver library, for machines without a GPU.
 *
 * "Device memory" is host memory. Work that is put into a stream is done later, by the thread that queries it: an event is
 * reached once it has been asked for as often as DOUBLE_POLLS says (default 3), and only then are the bytes of all that
 * was put into its stream before it moved. So code that reads a destination too early, or releases a source too early,
 * finds wrong bytes. The copy kernel is carried out from its descriptions, as the one on the device does.
 *
 * DOUBLE_FAULT makes one thing fail: "init" (no device can be used), "none" (no device), "register" (no memory can be
 * pinned), "alloc" (no device memory), "checksum" (the checksum kernel cannot be loaded), "export" (no dma-buf of device
 * memory), "flush" (writes of other devices cannot be flushed).
 * DOUBLE_ORDERING is what the device says of the order of others' writes (default 0: none, they must be flushed; 100: they
 * are seen by their owner as they come). A dma-buf of it is a file that holds the address and the length of its memory,
 * for the double of libibverbs.
 * DOUBLE_DEVICES is the number of devices (default 1). A stream copies to and from memory of its own device only.
 * Device memory can be mapped by other processes that have the double, once in each. DOUBLE_FAULT "ipc" makes it memory of
 * which there is no handle, and "close" lets no unmapping of it end.
 * double_stop(e) makes the device stop with this error, as an illegal access by any kernel does; with 0 it works again.
 * Of several devices, all stop, or after double_stops(d) this one.
 * double_allow(n) lets n more events be reached, and none after them until it is called again.
 * double_doubt(n) lets the next n queries fail, and nothing else; of -1 says how many of those have not failed yet.
 * double_capture(1) begins a capture of a stream in global mode by no thread of its own: calls that such a capture forbids
 * fail on threads that have not chosen the relaxed mode, and end it. double_capture(0) ends it, and gives 1 if none had.
 * double_refuse(n) lets the next n launches of kernels be refused.
 * double_pins() is the number of times that memory was pinned or unpinned. double_repinned() is how often it was
 * pinned already. double_inherited() forks, and says of how many
 * pinned ranges the child has a part, or -1 if none is pinned.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NOT_READY = 600, ALREADY_PINNED = 712,
       ILLEGAL_ADDRESS = 700, OUT_OF_RESOURCES = 701, NOT_FOUND = 500, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, OPERATING_SYSTEM = 304, INVALID_CONTEXT = 201,
       ALREADY_MAPPED = 208, INVALID_HANDLE = 400 };
enum { DEVICE_ORDINAL = 9, FLUSH_OPTIONS = 117, WRITES_ORDERING = 118, DMA_BUF = 124, DMA_BUF_FD = 1, CURRENT_CONTEXT = 0, TO_OWNER = 100,
       ALLOCATIONS = 256, PAGE = 4096, LARGE_PAGE = 65536 };

typedef struct { uint64_t address, bytes, after; } piece;
/* A copy; or sums of `len` pieces; or the value `len` `writes` to the word at `dst`; or, with no destination, the wait
 * until the word at `src` has reached the value `len`. */
typedef struct work { struct work *next; void *dst; const void *src; size_t len; const piece *pieces; int writes; } work;
typedef struct stream { work *first, **last; int device, writes; struct stream *next; } stream;
typedef struct { stream *marked; work *upto; int asked, recorded, reached; } event;
typedef struct { uint64_t src, dst, len; } tile;

/* `dead` is the error that the devices, or the one that stops, have stopped with. */
static int polls = 3, dead, stopping = -1;
static int dead_of(int device) { return stopping < 0 || stopping == device ? __atomic_load_n(&dead, __ATOMIC_SEQ_CST) : 0; }
static uint64_t launches;

uint64_t double_checksum_launches(void) { return launches; }

/* Events that may still be reached. */
static int allowed = INT_MAX;

int double_stops(int device) { return stopping = device; }
int double_stop(int error) { __atomic_store_n(&dead, error, __ATOMIC_SEQ_CST); return error; }
void double_allow(int n) { __atomic_store_n(&allowed, n, __ATOMIC_SEQ_CST); }

/* Queries that still fail, although the device works on. */
static int doubts;
int double_doubt(int n) {
    if (n >= 0) __atomic_store_n(&doubts, n, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&doubts, __ATOMIC_SEQ_CST);
}
static int is_doubted(void) {
    int n = __atomic_load_n(&doubts, __ATOMIC_SEQ_CST);
    while (n > 0 && !__atomic_compare_exchange_n(&doubts, &n, n - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
    return n > 0;
}

static int is_fault(const char *name) {
    const char *fault = getenv("DOUBLE_FAULT");
    return fault && strcmp(fault, name) == 0;
}

static int device_of(uint64_t p);

/* A capture of a stream, and what this thread has chosen to be forbidden by one: all (0), or nothing (2). */
enum { RELAXED = 2 };
static int captures, invalidated;
static __thread int capture_mode;
int double_capture(int begins) {
    __atomic_store_n(&captures, begins, __ATOMIC_SEQ_CST);
    int was_invalidated = __atomic_exchange_n(&invalidated, 0, __ATOMIC_SEQ_CST);
    return !was_invalidated;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}
static int is_forbidden(void) {
    if (!__atomic_load_n(&captures, __ATOMIC_SEQ_CST) || capture_mode == RELAXED) return 0;
    __atomic_store_n(&invalidated, 1, __ATOMIC_SEQ_CST);
    return 1;
}

/* Streams and events, which any thread may use. */
static pthread_mutex_t streams_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static void lock(void) { pthread_mutex_lock(&streams_lock); }
static void unlock(void) { pthread_mutex_unlock(&streams_lock); }

static int put(stream *s, uint64_t dst, uint64_t src, size_t len) {
    if (dead_of(s->device)) return dead;
    int from = device_of(src), to = device_of(dst);
    if ((dst && from >= 0 && from != s->device) || (to >= 0 && to != s->device)) return INVALID_VALUE;
    work *w = malloc(sizeof *w);
    *w = (work){ NULL, (void *)dst, (const void *)src, len, NULL, 0 };
    lock();
    *s->last = w;
    s->last = &w->next;
    unlock();
    return SUCCESS;
}

/* CRC-64/NVME bit by bit, without initial value and final inversion, and the product of its field. */
static uint64_t crc_of(const unsigned char *p, size_t n) {
    static uint64_t table[256];
    if (!table[1])
        for (unsigned v = 0; v < 256; v++) {
            uint64_t a = v;
            for (int bit = 0; bit < 8; bit++) a = (a >> 1) ^ (0x9A6C9329AC4BC9B5ull & (0 - (a & 1)));
            table[v] = a;
        }
    uint64_t crc = 0;
    while (n--) crc = (crc >> 8) ^ table[(crc ^ *p++) & 255];
    return crc;
}
static uint64_t product_of(uint64_t a, uint64_t b) {
    uint64_t product = 0;
    for (int bit = 63; bit >= 0; bit--) {
        if (a >> bit & 1) product ^= b;
        b = (b >> 1) ^ (0x9A6C9329AC4BC9B5ull & (0 - (b & 1)));
    }
    return product;
}
static void sum_up(uint64_t *sums, const piece *pieces, size_t count) {
    for (size_t i = 0; i < count; i++)
        sums[i] = product_of(crc_of((const unsigned char *)pieces[i].address, pieces[i].bytes), pieces[i].after);
}

static int is_open(const work *w) {
    return (int32_t)(__atomic_load_n((const uint32_t *)w->src, __ATOMIC_ACQUIRE) - (uint32_t)w->len) >= 0;
}

/* Does what is in the stream, up to and with `upto`, all of it for NULL, or up to a wait. */
static void run(stream *s, work *upto) {
    int reached = 0;
    lock();
    while (s->first && !reached) {
        work *w = s->first;
        if (w->writes) { __atomic_store_n((uint32_t *)w->dst, (uint32_t)w->len, __ATOMIC_RELEASE); s->writes--; }
        else if (w->pieces) sum_up(w->dst, w->pieces, w->len);
        else if (w->dst) memcpy(w->dst, w->src, w->len);
        else if (!is_open(w)) break;
        s->first = w->next;
        if (!s->first) s->last = &s->first;
        reached = w == upto;
        free(w);
    }
    unlock();
}

int cuInit(unsigned flags) {
    (void)flags;
    const char *often = getenv("DOUBLE_POLLS");
    if (often) polls = atoi(often);
    return is_fault("init") ? OPERATING_SYSTEM : SUCCESS;
}
int cuDriverGetVersion(int *v) { *v = 13000; return SUCCESS; }
int cuGetErrorName(int e, const char **s) { *s = e == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OF_THE_DOUBLE"; return SUCCESS; }
int cuGetErrorString(int e, const char **s) { static char text[32]; snprintf(text, sizeof text, "error %d", e); *s = text; return SUCCESS; }
static int devices(void) { const char *value = getenv("DOUBLE_DEVICES"); return value ? atoi(value) : 1; }
int cuDeviceGetCount(int *n) { *n = is_fault("none") ? 0 : devices(); return SUCCESS; }
int cuDeviceGet(int *d, int ordinal) { *d = ordinal; return ordinal < devices() ? SUCCESS : NO_DEVICE; }
int cuDeviceGetName(char *s, int n, int d) { (void)d; snprintf(s, n, "double"); return SUCCESS; }
int cuDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:00:%02x.0", d); return SUCCESS; }
int cuDeviceTotalMem_v2(size_t *n, int d) { (void)d; *n = 1ul << 30; return SUCCESS; }
static int ordering(void) { const char *value = getenv("DOUBLE_ORDERING"); return value ? atoi(value) : 0; }
int cuDeviceGetAttribute(int *v, int which, int d) {
    (void)d;
    switch (which) {
    case WRITES_ORDERING: *v = ordering(); break;
    case FLUSH_OPTIONS: *v = !is_fault("flush"); break;
    case DMA_BUF: *v = !is_fault("export"); break;
    default: *v = 1;
    }
    return SUCCESS;
}
/* The contexts of this thread, the current one on top; the first is none. A context is 1 more than its device. */
enum { CONTEXTS = 16 };
static __thread void *contexts[CONTEXTS];
static __thread int top;
static int current(void) { return contexts[top] ? (int)(uint64_t)contexts[top] - 1 : 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(uint64_t)(1 + d); return SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; return SUCCESS; }
int cuCtxSetCurrent(void *c) { contexts[top] = c; return SUCCESS; }
int cuCtxGetCurrent(void **c) { *c = contexts[top]; return SUCCESS; }
int cuCtxPushCurrent_v2(void *c) {
    if (top + 1 == CONTEXTS) abort();
    contexts[++top] = c;
    return SUCCESS;
}
int cuCtxPopCurrent_v2(void **c) {
    if (top == 0) return INVALID_CONTEXT;
    *c = contexts[top--];
    return SUCCESS;
}
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = *total = 1ul << 30; return SUCCESS; }
/* What other processes map a memory by. */
typedef struct { int pid, fd; uint64_t bytes, serial; } origin;
typedef struct { char bytes[64]; } handle;
/* Device memory that has been given out, and that of other processes: `origin.pid` is 0 for the first. */
static pthread_mutex_t allocations_lock = PTHREAD_MUTEX_INITIALIZER;
static struct { uint64_t start, bytes; origin origin; int device; } allocations[ALLOCATIONS];

int cuDeviceGetUuid_v2(unsigned char *uuid, int d) { memcpy(uuid, "the double's GPU", 16); uuid[15] = d; return SUCCESS; }
/* -1 for host memory. */
static int device_of(uint64_t p) {
    int device = -1;
    pthread_mutex_lock(&allocations_lock);
    for (int i = 0; i < ALLOCATIONS; i++)
        if (allocations[i].bytes && p >= allocations[i].start && p < allocations[i].start + allocations[i].bytes)
            device = allocations[i].device;
    pthread_mutex_unlock(&allocations_lock);
    return device;
}
int cuPointerGetAttribute(int *value, int which, uint64_t p) {
    if (which != DEVICE_ORDINAL || (*value = device_of(p)) < 0) return INVALID_VALUE;
    return SUCCESS;
}

/* Maps a file at an address that is a multiple of a large page. */
static uint64_t map_file(int fd, size_t n) {
    char *room = mmap(NULL, n + LARGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) return 0;
    char *start = (char *)(((uint64_t)room + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE);
    if (mmap(start, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) abort();
    if (start > room) munmap(room, start - room);
    if (start + n < room + n + LARGE_PAGE) munmap(start + n, room + LARGE_PAGE - start);
    return (uint64_t)start;
}
static void add(uint64_t start, uint64_t bytes, origin from) {
    int at = 0;
    while (at < ALLOCATIONS && allocations[at].bytes) at++;
    if (at == ALLOCATIONS) abort();
    allocations[at].start = start;
    allocations[at].bytes = bytes;
    allocations[at].origin = from;
    allocations[at].device = current();
}
/* Takes out what begins there: 0 if that is nothing. The lock is held. */
static int take(uint64_t start, int imported) {
    for (int i = 0; i < ALLOCATIONS; i++)
        if (allocations[i].bytes && allocations[i].start == start && !!allocations[i].origin.pid == imported) {
            munmap((void *)start, allocations[i].bytes);
            if (!imported) close(allocations[i].origin.fd);
            allocations[i].start = allocations[i].bytes = 0;
            return 1;
        }
    return 0;
}
int cuMemGetAddressRange_v2(uint64_t *start, size_t *bytes, uint64_t p) {
    int found = INVALID_VALUE;
    pthread_mutex_lock(&allocations_lock);
    for (int i = 0; i < ALLOCATIONS; i++)
        if (allocations[i].bytes && p >= allocations[i].start && p < allocations[i].start + allocations[i].bytes) {
            *start = allocations[i].start;
            *bytes = allocations[i].bytes;
            found = SUCCESS;
        }
    pthread_mutex_unlock(&allocations_lock);
    return found;
}
int cuIpcGetMemHandle(handle *h, uint64_t p) {
    int found = INVALID_VALUE;
    pthread_mutex_lock(&allocations_lock);
    for (int i = 0; i < ALLOCATIONS && !is_fault("ipc"); i++)
        if (allocations[i].bytes && allocations[i].start == p && !allocations[i].origin.pid) {
            origin from = allocations[i].origin;
            from.pid = getpid();
            memset(h, 0, sizeof *h);
            memcpy(h, &from, sizeof from);
            found = SUCCESS;
        }
    pthread_mutex_unlock(&allocations_lock);
    return found;
}
int cuIpcOpenMemHandle_v2(uint64_t *p, handle h, unsigned flags) {
    origin from;
    memcpy(&from, &h, sizeof from);
    if (flags != 1) return INVALID_VALUE;
    if (from.pid == getpid()) return INVALID_CONTEXT;
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/fd/%d", from.pid, from.fd);
    int found = SUCCESS, fd = open(name, O_RDWR | O_CLOEXEC);
    if (fd < 0) return INVALID_HANDLE;
    pthread_mutex_lock(&allocations_lock);
    for (int i = 0; i < ALLOCATIONS; i++)
        if (allocations[i].bytes && memcmp(&allocations[i].origin, &from, sizeof from) == 0) found = ALREADY_MAPPED;
    if (found == SUCCESS) add(*p = map_file(fd, from.bytes), from.bytes, from);
    pthread_mutex_unlock(&allocations_lock);
    close(fd);
    return found;
}
int cuIpcCloseMemHandle(uint64_t p) {
    while (is_fault("close")) pause();
    pthread_mutex_lock(&allocations_lock);
    int found = take(p, 1) ? SUCCESS : INVALID_VALUE;
    pthread_mutex_unlock(&allocations_lock);
    return found;
}

/* True if all of a range lies in one piece of it. */
int double_is_device(uint64_t p, size_t n) {
    int found = 0;
    pthread_mutex_lock(&allocations_lock);
    for (int i = 0; i < ALLOCATIONS; i++)
        found |= allocations[i].bytes && p >= allocations[i].start && p + n <= allocations[i].start + allocations[i].bytes;
    pthread_mutex_unlock(&allocations_lock);
    return found;
}
int double_needs_flush(void) { return ordering() < TO_OWNER; }
int cuMemAlloc_v2(uint64_t *p, size_t n) {
    static uint64_t serial;
    if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    /* Whole pages of the device, as its own memory is. */
    n = (n + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    int fd = memfd_create("memory of the double", MFD_CLOEXEC);
    if (is_fault("alloc") || fd < 0 || ftruncate(fd, n)) return OUT_OF_MEMORY;
    pthread_mutex_lock(&allocations_lock);
    *p = map_file(fd, n);
    memset((void *)*p, 0xdd, n);
    add(*p, n, (origin){ 0, fd, n, ++serial });
    pthread_mutex_unlock(&allocations_lock);
    return SUCCESS;
}
int cuMemFree_v2(uint64_t p) {
    if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&allocations_lock);
    take(p, 0);
    pthread_mutex_unlock(&allocations_lock);
    return SUCCESS;
}
int cuMemGetHandleForAddressRange(void *handle, uint64_t p, size_t n, int type, unsigned long long flags) {
    uint64_t range[2] = { p, n };
    if (is_fault("export")) return NOT_SUPPORTED;
    if (type != DMA_BUF_FD || (flags & ~1ull) || n == 0 || p % PAGE || n % PAGE || !double_is_device(p, n)) return INVALID_VALUE;
    int fd = memfd_create("dma-buf of the double", MFD_CLOEXEC);
    if (fd < 0 || pwrite(fd, range, sizeof range, 0) != sizeof range) return OPERATING_SYSTEM;
    *(int *)handle = fd;
    return SUCCESS;
}
/* What the double of libibverbs has written to device memory is there only now. */
int cuFlushGPUDirectRDMAWrites(int target, int scope) {
    if (is_fault("flush")) return NOT_SUPPORTED;
    if (target != CURRENT_CONTEXT || scope < TO_OWNER) return INVALID_VALUE;
    void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);
    void (*flush)(void) = library ? (void (*)(void))dlsym(library, "ibv_double_flush") : NULL;
    if (flush) flush();
    return SUCCESS;
}
static int pins;
int double_pins(void) { return __atomic_load_n(&pins, __ATOMIC_SEQ_CST); }
enum { RANGES = 4096 };
static int repinned;
int double_repinned(void) { return repinned; }
static struct { char *start; size_t bytes; } ranges[RANGES];
/* The range that begins there, or one that is free for NULL. */
static int range_at(void *p) {
    int at = 0;
    while (at < RANGES && ranges[at].start != p) at++;
    return at;
}
int cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
    (void)flags;
    if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    __atomic_fetch_add(&pins, 1, __ATOMIC_SEQ_CST);
    if (is_fault("register")) return OUT_OF_MEMORY;
    lock();
    int is_new = range_at(p) == RANGES, at = range_at(NULL);
    if (at == RANGES) abort();
    if (is_new) { ranges[at].start = p; ranges[at].bytes = n; }
    repinned += !is_new;
    unlock();
    return is_new ? SUCCESS : ALREADY_PINNED;
}
int double_inherited(void) {
    int pinned = 0, found = 0;
    for (int i = 0; i < RANGES; i++) pinned += ranges[i].start != NULL;
    pid_t child = pinned ? fork() : -1;
    if (child < 0) return -1;
    if (child == 0) {
        unsigned char is_there;
        for (int i = 0; i < RANGES; i++)
            for (size_t at = 0; at < ranges[i].bytes; at += PAGE)
                if (mincore(ranges[i].start + at, 1, &is_there) == 0) { found++; break; }
        _exit(found < 255 ? found : 255);
    }
    return waitpid(child, &found, 0) == child && WIFEXITED(found) ? WEXITSTATUS(found) : -1;
}
int cuMemAllocHost_v2(void **p, size_t n) {
    if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    return posix_memalign(p, PAGE, n) ? OUT_OF_MEMORY : SUCCESS;
}
int cuMemFreeHost(void *p) { free(p); return SUCCESS; }
int cuMemHostUnregister(void *p) {
    if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    __atomic_fetch_add(&pins, 1, __ATOMIC_SEQ_CST);
    lock();
    int at = range_at(p), is_pinned = at < RANGES;
    if (is_pinned) { ranges[at].start = NULL; ranges[at].bytes = 0; }
    unlock();
    return is_pinned ? SUCCESS : INVALID_VALUE;
}
int cuMemHostGetDevicePointer_v2(uint64_t *d, void *p, unsigned flags) { (void)flags; *d = (uint64_t)p; return SUCCESS; }
/* All streams. What is behind a value that a stream is to write is done a while later: nobody asks for it. */
static stream *streams;
static void *later(void *arg) {
    for (;; usleep(200)) {
        lock();
        for (stream *s = streams; s; s = s->next) if (s->writes) run(s, NULL);
        unlock();
    }
    return arg;
}
int cuStreamCreateWithPriority(stream **s, unsigned flags, int priority) {
    (void)flags; (void)priority;
    *s = calloc(1, sizeof **s);
    (*s)->last = &(*s)->first;
    (*s)->device = current();
    lock();
    (*s)->next = streams;
    streams = *s;
    unlock();
    return SUCCESS;
}
int cuStreamDestroy_v2(stream *s) {
    lock();
    stream **at = &streams;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    run(s, NULL);
    unlock();
    free(s);
    return SUCCESS;
}
int cuStreamSynchronize(stream *s) {
    if (is_forbidden() || is_doubted()) return CAPTURE_UNSUPPORTED;
    /* What is put into the stream without a name is done at once. */
    int device = s ? s->device : current();
    while (s && !dead_of(device) && (run(s, NULL), s->first)) sched_yield();
    return dead_of(device);
}
int cuStreamQuery(stream *s) {
    if (dead_of(s->device)) return dead;
    if (is_forbidden() || is_doubted()) return CAPTURE_UNSUPPORTED;
    run(s, NULL);
    return s->first ? NOT_READY : SUCCESS;
}
int cuStreamWaitValue32_v2(stream *s, uint64_t address, uint32_t value, unsigned flags) {
    return flags == 0 ? put(s, 0, address, value) : INVALID_VALUE;
}
int cuEventCreate(event **e, unsigned flags) { (void)flags; *e = calloc(1, sizeof **e); return SUCCESS; }
int cuEventDestroy_v2(event *e) { free(e); return SUCCESS; }
int cuEventRecord(event *e, stream *s) {
    work *last = NULL;
    lock();
    for (work *w = s->first; w; w = w->next) last = w;
    unlock();
    *e = (event){ s, last, 0, 1, 0 };
    return dead_of(s->device);
}
int cuEventQuery(event *e) {
    if (dead_of(e->marked ? e->marked->device : current())) return dead;
    if (is_forbidden() || is_doubted()) return CAPTURE_UNSUPPORTED;
    if (e->recorded && ++e->asked < polls) return NOT_READY;
    if (e->recorded && !e->reached && __atomic_load_n(&allowed, __ATOMIC_SEQ_CST) <= 0) return NOT_READY;
    if (e->recorded && !e->reached) __atomic_fetch_sub(&allowed, 1, __ATOMIC_SEQ_CST);
    e->reached = 1;
    if (e->recorded && e->upto) {
        /* It may have been done by a later event of the stream. */
        lock();
        for (work *w = e->marked->first; w; w = w->next)
            if (w == e->upto) { run(e->marked, e->upto); break; }
        unlock();
    }
    e->upto = NULL;
    return SUCCESS;
}
int cuEventSynchronize(event *e) {
    int found;
    while ((found = cuEventQuery(e)) == NOT_READY) sched_yield();
    return found;
}
int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t n, stream *s) { return put(s, dst, src, n); }
int cuMemcpyHtoDAsync_v2(uint64_t dst, const void *src, size_t n, stream *s) { return put(s, dst, (uint64_t)src, n); }
int cuMemcpyDtoHAsync_v2(void *dst, uint64_t src, size_t n, stream *s) { return put(s, (uint64_t)dst, src, n); }
int cuMemcpyBatchAsync_v2(uint64_t *dsts, uint64_t *srcs, size_t *lens, size_t n, void *attrs, size_t *first, size_t n_attrs, stream *s) {
    (void)attrs;
    if (n == 0 || n_attrs != 1 || first[0] != 0) return INVALID_VALUE;
    for (size_t i = 0; i < n; i++) {
        int result = put(s, dsts[i], srcs[i], lens[i]);
        if (result) return result;
    }
    return SUCCESS;
}
int cuStreamCreate(stream **s, unsigned flags) { return cuStreamCreateWithPriority(s, flags, 0); }
/* These are done at once: their results are awaited without the driver. */
int cuMemcpyHtoD_v2(uint64_t dst, const void *src, size_t n) { memcpy((void *)dst, src, n); return SUCCESS; }
int cuMemcpyDtoH_v2(void *dst, uint64_t src, size_t n) { memcpy(dst, (const void *)src, n); return SUCCESS; }
int cuMemsetD8_v2(uint64_t dst, unsigned char byte, size_t n) { memset((void *)dst, byte, n); return SUCCESS; }
int cuStreamWriteValue32_v2(stream *s, uint64_t address, uint32_t value, unsigned flags) {
    static pthread_t thread;
    if (flags) return INVALID_VALUE;
    lock();
    int result = put(s, address, 0, value);
    if (result == SUCCESS) ((work *)((char *)s->last - offsetof(work, next)))->writes = 1, s->writes++;
    if (result == SUCCESS && !thread) pthread_create(&thread, NULL, later, NULL);
    unlock();
    return result;
}
int cuLaunchHostFunc(stream *s, void (*f)(void *), void *arg) { run(s, NULL); f(arg); return SUCCESS; }
int cuModuleLoadData(void **m, const void *image) {
    int copy = strstr(image, ".entry kvhoist_copy(") != NULL, checksum = strstr(image, ".entry kvhoist_checksum(") != NULL;
    *m = (void *)(uint64_t)(copy ? 1 : 2);
    return copy || (checksum && !is_fault("checksum")) ? SUCCESS : INVALID_VALUE;
}
int cuModuleUnload(void *m) { (void)m; return SUCCESS; }
int cuModuleGetFunction(void **f, void *m, const char *name) {
    *f = m;
    return strcmp(name, m == (void *)1 ? "kvhoist_copy" : "kvhoist_checksum") ? NOT_FOUND : SUCCESS;
}
static int refusals;
int double_refuse(int n) { return refusals = n; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, stream *s, void **params, void **extra) {
    (void)gy; (void)gz; (void)by; (void)bz; (void)shared; (void)extra;
    if (refusals > 0) { refusals--; return OUT_OF_RESOURCES; }
    if (f == (void *)2) {
        if (gx == 0 || bx != 256) return INVALID_VALUE;
        const piece *pieces = *(const piece **)params[0];
        for (unsigned i = 0; i < *(unsigned *)params[1]; i++)
            if (pieces[i].address % 16 || pieces[i].bytes % 512) return INVALID_VALUE;
        int at = device_of(pieces[0].address);
        if (at >= 0 && at != s->device) return INVALID_VALUE;
        lock();
        int result = put(s, *(uint64_t *)params[2], 0, *(unsigned *)params[1]);
        if (result == SUCCESS) ((work *)((char *)s->last - offsetof(work, next)))->pieces = pieces;
        if (result == SUCCESS) launches++;
        unlock();
        return result;
    }
    const tile *tiles = *(const tile **)params[0];
    unsigned count = *(unsigned *)params[1];
    if (gx == 0 || bx != 512) return INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        int result = put(s, tiles[i].dst, tiles[i].src, tiles[i].len);
        if (result) return result;
    }
    return SUCCESS;
}
