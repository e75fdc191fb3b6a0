/* A double of NVIDIA's libcufile, over the double of the driver whose device memory is host memory.
 *
 * A transfer of a batch takes effect late: when GetStatus has been asked DOUBLE_POLLS times (default 3), and only then
 * are its bytes moved. Code that reads the destination too early, gives the memory away too early, or takes a short event
 * for a whole one, finds wrong bytes. What the real library punishes with a lost completion or a hang ends the process
 * here: more transfers than the batch was set up for, a batch of more than 64 in compat mode, a handle or a buffer that
 * is forgotten while it is in use.
 *
 * Files must be open with O_DIRECT (5020) and without O_NOFOLLOW (5019), as for the real one.
 *
 * CUFILE_DOUBLE says how it behaves:
 *   direct    as nvidia-fs does: the statistics count n_nvfs_reads
 *   p2p       the same by PCI peer-to-peer
 *   compat    as without either: n_posix_reads
 *   record    handles cannot be registered: 5027
 *   short     every transfer of a batch of more than 4 KiB first moves 4 KiB and a bit
 *   ends      a transfer of a batch moves nothing, and says that it is complete
 *   wrong     a read by a batch ends well, with one bit wrong
 *   liar      a read by cuFileRead ends well, and moves nothing
 *   others    the first cuFileRead is counted with another one of the process
 *   layout    its statistics count other bytes than are read
 *   stuck     the first cuFileRead does not come back before cufile_double_release()
 *   refuses   every cuFileRead fails
 *   parts     a cuFileRead of more than 4 KiB moves 4 KiB and a bit at first, and every fifth fails
 *   event     every transfer of a batch fails
 *   once      the first three transfers of a batch fail, but not in a row
 *   submit    a batch is submitted alone or not at all
 *   hang      no transfer of a batch ends before cufile_double_release()
 *   hangwrite no write does
 *   cookie    an event that belongs to nothing
 *   status    GetStatus fails for ever
 *   open      cuFileDriverOpen does not come back before cufile_double_release()
 *   register  neither does cuFileHandleRegister
 *   exit      it comes back only while the process exits
 *   pinning   no device memory can be registered
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct { int err, cuda; } result;
typedef struct { int type; union { int fd; void *handle; } u; const void *ops; } description;
typedef struct { int mode; void *base; long file_offset, base_offset; size_t size; void *file; int op; void *cookie; } entry;
typedef struct { void *cookie; int status; size_t bytes; } event;
typedef struct { int fd, uses; } handle;
typedef struct { unsigned nr; } batch;
typedef struct { entry e; int asked; } flight;

enum { READ = 0, COMPLETE = 16, FAILED = 64, CAPACITY = 8, BUFFERS = 4096 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static int is_released, opened, counting, in_flight, handles, writable, unanswered, failed, asked_reads;
static uint64_t read_bytes, reads_direct, reads_posix, writes_direct, writes_posix, batches, most_in_flight;
static flight flights[CAPACITY];
static struct { uint64_t start, bytes; } buffers[BUFFERS];
static int buffer_count;

static void die(const char *why) { fprintf(stderr, "the double of libcufile: %s\n", why); abort(); }
static int is(const char *mode) { const char *m = getenv("CUFILE_DOUBLE"); return m && strcmp(m, mode) == 0; }
static result ok(void) { return (result){ 0, 0 }; }
static result fail(int err) { return (result){ err, 0 }; }
static void wait_released(void) {
    pthread_mutex_lock(&lock);
    while (!is_released) pthread_cond_wait(&released, &lock);
    pthread_mutex_unlock(&lock);
}

/* What tests ask. */
void cufile_double_release(void) {
    pthread_mutex_lock(&lock);
    is_released = 1;
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&lock);
}
uint64_t cufile_double_batches(void) { return batches; }
uint64_t cufile_double_most_in_flight(void) { return most_in_flight; }
uint64_t cufile_double_asked_reads(void) { return __atomic_load_n(&asked_reads, __ATOMIC_RELAXED); }
uint64_t cufile_double_direct(void) { return reads_direct; }
uint64_t cufile_double_direct_writes(void) { return writes_direct; }
uint64_t cufile_double_posix(void) { return reads_posix; }
uint64_t cufile_double_buffers(void) { return buffer_count; }
uint64_t cufile_double_handles(void) { return handles; }
uint64_t cufile_double_writable(void) { return writable; }
uint64_t cufile_double_in_flight(void) { return in_flight; }

result cuFileGetVersion(int *v) { *v = 1150; return ok(); }
result cuFileDriverOpen(void) {
    if (is("open")) wait_released();
    if (opened++) die("opened twice");
    return ok();
}
result cuFileDriverGetProperties(unsigned *p) {
    /* 8 bytes of version, two sizes, then flags: the size of a batch stands at byte 48. */
    *(size_t *)((char *)p + 16) = 16384;
    p[0] = is("compat") ? 0 : 2;
    p[12] = CAPACITY;
    return ok();
}
result cuFileSetStatsLevel(int level) { return level == 3 ? ok() : fail(5022); }
static int counted;
result cuFileStatsStart(void) { if (counted) abort(); counting = counted = 1; return ok(); }
result cuFileStatsStop(void) { counting = 0; return ok(); }
/* As NVIDIA's does, which does not stand a second beginning either. */
__attribute__((destructor)) static void end(void) {
    if (is("exit")) {
        cufile_double_release();
        usleep(300 * 1000); /* Time for the thread that comes back. */
    }
    if (counting) abort();
}
#ifndef NO_STATISTICS
result cuFileGetStatsL3(uint64_t *s) {
    pthread_mutex_lock(&lock);
    s[128] = counting;
    uint64_t *gpu = s + 129;
    gpu[2] = is("layout") ? 0 : read_bytes;
    gpu[is("p2p") ? 7 : 8] = reads_direct;
    gpu[9] = reads_posix;
    gpu[is("p2p") ? 20 : 21] = writes_direct;
    gpu[22] = writes_posix;
    pthread_mutex_unlock(&lock);
    return ok();
}
#endif
result cuFileHandleRegister(void **h, description *d) {
    if (is("record")) return fail(5027);
    if (is("register") || is("exit")) wait_released();
    if (d->type != 1) return fail(5018);
    int flags = fcntl(d->u.fd, F_GETFL);
    if (flags & O_NOFOLLOW) return fail(5019);
    if (!(flags & O_DIRECT)) return fail(5020);
    if ((flags & O_ACCMODE) != O_RDONLY) writable++;
    handle *mine = calloc(1, sizeof *mine);
    mine->fd = d->u.fd;
    *h = mine;
    handles++;
    return ok();
}
void cuFileHandleDeregister(handle *h) {
    if (h->uses) die("a handle was forgotten in mid-transfer");
    handles--;
    free(h);
}
result cuFileBufRegister(const void *p, size_t n, int flags) {
    (void)flags;
    if (is("pinning")) return fail(5036);
    if (n > 16 << 20) die("a registration longer than what goes directly");
    if (buffer_count == BUFFERS) die("too many buffers");
    for (int i = 0; i < buffer_count; i++)
        if ((uint64_t)p < buffers[i].start + buffers[i].bytes && buffers[i].start < (uint64_t)p + n) die("registered twice");
    buffers[buffer_count].start = (uint64_t)p;
    buffers[buffer_count++].bytes = n;
    return ok();
}
result cuFileBufDeregister(const void *p) {
    if (in_flight) die("a buffer was forgotten in mid-transfer");
    for (int i = 0; i < buffer_count; i++)
        if (buffers[i].start == (uint64_t)p) { buffers[i] = buffers[--buffer_count]; return ok(); }
    die("a buffer was forgotten that was not registered");
    return ok();
}

static ssize_t move(handle *h, int op, void *p, size_t n, long at) {
    int compat = is("compat");
    ssize_t moved = op == READ ? pread(h->fd, p, n, at) : pwrite(h->fd, p, n, at);
    pthread_mutex_lock(&lock);
    if (op == READ) { *(compat ? &reads_posix : &reads_direct) += 1; read_bytes += moved > 0 ? moved : 0; }
    else *(compat ? &writes_posix : &writes_direct) += 1;
    pthread_mutex_unlock(&lock);
    return moved < 0 ? -errno : moved;
}
ssize_t cuFileRead(handle *h, void *base, size_t n, long at, long offset) {
    if (is("liar")) {
        pthread_mutex_lock(&lock);
        reads_direct++; read_bytes += n;
        pthread_mutex_unlock(&lock);
        return n;
    }
    int asked = __atomic_add_fetch(&asked_reads, 1, __ATOMIC_RELAXED);
    if (is("refuses")) return -5030;
    if (is("stuck") && asked == 1) wait_released();
    if (is("others") && asked == 1) {
        pthread_mutex_lock(&lock);
        reads_direct++; read_bytes += 4096;
        pthread_mutex_unlock(&lock);
    }
    if (is("parts")) {
        /* The first one is the self-test. */
        if (asked % 5 == 0) return -5030;
        if (asked > 1 && n > 4096 + 100) {
            char *bounce = aligned_alloc(4096, 8192);
            ssize_t moved = move(h, READ, bounce, 8192, at);
            if (moved > 4096 + 100) moved = 4096 + 100;
            if (moved > 0) memcpy((char *)base + offset, bounce, moved);
            free(bounce);
            return moved;
        }
    }
    return move(h, READ, (char *)base + offset, n, at);
}
ssize_t cuFileWrite(handle *h, void *base, size_t n, long at, long offset) { return move(h, 1, (char *)base + offset, n, at); }

result cuFileBatchIOSetUp(batch **b, unsigned nr) {
    if (nr > CAPACITY) return fail(5022);
    if (is("compat")) die("a batch in compat mode");
    *b = calloc(1, sizeof **b);
    (*b)->nr = nr;
    return ok();
}
result cuFileBatchIOSubmit(batch *b, unsigned n, entry *entries, unsigned flags) {
    (void)flags;
    if (is("submit") && n > 1) return fail(5030);
    pthread_mutex_lock(&lock);
    if (in_flight + n > b->nr) die("more transfers than the batch can hold");
    for (unsigned i = 0; i < n; i++) {
        if (entries[i].base_offset) die("an offset to the base, which batches ignore");
        ((handle *)entries[i].file)->uses++;
        flights[in_flight].e = entries[i];
        flights[in_flight++].asked = 0;
    }
    batches++;
    if ((uint64_t)in_flight > most_in_flight) most_in_flight = in_flight;
    pthread_mutex_unlock(&lock);
    return ok();
}
static event ended(entry *e) {
    handle *h = e->file;
    size_t n = e->size;
    event done = { e->cookie, COMPLETE, 0 };
    h->uses--;
    if (is("event") || (is("once") && failed % 2 == 0 && failed < 6)) { failed++; done.status = FAILED; done.bytes = (size_t)-5L; return done; }
    failed++;
    if (is("ends")) return done;
    if (is("short") && n > 4096) n = 4096;
    ssize_t moved = move(h, e->op, e->base, n, e->file_offset);
    if (moved < 0) { done.status = FAILED; done.bytes = (size_t)moved; return done; }
    if (is("wrong") && e->op == READ) ((char *)e->base)[n / 2] ^= 1;
    /* A bit of the next page, which must not be relied on. */
    done.bytes = is("short") && n < e->size ? (size_t)moved + 100 : (size_t)moved;
    return done;
}
result cuFileBatchIOGetStatus(batch *b, unsigned min, unsigned *nr, event *events, struct timespec *timeout) {
    (void)b; (void)timeout;
    const char *often = getenv("DOUBLE_POLLS");
    int polls = often ? atoi(often) : 3;
    if (min) die("a wait inside the library");
    if (is("status") && ++unanswered) return fail(5030);
    unsigned count = 0;
    if (is("cookie") && in_flight) {
        events[0] = (event){ (void *)12345, COMPLETE, 4096 };
        *nr = 1;
        return ok();
    }
    for (int i = 0; i < in_flight && count < *nr;) {
        int hangs = !is_released && (is("hang") || (is("hangwrite") && flights[i].e.op != READ));
        if (hangs || ++flights[i].asked < polls) { i++; continue; }
        entry e = flights[i].e;
        flights[i] = flights[--in_flight];
        events[count++] = ended(&e);
    }
    *nr = count;
    return ok();
}
void cuFileBatchIODestroy(batch *b) {
    if (in_flight) die("a batch was given back in mid-transfer");
    free(b);
}
