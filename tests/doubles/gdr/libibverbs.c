/* A double of libibverbs, for machines without an RDMA device: its binary interface, and a device that carries RDMA
 * WRITE for real, between registered ranges, after looking at keys, bounds, access, queue states and depths.
 *
 * Work is done late, by a thread, a few work requests at a time and in order, so that code that reads a destination too
 * early, gives memory away too early, or sleeps without having looked once more, is found out. What was written to device
 * memory (the double of libcuda says what that is) is seen only once it has been flushed, as on a GPU that orders nothing.
 * A work request counts as in the device's hands until its completion, or one after it, has been taken. What a real
 * device answers with corrupted memory, or not at all, ends the process here: more requests than the queue takes, a region,
 * memory or a queue given back while work needs it, a completion queue that overflows, unacknowledged events.
 *
 * IBV_DOUBLE, and later ibv_double_set(), say how it behaves, in words separated by commas. N-th: counted from then on.
 *   now            work is done in the call that posts it     late           by the thread (default)
 *   idle           completes without moving a byte            delay=US       pause of the thread (default 30)
 *   burst=N        requests between two pauses (default 4)    race           arming first ends all work: no event tells of it
 *   spurious       events that nothing explains
 *   none           no devices                                 devices=N      so many of them
 *   deny           no device can be opened                    down           the port is down
 *   ib             InfiniBand: a LID, and a GID of that type  v1             no GID of RoCE v2
 *   nogid          the table of GIDs is empty                 shift=N        GIDs begin at this index of the table
 *   mtu=E          active MTU, as the enumeration has it      depth=N        work requests in a queue pair
 *   sge=N          pieces of a work request                   msg=N          bytes of a message
 *   cqe=N          entries of a completion queue              size=N         bytes of a region
 *   regions=N      so many more regions, and then ENOMEM      nodmabuf       no dma-buf can be registered
 *   peermem        device memory can be registered by address
 *   lose=W         what is written to W is lost: device, host, or all
 *   wrong          of each message one bit                    partial=N      a chain is refused at the N-th request: ENOMEM
 *   fail=N:S       the N-th ends with the status S            revoke=N       so does its region from then on
 *   fatal=N        before the N-th the queue pair fails, and an event says so
 *   never=N        the N-th and those after it do not end     dead           nor does anything, also when it is flushed
 *   overrun=N      the N-th completion finds the queue full   modify=S       no queue pair gets into the state S
 *   noqp, nocq     cannot be created                          arm            a completion queue cannot be armed
 *   event=E        an event of this number
 *   go             all of the above as at first
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* The binary interface: what infiniband/verbs.h of rdma-core 44 lays out. */
typedef union { uint8_t raw[16]; uint64_t words[2]; } gid;
typedef struct { void *dummy[2]; int node_type, transport_type; char name[64], dev_name[64], dev_path[256], ibdev_path[256]; } device;
typedef struct context context;
typedef struct { context *ctx; uint32_t handle; } pd;
typedef struct { context *ctx; pd *of; void *addr; size_t length; uint32_t handle, lkey, rkey; } mr;
typedef struct { context *ctx; int fd, refcnt; } channel;
typedef struct { context *ctx; channel *chan; void *user; uint32_t handle; int cqe; pthread_mutex_t mutex; pthread_cond_t cond; uint32_t comp, async; } cq_face;
typedef struct { context *ctx; void *user; pd *of; cq_face *send_cq, *recv_cq; void *srq; uint32_t handle, num; int state, type; pthread_mutex_t mutex; pthread_cond_t cond; uint32_t completed; } qp_face;
typedef struct { uint64_t addr; uint32_t length, lkey; } sge;
typedef struct send_wr { uint64_t id; struct send_wr *next; sge *list; int count, opcode; unsigned flags; uint32_t imm; uint64_t remote; uint32_t rkey; uint8_t rest[76]; } send_wr;
typedef struct { uint64_t id; int status, opcode; uint32_t vendor, bytes, imm, qp, src; unsigned flags; uint16_t pkey, slid; uint8_t sl, path; } wc;
typedef struct { uint32_t send_wr, recv_wr, send_sge, recv_sge, inline_data; } cap;
typedef struct { void *user; cq_face *send_cq, *recv_cq; void *srq; cap caps; int type, sig_all; } qp_init;
typedef struct { gid dgid; uint32_t flow; uint8_t sgid_index, hops, traffic; uint16_t dlid; uint8_t sl, path, rate, is_global, port; } ah;
typedef struct { int state, current, mtu, mig; uint32_t qkey, rq_psn, sq_psn, dest; unsigned access; cap caps; ah to, alternative; uint16_t pkey, alt_pkey; uint8_t en, draining, rd, dest_rd, rnr_timer, port, timeout, retry, rnr_retry, alt_port, alt_timeout; uint32_t rate; } qp_attr;
typedef struct { int state, max_mtu, active_mtu, gids; uint32_t caps, max_msg, bad_pkey, qkey_viol; uint16_t pkeys, lid, sm_lid; uint8_t lmc, vls, sm_sl, timeout, init, width, speed, phys, link_layer, flags; uint16_t caps2; uint32_t speed_ex; } port_attr;
typedef struct { char fw[64]; uint64_t guid, sys_guid, max_mr_size, page_sizes; uint32_t vendor, part, hw; int max_qp, max_qp_wr; unsigned flags; int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, rest[20]; uint16_t pkeys; uint8_t ack_delay, ports; } device_attr;
typedef struct { void *element; int type; } async_event;
typedef struct { gid g; uint32_t index, port, type, ifindex; } gid_entry;
struct context { device *dev; void *ops[32]; int cmd_fd, async_fd, vectors; pthread_mutex_t mutex; void *abi; };
_Static_assert(sizeof(device) == 664 && offsetof(device, ibdev_path) == 408, "struct ibv_device");
_Static_assert(sizeof(context) == 328 && offsetof(context, async_fd) == 268 && offsetof(context, abi) == 320, "struct ibv_context");
_Static_assert(sizeof(mr) == 48 && offsetof(mr, rkey) == 40, "struct ibv_mr");
_Static_assert(sizeof(cq_face) == 128 && offsetof(cq_face, cqe) == 28, "struct ibv_cq");
_Static_assert(sizeof(qp_face) == 160 && offsetof(qp_face, num) == 52, "struct ibv_qp");
_Static_assert(sizeof(send_wr) == 128 && offsetof(send_wr, remote) == 40, "struct ibv_send_wr");
_Static_assert(sizeof(wc) == 48 && offsetof(wc, qp) == 28 && offsetof(wc, path) == 45, "struct ibv_wc");
_Static_assert(sizeof(qp_init) == 64 && offsetof(qp_init, sig_all) == 56, "struct ibv_qp_init_attr");
_Static_assert(sizeof(ah) == 32 && offsetof(ah, port) == 30, "struct ibv_ah_attr");
_Static_assert(sizeof(qp_attr) == 144 && offsetof(qp_attr, port) == 129, "struct ibv_qp_attr");
_Static_assert(offsetof(port_attr, lid) == 34 && offsetof(port_attr, link_layer) == 46, "struct ibv_port_attr");
_Static_assert(sizeof(device_attr) == 232 && offsetof(device_attr, max_cqe) == 132 && offsetof(device_attr, ports) == 227, "struct ibv_device_attr");
_Static_assert(sizeof(async_event) == 16 && sizeof(gid_entry) == 32 && sizeof(pd) == 16 && sizeof(channel) == 16, "small ones");

enum { POLL_CQ = 11, REQ_NOTIFY_CQ = 12, POST_SEND = 25 };
enum { RESET, INIT, RTR, RTS, SQD, SQE, ERR };
enum { SUCCESS = 0, LOC_LEN = 1, LOC_PROT = 4, FLUSHED = 5, REM_ACCESS = 10, RETRY_EXC = 12 };
enum { LOCAL_WRITE = 1, REMOTE_WRITE = 2, SIGNALED = 2, INLINE = 8 };
enum { CQ_ERR = 0, QP_FATAL = 1 };
enum { REGIONS = 65536, SGES = 32, COMPAT_PORT_BYTES = 48, LID = 7, DEVICES = 8, QPS = 64, PENDING = 65536 };

typedef struct { mr face; uint8_t *memory; int access, uses, dead, is_device, age; } region;
typedef struct { wc entry; struct qp *from; uint64_t upto; } completion;
typedef struct cq { cq_face face; completion *ring; uint64_t head, tail; int armed, failed, users; unsigned handed_out, acked; } cq;
typedef struct { uint64_t id, remote; uint32_t rkey; int signaled, count; region *to, *from[SGES]; sge list[SGES]; } flight;
typedef struct qp { qp_face face; flight *ring; uint32_t depth, sges; int sig_all, unreachable; unsigned access; uint32_t rq_psn; uint64_t posted, done, freed; int dgid_ok; } qp;
typedef struct { uint8_t *at, *bytes; size_t n; } pending;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static struct { int now, idle, delay, burst, race, spurious, devices, deny, down, ib, v1, nogid, shift, mtu, nodmabuf, peermem, wrong, never, dead, modify, noqp, nocq, arm;
    int64_t depth, sge, msg, cqe, size, regions, partial, fail, status, revoke, fatal, overrun; int lose; } how;
static struct { uint64_t writes, bytes, chains, signaled, most, posted_most, objects, regions, registered, dmabuf, dereg, flushes, resets, armings, events, polls, mtu, gid_index, dlid, is_global, flushed, misses, device_bytes; } count;
static region *regions[REGIONS];
static int next_region, worker_runs, contexts;
static qp *qps[QPS];
static pending *unflushed;
static size_t unflushed_count;
static int async_write = -1;

static void die(const char *why) { fprintf(stderr, "the double of libibverbs: %s\n", why); abort(); }
static void *failed(int error) { errno = error; return NULL; }
static void *made(size_t bytes) { void *p = calloc(1, bytes); if (!p) die("no memory"); count.objects++; return p; }
static void gone(void *p) { count.objects--; free(p); }

/* What the double of libcuda knows. */
static void *of_libcuda(const char *name) {
    void *library = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return library ? dlsym(library, name) : NULL;
}
static int is_device(const void *p, size_t n) {
    int (*known)(uint64_t, size_t) = (int (*)(uint64_t, size_t))of_libcuda("double_is_device");
    return known && known((uint64_t)p, n);
}
static int needs_flush(void) {
    int (*needs)(void) = (int (*)(void))of_libcuda("double_needs_flush");
    return needs && needs();
}

static void defaults(void) {
    memset(&how, 0, sizeof how);
    how.delay = 30; how.burst = 4; how.devices = 1; how.shift = 2; how.mtu = 4; how.modify = -1;
    how.depth = 256; how.sge = 16; how.msg = 1 << 30; how.cqe = 4096; how.size = 1l << 46; how.regions = 1l << 40;
}
static void send_event(void *element, int type) {
    async_event e = { element, type };
    if (async_write >= 0 && write(async_write, &e, sizeof e) != sizeof e) die("an event was lost");
}
static void fail_queue(qp *q);
void ibv_double_set(const char *words) {
    char *copy = strdup(words), *rest = copy, *word;
    pthread_mutex_lock(&lock);
    while ((word = strsep(&rest, ","))) {
        char *value = strchr(word, '=');
        if (value) *value++ = 0;
        int64_t n = value ? strtoll(value, NULL, 0) : 1;
#define FLAG(name) else if (!strcmp(word, #name)) how.name = n;
        if (!*word) continue;
        else if (!strcmp(word, "go")) {
            /* Words about the device itself stay: they are not asked for again. */
            how.never = how.dead = how.wrong = how.lose = how.spurious = how.arm = how.noqp = how.nocq = how.race = 0;
            how.partial = how.fail = how.revoke = how.fatal = how.overrun = 0;
            how.regions = 1l << 40; how.modify = -1;
        }
        else if (!strcmp(word, "late")) how.now = 0;
        else if (!strcmp(word, "none")) how.devices = 0;
        else if (!strcmp(word, "lose")) how.lose = !value ? 3 : !strcmp(value, "device") ? 1 : !strcmp(value, "host") ? 2 : 3;
        else if (!strcmp(word, "event")) send_event((void *)1, n);
        else if (!strcmp(word, "fail")) { how.fail = n; how.status = value && strchr(value, ':') ? atoi(strchr(value, ':') + 1) : RETRY_EXC; }
        FLAG(now) FLAG(idle) FLAG(delay) FLAG(burst) FLAG(race) FLAG(spurious) FLAG(devices) FLAG(deny) FLAG(down) FLAG(ib)
        FLAG(v1) FLAG(nogid) FLAG(shift) FLAG(mtu) FLAG(depth) FLAG(sge) FLAG(msg) FLAG(cqe) FLAG(size) FLAG(regions)
        FLAG(nodmabuf) FLAG(peermem) FLAG(wrong) FLAG(partial) FLAG(revoke) FLAG(fatal) FLAG(never) FLAG(dead) FLAG(overrun)
        FLAG(modify) FLAG(noqp) FLAG(nocq) FLAG(arm)
        else die(word);
    }
    pthread_cond_broadcast(&work);
    pthread_mutex_unlock(&lock);
    free(copy);
}
uint64_t ibv_double_get(const char *name) {
    pthread_mutex_lock(&lock);
    uint64_t value = 0;
#define COUNT(field) else if (!strcmp(name, #field)) value = count.field;
    if (!strcmp(name, "posted")) for (int i = 0; i < QPS; i++) value += qps[i] ? qps[i]->posted - qps[i]->freed : 0;
    COUNT(writes) COUNT(bytes) COUNT(chains) COUNT(signaled) COUNT(most) COUNT(objects) COUNT(regions) COUNT(registered)
    COUNT(dmabuf) COUNT(dereg) COUNT(flushes) COUNT(resets) COUNT(armings) COUNT(events) COUNT(polls) COUNT(mtu) COUNT(gid_index)
    COUNT(dlid) COUNT(is_global) COUNT(flushed) COUNT(misses) COUNT(device_bytes)
    else die(name);
    pthread_mutex_unlock(&lock);
    return value;
}
__attribute__((constructor)) static void begin(void) {
    defaults();
    const char *words = getenv("IBV_DOUBLE");
    if (words) ibv_double_set(words);
}

/* Devices. */
static device list_of[DEVICES];
device **ibv_get_device_list(int *n) {
    device **list = calloc(how.devices + 1, sizeof *list);
    for (int i = 0; i < how.devices && i < DEVICES; i++) {
        device *d = &list_of[i];
        d->node_type = 1; d->transport_type = 0;
        snprintf(d->name, sizeof d->name, "double%d", i);
        snprintf(d->dev_name, sizeof d->dev_name, "uverbs_double%d", i);
        snprintf(d->dev_path, sizeof d->dev_path, "/sys/class/infiniband_verbs/uverbs_double%d", i);
        snprintf(d->ibdev_path, sizeof d->ibdev_path, "/sys/class/infiniband/double%d", i);
        list[i] = d;
    }
    if (n) *n = how.devices;
    return list;
}
void ibv_free_device_list(device **list) { free(list); }
const char *ibv_get_device_name(device *d) { return d->name; }
uint64_t ibv_get_device_guid(device *d) { (void)d; return 0x0102030405060708; }

static int poll_cq(cq *q, int n, wc *out);
static int req_notify_cq(cq *q, int solicited);
static int post_send(qp *q, send_wr *wr, send_wr **bad);
context *ibv_open_device(device *d) {
    if (how.deny) return failed(EACCES);
    context *c = made(sizeof *c);
    int ends[2];
    if (pipe(ends)) die("pipe");
    c->dev = d;
    c->ops[POLL_CQ] = poll_cq; c->ops[REQ_NOTIFY_CQ] = req_notify_cq; c->ops[POST_SEND] = post_send;
    c->cmd_fd = -1; c->async_fd = ends[0]; c->vectors = 1;
    c->abi = NULL;
    async_write = ends[1];
    contexts++;
    return c;
}
int ibv_close_device(context *c) {
    close(c->async_fd);
    contexts--;
    gone(c);
    if (!contexts) {
        close(async_write); async_write = -1;
        if (count.objects) die("a device was closed before what was made with it");
    }
    return 0;
}
int ibv_query_device(context *c, device_attr *a) {
    (void)c;
    memset(a, 0, sizeof *a);
    strcpy(a->fw, "double");
    a->max_mr_size = how.size; a->page_sizes = 0xfffff000; a->max_qp = 64; a->max_qp_wr = how.depth; a->max_sge = how.sge;
    a->max_cq = 64; a->max_cqe = how.cqe; a->max_mr = REGIONS; a->max_pd = 16; a->ports = 1;
    return 0;
}
int ibv_query_port(context *c, uint8_t port, port_attr *out) {
    (void)c;
    port_attr a = { .state = how.down ? 1 : 4, .max_mtu = 5, .active_mtu = how.mtu, .gids = how.ib ? 1 : how.shift + 4, .max_msg = how.msg,
                    .pkeys = 1, .lid = how.ib ? LID : 0, .width = 2, .speed = 32, .phys = how.down ? 3 : 5, .link_layer = how.ib ? 1 : 2 };
    if (port != 1) return EINVAL;
    memcpy(out, &a, COMPAT_PORT_BYTES);
    return 0;
}
/* The table: nothing, then of the link's and of the network's address the GIDs of RoCE v1 and v2. */
static int gid_at(uint32_t index, gid *g) {
    memset(g, 0, sizeof *g);
    if (how.ib) {
        memcpy(g->raw, "\xfe\x80\0\0\0\0\0\0\1\2\3\4\5\6\7\x08", 16);
        return index == 0 && !how.nogid ? 0 : -1;
    }
    int at = (int)index - how.shift;
    if (how.nogid || at < 0 || at > 3 || (how.v1 && at % 2)) return -1;
    memcpy(g->raw, at < 2 ? "\xfe\x80\0\0\0\0\0\0\0\0\0\0\0\0\0\1" : "\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x09\x09\x01", 16);
    return at % 2 ? 2 : 1;
}
int ibv_query_gid(context *c, uint8_t port, int index, gid *g) {
    (void)c;
    if (port != 1 || index < 0 || index >= (how.ib ? 1 : how.shift + 4)) { errno = EINVAL; return -1; }
    gid_at(index, g);
    return 0;
}
int _ibv_query_gid_ex(context *c, uint32_t port, uint32_t index, gid_entry *e, uint32_t flags, size_t bytes) {
    (void)c;
    if (port != 1 || flags || bytes < sizeof *e) return EINVAL;
    int type = gid_at(index, &e->g);
    if (type < 0) return ENODATA;
    e->index = index; e->port = port; e->type = type; e->ifindex = 0;
    return 0;
}
int ibv_query_pkey(context *c, uint8_t port, int index, uint16_t *pkey) { (void)c; *pkey = 0xffff; return port == 1 && index == 0 ? 0 : -1; }
const char *ibv_wc_status_str(int status) {
    static const char *names[] = { "success", "local length error", "local QP operation error", "local EE context operation error",
        "local protection error", "Work Request Flushed Error", "memory management operation error", "bad response error",
        "local access error", "remote invalid request error", "remote access error", "remote operation error", "transport retry counter exceeded" };
    return status >= 0 && status <= RETRY_EXC ? names[status] : "unknown";
}
const char *ibv_event_type_str(int type) { return type == CQ_ERR ? "CQ error" : type == QP_FATAL ? "local work queue catastrophic error" : "an event"; }
const char *ibv_port_state_str(int state) { return state == 4 ? "PORT_ACTIVE (4)" : "PORT_DOWN (1)"; }
int ibv_fork_init(void) { return 0; }
int ibv_get_async_event(context *c, async_event *e) { return read(c->async_fd, e, sizeof *e) == sizeof *e ? 0 : -1; }
void ibv_ack_async_event(async_event *e) { (void)e; }

/* Regions. */
pd *ibv_alloc_pd(context *c) { pd *p = made(sizeof *p); p->ctx = c; return p; }
int ibv_dealloc_pd(pd *p) {
    for (int i = 0; i < next_region; i++) if (regions[i] && regions[i]->face.of == p) die("a protection domain given back before its regions");
    for (int i = 0; i < QPS; i++) if (qps[i] && qps[i]->face.of == p) die("a protection domain given back before its queue pairs");
    gone(p);
    return 0;
}
static mr *registered(pd *p, void *iova, uint8_t *memory, size_t n, int access, int device) {
    if (!n || (uint64_t)how.size < n) return failed(EINVAL);
    if ((access & REMOTE_WRITE) && !(access & LOCAL_WRITE)) return failed(EINVAL);
    if (how.regions <= 0) return failed(ENOMEM);
    pthread_mutex_lock(&lock);
    how.regions--;
    if (next_region == REGIONS) die("too many registrations for the double");
    region *r = made(sizeof *r);
    uint32_t key = (uint32_t)next_region << 8 | 0x5a;
    r->face = (mr){ p->ctx, p, iova, n, next_region, key, key | 0x80000000u };
    r->memory = memory; r->access = access; r->is_device = device;
    regions[next_region++] = r;
    count.regions++; count.registered++;
    pthread_mutex_unlock(&lock);
    return &r->face;
}
static int is_mapped(const uint8_t *memory, size_t n) {
    uint64_t from = (uint64_t)memory & ~4095ull, to = ((uint64_t)memory + n + 4095) & ~4095ull;
    unsigned char *pages = malloc((to - from) / 4096);
    int mapped = mincore((void *)from, to - from, pages) == 0;
    free(pages);
    return mapped;
}
mr *ibv_reg_mr_iova2(pd *p, void *addr, size_t n, uint64_t iova, unsigned access) {
    int device = is_device(addr, n);
    if (device && !how.peermem) return failed(EFAULT);
    if (!device && !is_mapped(addr, n)) return failed(EFAULT);
    return registered(p, (void *)iova, addr, n, access, device);
}
mr *ibv_reg_mr(pd *p, void *addr, size_t n, int access) { return ibv_reg_mr_iova2(p, addr, n, (uint64_t)addr, access); }
#ifndef NO_DMABUF
/* The double of libcuda hands out files that say where their memory lies. */
mr *ibv_reg_dmabuf_mr(pd *p, uint64_t offset, size_t n, uint64_t iova, int fd, int access) {
    uint64_t at[2];
    if (how.nodmabuf) return failed(EOPNOTSUPP);
    if (pread(fd, at, sizeof at, 0) != sizeof at) return failed(EBADF);
    if (offset + n > at[1] || (offset ^ iova) % 4096) return failed(EINVAL);
    mr *m = registered(p, (void *)iova, (uint8_t *)at[0] + offset, n, access, 1);
    if (m) count.dmabuf++;
    return m;
}
#endif
int ibv_dereg_mr(mr *m) {
    region *r = (region *)m;
    pthread_mutex_lock(&lock);
    if (regions[m->handle] != r) die("a region given back twice");
    if (r->uses) die("a region given back while work needs it");
    if (!r->is_device && !is_mapped(r->memory, m->length)) die("memory given back before its region");
    if (r->is_device && !is_device(r->memory, m->length)) die("device memory given back before its region");
    regions[m->handle] = NULL;
    count.regions--; count.dereg++;
    gone(r);
    pthread_mutex_unlock(&lock);
    return 0;
}
static region *region_of(uint32_t key, int remote) {
    uint32_t at = (key & 0x7fffffff) >> 8;
    if ((key >> 31) != (uint32_t)remote || (key & 0xff) != 0x5a || at >= (uint32_t)next_region) return NULL;
    return regions[at];
}
static int is_within(region *r, uint64_t addr, uint64_t n) {
    uint64_t start = (uint64_t)r->face.addr;
    return addr >= start && addr + n <= start + r->face.length && addr + n >= addr;
}
static uint8_t *in_memory(region *r, uint64_t addr) { return r->memory + (addr - (uint64_t)r->face.addr); }

/* Completion queues. */
channel *ibv_create_comp_channel(context *c) {
    int ends[2];
    if (pipe(ends)) return NULL;
    channel *ch = made(sizeof *ch + sizeof(int));
    *ch = (channel){ c, ends[0], 0 };
    *(int *)(ch + 1) = ends[1];
    return ch;
}
int ibv_destroy_comp_channel(channel *ch) {
    if (ch->refcnt) return EBUSY;
    close(ch->fd); close(*(int *)(ch + 1));
    gone(ch);
    return 0;
}
cq_face *ibv_create_cq(context *c, int cqe, void *user, channel *ch, int vector) {
    if (how.nocq) return failed(ENOMEM);
    if (cqe < 1 || cqe > how.cqe || vector != 0) return failed(EINVAL);
    cq *q = made(sizeof *q);
    q->face.ctx = c; q->face.chan = ch; q->face.user = user; q->face.cqe = cqe;
    q->ring = calloc(cqe, sizeof *q->ring);
    if (ch) ch->refcnt++;
    return &q->face;
}
int ibv_destroy_cq(cq_face *f) {
    cq *q = (cq *)f;
    if (q->users) return EBUSY;
    /* The real one waits for these, for ever. */
    if (q->handed_out != q->acked) die("a completion queue given back with unacknowledged events");
    if (f->chan) f->chan->refcnt--;
    free(q->ring);
    gone(q);
    return 0;
}
static void notify(cq *q) {
    void *event = q;
    if (q->face.chan && write(*(int *)(q->face.chan + 1), &event, sizeof event) != sizeof event) die("an event was lost");
    count.events++;
}
int ibv_get_cq_event(channel *ch, cq_face **out, void **user) {
    cq *q;
    ssize_t got = read(ch->fd, &q, sizeof q);
    if (got != sizeof q) return -1;
    *out = &q->face; *user = q->face.user;
    __atomic_fetch_add(&q->handed_out, 1, __ATOMIC_SEQ_CST);
    return 0;
}
void ibv_ack_cq_events(cq_face *f, unsigned n) {
    cq *q = (cq *)f;
    if (__atomic_add_fetch(&q->acked, n, __ATOMIC_SEQ_CST) > __atomic_load_n(&q->handed_out, __ATOMIC_SEQ_CST)) die("more events acknowledged than there were");
}
static void complete(qp *q, flight *w, int status, uint32_t bytes) {
    cq *to = (cq *)q->face.send_cq;
    if (to->failed) return;
    int full = to->tail - to->head == (uint64_t)to->face.cqe;
    if (full && !how.overrun) die("a completion queue that overflows");
    if (how.overrun && !--how.overrun) {
        to->failed = 1;
        send_event(&to->face, CQ_ERR);
        return;
    }
    completion *c = &to->ring[to->tail++ % to->face.cqe];
    *c = (completion){ { .id = w->id, .status = status, .opcode = 1, .vendor = status ? 0x81 : 0, .bytes = bytes, .qp = q->face.num }, q, q->done };
    count.signaled++;
    if (to->armed) { to->armed = 0; notify(to); }
}

/* Takes a request out of the device's hands. */
static void release(qp *q, uint64_t upto) {
    for (; q->freed < upto; q->freed++) {
        flight *w = &q->ring[q->freed % q->depth];
        if (w->to) w->to->uses--;
        for (int i = 0; i < w->count; i++) if (w->from[i]) w->from[i]->uses--;
    }
}
static int poll_cq(cq *q, int n, wc *out) {
    pthread_mutex_lock(&lock);
    count.polls++;
    if (q->failed) { pthread_mutex_unlock(&lock); return 0; }
    int got = 0;
    for (; got < n && q->head < q->tail; got++) {
        completion *c = &q->ring[q->head++ % q->face.cqe];
        out[got] = c->entry;
        if (c->from) release(c->from, c->upto);
    }
    pthread_mutex_unlock(&lock);
    return got;
}

/* Writes to a device wait here, where nothing reads them, until they are flushed or read by the bus. */
void ibv_double_flush(void) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < unflushed_count; i++) {
        memcpy(unflushed[i].at, unflushed[i].bytes, unflushed[i].n);
        free(unflushed[i].bytes);
    }
    unflushed_count = 0;
    count.flushes++;
    pthread_mutex_unlock(&lock);
}
static void write_later(uint8_t *at, const uint8_t *from, size_t n) {
    if (!unflushed) unflushed = calloc(PENDING, sizeof *unflushed);
    if (unflushed_count == PENDING) die("too many unflushed writes");
    pending *p = &unflushed[unflushed_count++];
    *p = (pending){ at, malloc(n), n };
    memcpy(p->bytes, from, n);
}
static void read_through(void) {
    /* A read on the bus pushes the writes before it. */
    for (size_t i = 0; i < unflushed_count; i++) { memcpy(unflushed[i].at, unflushed[i].bytes, unflushed[i].n); free(unflushed[i].bytes); }
    unflushed_count = 0;
}

static int carry(qp *q, flight *w) {
    uint64_t bytes = 0;
    if (how.fail && !--how.fail) return how.status;
    if (q->unreachable) return RETRY_EXC;
    for (int i = 0; i < w->count; i++) {
        region *r = w->from[i];
        if (!r || r->dead || r->face.of != q->face.of || !is_within(r, w->list[i].addr, w->list[i].length)) return LOC_PROT;
        bytes += w->list[i].length;
    }
    region *to = w->to;
    if (how.revoke && !--how.revoke && to) to->dead = 1;
    if (!to || to->dead || to->face.of != q->face.of || !is_within(to, w->remote, bytes)) return REM_ACCESS;
    if (!(to->access & REMOTE_WRITE) || !(q->access & REMOTE_WRITE)) return REM_ACCESS;
    count.writes++; count.bytes += bytes;
    if (to->is_device) count.device_bytes += bytes;
    if (how.idle || (how.lose & (to->is_device ? 1 : 2))) return SUCCESS;
    uint8_t *at = in_memory(to, w->remote);
    for (int i = 0; i < w->count; i++) {
        if (w->from[i]->is_device) read_through();
        uint8_t *from = in_memory(w->from[i], w->list[i].addr);
        if (to->is_device && needs_flush()) write_later(at, from, w->list[i].length);
        else memcpy(at, from, w->list[i].length);
        if (how.wrong && i == 0) at[0] ^= 4;
        at += w->list[i].length;
    }
    return SUCCESS;
}
static void fail_queue(qp *q) { q->face.state = ERR; }
/* One request of a queue pair; false if there is nothing that may be done. */
static int step(qp *q) {
    if (q->done == q->posted || how.dead) return 0;
    flight *w = &q->ring[q->done % q->depth];
    if (q->face.state == ERR) {
        q->done++;
        count.flushed++;
        complete(q, w, FLUSHED, 0);
        return 1;
    }
    if (how.never && how.never == 1) return 0;
    if (how.never) how.never--;
    if (q->face.state != RTS) return 0;
    if (how.fatal && !--how.fatal) { fail_queue(q); send_event(&q->face, QP_FATAL); return 1; }
    int status = carry(q, w);
    q->done++;
    if (status) fail_queue(q);
    if (status || w->signaled) complete(q, w, status, 0);
    return 1;
}
static void *worker(void *nothing) {
    (void)nothing;
    for (;;) {
        pthread_mutex_lock(&lock);
        int did = 0, delay = how.delay;
        for (int i = 0; i < QPS; i++)
            for (int n = 0; qps[i] && n < how.burst && step(qps[i]); n++) did = 1;
        if (how.spurious)
            for (int i = 0; i < QPS; i++) if (qps[i] && ((cq *)qps[i]->face.send_cq)->armed) notify((cq *)qps[i]->face.send_cq);
        if (!did && !how.spurious) pthread_cond_wait(&work, &lock);
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){ 0, delay * 1000l }, NULL);
    }
    return NULL;
}
static int req_notify_cq(cq *q, int solicited) {
    (void)solicited;
    if (how.arm) return EIO;
    pthread_mutex_lock(&lock);
    if (how.race)
        for (int i = 0; i < QPS; i++) while (qps[i] && step(qps[i])) continue;
    q->armed = 1;
    count.armings++;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Queue pairs. */
qp_face *ibv_create_qp(pd *p, qp_init *init) {
    if (how.noqp) return failed(ENOMEM);
    if (init->type != 2 || !init->send_cq || !init->recv_cq) return failed(EINVAL);
    if (init->caps.send_wr < 1 || init->caps.send_wr > how.depth || init->caps.send_sge < 1 || init->caps.send_sge > how.sge || how.sge > SGES) return failed(EINVAL);
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < QPS && qps[at]) at++;
    if (at == QPS) die("too many queue pairs for the double");
    qp *q = made(sizeof *q);
    q->face.ctx = p->ctx; q->face.of = p; q->face.send_cq = init->send_cq; q->face.recv_cq = init->recv_cq; q->face.user = init->user;
    q->face.num = 0x100 + at; q->face.type = init->type; q->face.state = RESET;
    q->depth = init->caps.send_wr; q->sges = init->caps.send_sge; q->sig_all = init->sig_all;
    q->ring = calloc(q->depth, sizeof *q->ring);
    init->caps.inline_data = 0;
    ((cq *)init->send_cq)->users++; ((cq *)init->recv_cq)->users++;
    qps[at] = q;
    pthread_t thread;
    if (!worker_runs && !how.now) { worker_runs = 1; if (pthread_create(&thread, NULL, worker, NULL)) die("no thread"); pthread_detach(thread); }
    pthread_mutex_unlock(&lock);
    return &q->face;
}
static void forget_completions(qp *q) {
    /* This takes long: by the end of it no write is on its way any more. */
    read_through();
    cq *of = (cq *)q->face.send_cq;
    uint64_t kept = of->head;
    for (uint64_t at = of->head; at < of->tail; at++)
        if (of->ring[at % of->face.cqe].from != q) of->ring[kept++ % of->face.cqe] = of->ring[at % of->face.cqe];
    of->tail = kept;
    release(q, q->posted);
    q->done = q->posted;
}
int ibv_destroy_qp(qp_face *f) {
    qp *q = (qp *)f;
    pthread_mutex_lock(&lock);
    forget_completions(q);
    ((cq *)f->send_cq)->users--; ((cq *)f->recv_cq)->users--;
    for (int i = 0; i < QPS; i++) if (qps[i] == q) qps[i] = NULL;
    free(q->ring);
    gone(q);
    pthread_mutex_unlock(&lock);
    return 0;
}
/* The attributes that a change of state needs, by the specification. */
enum { A_STATE = 1, A_ACCESS = 8, A_PKEY = 16, A_PORT = 32, A_AV = 128, A_MTU = 256, A_TIMEOUT = 512, A_RETRY = 1024, A_RNR_RETRY = 2048, A_RQ_PSN = 4096,
       A_RD = 8192, A_RNR_TIMER = 32768, A_SQ_PSN = 65536, A_DEST_RD = 131072, A_DEST = 1048576 };
static int to_rtr(qp *q, qp_attr *a) {
    gid expected;
    if (a->mtu < 1 || a->mtu > how.mtu) return EINVAL;
    if (how.down) return ENETDOWN;
    int type = gid_at(a->to.sgid_index, &expected);
    if (a->to.port != 1) return EINVAL;
    if (!how.ib && !a->to.is_global) return EINVAL;
    if (a->to.is_global && type < 0) return ENODATA;
    q->unreachable = (a->to.is_global && memcmp(&a->to.dgid, &expected, sizeof expected)) || (how.ib && a->to.dlid != LID) || a->dest != q->face.num;
    q->rq_psn = a->rq_psn;
    count.mtu = a->mtu; count.gid_index = a->to.sgid_index; count.dlid = a->to.dlid; count.is_global = a->to.is_global;
    return 0;
}
int ibv_modify_qp(qp_face *f, qp_attr *a, int mask) {
    qp *q = (qp *)f;
    int result = 0;
    pthread_mutex_lock(&lock);
    int from = f->state, needs = A_STATE;
    if (!(mask & A_STATE)) result = EINVAL;
    else if (a->state == how.modify) result = EINVAL;
    else if (a->state == RESET) {
        if (from == RTS || from == ERR) count.resets++;
        forget_completions(q);
    } else if (a->state == INIT && (from == RESET || from == INIT)) {
        needs |= A_PKEY | A_PORT | A_ACCESS;
        q->access = a->access;
        if (a->port != 1 || a->pkey != 0) result = EINVAL;
    } else if (a->state == RTR && from == INIT) {
        needs |= A_AV | A_MTU | A_DEST | A_RQ_PSN | A_DEST_RD | A_RNR_TIMER;
        if ((mask & needs) == needs) result = to_rtr(q, a);
    } else if (a->state == RTS && from == RTR) {
        needs |= A_TIMEOUT | A_RETRY | A_RNR_RETRY | A_SQ_PSN | A_RD;
        if (a->sq_psn != q->rq_psn) q->unreachable = 1;
    } else if (a->state != ERR) result = EINVAL;
    if (!result && (mask & needs) != needs) result = EINVAL;
    if (!result) f->state = a->state;
    if (how.now) while (step(q)) continue;
    pthread_cond_broadcast(&work);
    pthread_mutex_unlock(&lock);
    return result;
}
int ibv_query_qp(qp_face *f, qp_attr *a, int mask, qp_init *init) {
    qp *q = (qp *)f;
    (void)mask;
    memset(a, 0, sizeof *a); memset(init, 0, sizeof *init);
    a->state = a->current = f->state; a->mtu = how.mtu; a->access = q->access;
    a->caps = init->caps = (cap){ q->depth, 0, q->sges, 0, 0 };
    init->send_cq = f->send_cq; init->recv_cq = f->recv_cq; init->type = f->type; init->sig_all = q->sig_all;
    return 0;
}
static int post(qp *q, send_wr *wr) {
    uint64_t bytes = 0;
    if (wr->opcode != 0) die("another opcode than RDMA WRITE");
    if (wr->count < 1 || (uint32_t)wr->count > q->sges) die("more pieces than the queue pair was made for");
    if (q->posted - q->freed == q->depth) die("more work requests than the queue takes");
    flight *w = &q->ring[q->posted % q->depth];
    w->id = wr->id; w->remote = wr->remote; w->rkey = wr->rkey; w->count = wr->count;
    w->signaled = q->sig_all || (wr->flags & SIGNALED);
    memcpy(w->list, wr->list, wr->count * sizeof *wr->list);
    w->to = region_of(wr->rkey, 1);
    if (w->to) w->to->uses++;
    for (int i = 0; i < wr->count; i++) {
        if (!wr->list[i].length) die("a piece of no bytes, which some devices take for 2 GiB");
        bytes += wr->list[i].length;
        w->from[i] = region_of(wr->list[i].lkey, 0);
        if (w->from[i]) w->from[i]->uses++;
    }
    if (bytes > (uint64_t)how.msg) die("a longer message than the port takes");
    q->posted++;
    if (q->posted - q->freed > count.most) count.most = q->posted - q->freed;
    return 0;
}
static int post_send(qp *q, send_wr *wr, send_wr **bad) {
    int result = 0;
    pthread_mutex_lock(&lock);
    count.chains++;
    if (q->face.state < RTS) die("work for a queue pair that is not ready to send");
    for (; wr; wr = wr->next) {
        if (how.partial && !--how.partial) { result = ENOMEM; *bad = wr; break; }
        post(q, wr);
        if (how.now) while (step(q)) continue;
    }
    if (!how.now) pthread_cond_signal(&work);
    pthread_mutex_unlock(&lock);
    return result;
}
