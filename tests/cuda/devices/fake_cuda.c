// Fake libcuda.so.1 for machines without a GPU: the functions that `CudaDriver` calls.
//
// Written from NVIDIA's documentation. It checks arguments, context and order of the calls; it does not
// show how a GPU behaves. Device memory is a memfd, handles name it by process, descriptor and inode,
// and a stream is a thread.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_CONTEXT = 201, MAP_FAILED_ = 205, INVALID_HANDLE = 400, NOT_READY = 600,
       ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum { HOST = 1, DEVICE = 2, MANAGED = 3, POOL = 4 };

typedef struct { uint64_t magic, pid, fd, inode, size, unused[3]; } Handle;
typedef struct { uint64_t recorded, reached; } Counters;
typedef struct Memory { char *at; size_t size; int fd, users, kind; Handle from; struct Memory *next; } Memory;
typedef struct { Memory *memory; unsigned flags; } Event;
typedef struct Action { int what; uint64_t to, from, size; Memory *event; struct Action *next; } Action;
typedef struct { pthread_t thread; pthread_mutex_t lock; pthread_cond_t changed; Action *first, *last; int capturing; } Stream;

static const uint64_t MAGIC = 0x6b76746965726370;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Memory *memories;
static int initialized, retained;
static unsigned pending;  // actions in streams that are not done
static __thread int depth;
static __thread int mode;

#define IN_CONTEXT if (!initialized) return NOT_INITIALIZED; if (!depth) return NO_CONTEXT
#define API __attribute__((visibility("default"))) int

static Memory *add(char *at, size_t size, int fd, int kind) {
    Memory *made = calloc(1, sizeof *made);
    *made = (Memory){at, size, fd, 1, kind, {0}, NULL};
    pthread_mutex_lock(&lock);
    made->next = memories, memories = made;
    pthread_mutex_unlock(&lock);
    return made;
}

static Memory *find(uint64_t address) {
    pthread_mutex_lock(&lock);
    Memory *found = memories;
    while (found && !(address >= (uint64_t)found->at && address < (uint64_t)found->at + found->size)) found = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

static void take_out(Memory *memory) {  // with the lock held
    Memory **link = &memories;
    while (*link != memory) link = &(*link)->next;
    *link = memory->next;
}

static void free_memory(Memory *memory) {
    if (memory->fd >= 0) munmap(memory->at, memory->size), close(memory->fd);
    free(memory);
}

static void forget(Memory *memory) {
    pthread_mutex_lock(&lock);
    take_out(memory);
    pthread_mutex_unlock(&lock);
    free_memory(memory);
}

static void leave(Memory *memory) {  // freed with its last user
    pthread_mutex_lock(&lock);
    int left = --memory->users;
    if (!left) take_out(memory);
    pthread_mutex_unlock(&lock);
    if (!left) free_memory(memory);
}

static Memory *create(size_t size) {
    int fd = memfd_create("kvtier-fake-cuda", MFD_CLOEXEC);
    size = (size + 4095) & ~4095ul;
    if (ftruncate(fd, size)) return NULL;
    return add(mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), size, fd, DEVICE);
}

static void name(Memory *memory, Handle *handle) {
    struct stat found;
    fstat(memory->fd, &found);
    *handle = (Handle){MAGIC, getpid(), memory->fd, found.st_ino, memory->size, {0}};
}

static int open_named(const Handle *handle, Memory **opened) {
    char path[64];
    struct stat found;
    if (handle->magic != MAGIC) return INVALID_VALUE;
    if (handle->pid == (uint64_t)getpid()) return NO_CONTEXT;
    pthread_mutex_lock(&lock);
    Memory *known = memories;
    while (known && memcmp(&known->from, handle, sizeof *handle)) known = known->next;
    if (known) known->users++;
    pthread_mutex_unlock(&lock);
    if (known) return *opened = known, OK;
    snprintf(path, sizeof path, "/proc/%lu/fd/%lu", handle->pid, handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return INVALID_HANDLE;
    if (fstat(fd, &found) || found.st_ino != handle->inode) return close(fd), MAP_FAILED_;
    *opened = add(mmap(NULL, handle->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), handle->size, fd, DEVICE);
    (*opened)->from = *handle;
    return OK;
}

API cuInit(unsigned flags) { return initialized = !flags, flags ? INVALID_VALUE : OK; }
API cuDriverGetVersion(int *version) { return *version = 12080, OK; }
API cuDeviceGetCount(int *count) { return *count = 1, initialized ? OK : NOT_INITIALIZED; }
API cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal ? 101 : OK; }
API cuDeviceGetUuid(char *uuid, int device) { return memcpy(uuid, "kvtier fake cuda", 16), device ? 101 : OK; }
API cuDevicePrimaryCtxRetain(void **context, int device) { return retained++, *context = &retained, device ? 101 : OK; }
API cuDevicePrimaryCtxRelease(int device) { return retained-- > 0 ? OK : NO_CONTEXT; }
API cuCtxPushCurrent(void *context) { return context == &retained && retained ? (depth++, OK) : NO_CONTEXT; }
API cuCtxPopCurrent(void **context) { IN_CONTEXT; return depth--, *context = &retained, OK; }
API cuThreadExchangeStreamCaptureMode(int *exchanged) { int before = mode; return mode = *exchanged, *exchanged = before, OK; }
API cuCtxGetStreamPriorityRange(int *least, int *greatest) { IN_CONTEXT; return *least = 0, *greatest = -5, OK; }

API cuMemAlloc(uint64_t *at, size_t size) { IN_CONTEXT; return *at = (uint64_t)create(size)->at, OK; }
API cuMemFree(uint64_t at) {  // waits for all actions, as the real one does
    IN_CONTEXT;
    while (__atomic_load_n(&pending, __ATOMIC_ACQUIRE)) usleep(50);
    Memory *memory = find(at);
    return memory && at == (uint64_t)memory->at ? (forget(memory), OK) : INVALID_VALUE;
}
API cuMemAllocHost(void **at, size_t size) { IN_CONTEXT; Memory *made = create(size); return made->kind = HOST, *at = made->at, OK; }
API cuMemAllocManaged(uint64_t *at, size_t size, unsigned flags) {
    IN_CONTEXT;
    Memory *made = create(size);
    return made->kind = MANAGED, *at = (uint64_t)made->at, OK;
}
API cuMemAllocAsync(uint64_t *at, size_t size, void *stream) {
    IN_CONTEXT;
    Memory *made = create(size);
    return made->kind = POOL, *at = (uint64_t)made->at, OK;
}
API cuMemFreeHost(void *at) { return cuMemFree((uint64_t)at); }
API cuMemHostRegister(void *at, size_t size, unsigned flags) {
    IN_CONTEXT;
    if ((uint64_t)at % 4096 || size % 4096 || flags != 3) return INVALID_VALUE;
    if (find((uint64_t)at)) return ALREADY_REGISTERED;
    return add(at, size, -1, HOST), OK;
}
API cuMemHostRegister_v2(void *at, size_t size, unsigned flags) { return cuMemHostRegister(at, size, flags); }
API cuMemHostUnregister(void *at) {
    IN_CONTEXT;
    Memory *memory = find((uint64_t)at);
    return memory && memory->fd < 0 && memory->at == at ? (forget(memory), OK) : NOT_REGISTERED;
}
API cuMemHostGetDevicePointer(uint64_t *at, void *host, unsigned flags) {
    IN_CONTEXT;
    Memory *memory = find((uint64_t)host);
    return *at = (uint64_t)host, memory && memory->kind == HOST && !flags ? OK : INVALID_VALUE;
}
API cuMemGetAddressRange(uint64_t *base, size_t *size, uint64_t address) {
    IN_CONTEXT;
    Memory *memory = find(address);
    if (!memory) return INVALID_VALUE;
    return *base = (uint64_t)memory->at, *size = memory->size, OK;
}
API cuPointerGetAttribute(void *data, int attribute, uint64_t address) {
    IN_CONTEXT;
    Memory *memory = find(address);
    if (!memory) return INVALID_VALUE;
    switch (attribute) {
        case 2: return *(unsigned *)data = memory->kind == HOST ? HOST : DEVICE, OK;
        case 8: return *(unsigned *)data = memory->kind == MANAGED, OK;
        case 10: return *(char *)data = memory->kind == DEVICE, OK;
        case 17: return *(void **)data = memory->kind == POOL ? memory : NULL, OK;
        default: return INVALID_VALUE;
    }
}

API cuIpcGetMemHandle(Handle *handle, uint64_t base) {
    IN_CONTEXT;
    Memory *memory = find(base);
    return memory && (uint64_t)memory->at == base && memory->kind == DEVICE ? (name(memory, handle), OK) : INVALID_VALUE;
}
API cuIpcOpenMemHandle(uint64_t *at, Handle handle, unsigned flags) {
    IN_CONTEXT;
    Memory *memory = NULL;
    int code = flags == 1 ? open_named(&handle, &memory) : INVALID_VALUE;
    return *at = memory ? (uint64_t)memory->at : 0, code;
}
API cuIpcCloseMemHandle(uint64_t at) {
    IN_CONTEXT;
    Memory *memory = find(at);
    if (!memory || (uint64_t)memory->at != at || !memory->from.magic) return INVALID_VALUE;
    return leave(memory), OK;
}

static volatile Counters *counters(Memory *event) { return (volatile Counters *)event->at; }

API cuEventCreate(Event **event, unsigned flags) {
    IN_CONTEXT;
    *event = malloc(sizeof **event);
    **event = (Event){create(sizeof(Counters)), flags};
    return OK;
}
API cuEventDestroy(Event *event) { IN_CONTEXT; return leave(event->memory), free(event), OK; }
API cuEventQuery(Event *event) { IN_CONTEXT; return counters(event->memory)->reached >= counters(event->memory)->recorded ? OK : NOT_READY; }
API cuEventSynchronize(Event *event) {
    IN_CONTEXT;
    while (counters(event->memory)->reached < counters(event->memory)->recorded) usleep(50);
    return OK;
}
API cuIpcGetEventHandle(Handle *handle, Event *event) {
    IN_CONTEXT;
    return event->flags == (2 | 4) ? (name(event->memory, handle), OK) : INVALID_HANDLE;  // DISABLE_TIMING, INTERPROCESS
}
API cuIpcOpenEventHandle(Event **event, Handle handle) {
    IN_CONTEXT;
    Memory *memory;
    int code = open_named(&handle, &memory);
    if (code == OK) *event = malloc(sizeof **event), **event = (Event){memory, 2 | 4};
    return code;
}

enum { COPY, REACH, WAIT, END };

static void *work(void *argument) {
    Stream *stream = argument;
    for (;;) {
        pthread_mutex_lock(&stream->lock);
        while (!stream->first) pthread_cond_wait(&stream->changed, &stream->lock);
        Action *next = stream->first;
        if (!(stream->first = next->next)) stream->last = NULL;
        pthread_mutex_unlock(&stream->lock);
        Action action = *next;
        free(next);
        if (action.what == COPY) memcpy((void *)action.to, (void *)action.from, action.size);
        if (action.what == REACH) counters(action.event)->reached = action.from, leave(action.event);
        if (action.what == WAIT) while (*(volatile uint64_t *)action.to < action.from) usleep(50);
        __atomic_sub_fetch(&pending, 1, __ATOMIC_RELEASE);
        if (action.what == END) return free(stream), NULL;
    }
}

static int give(Stream *stream, Action action) {
    Action *given = malloc(sizeof *given);
    *given = action;
    __atomic_add_fetch(&pending, 1, __ATOMIC_RELEASE);
    pthread_mutex_lock(&stream->lock);
    if (stream->last) stream->last->next = given; else stream->first = given;
    stream->last = given;
    pthread_cond_signal(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return OK;
}

API cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    IN_CONTEXT;
    if (flags != 1 || priority) return INVALID_VALUE;
    *stream = calloc(1, sizeof **stream);
    pthread_mutex_init(&(*stream)->lock, NULL), pthread_cond_init(&(*stream)->changed, NULL);
    return pthread_create(&(*stream)->thread, NULL, work, *stream);
}
API cuStreamDestroy(Stream *stream) {
    IN_CONTEXT;
    pthread_detach(stream->thread);
    return give(stream, (Action){END});  // after all its actions, without waiting
}
API cuStreamIsCapturing(Stream *stream, int *status) { IN_CONTEXT; return *status = stream->capturing, OK; }
API cuStreamBeginCapture(Stream *stream, int how) { IN_CONTEXT; return stream->capturing = 1, OK; }
API cuStreamEndCapture(Stream *stream, void **graph) { IN_CONTEXT; return stream->capturing = 0, *graph = NULL, OK; }
API cuEventRecord(Event *event, Stream *stream) {
    IN_CONTEXT;
    if (stream->capturing) return OK;  // recorded into the graph only
    pthread_mutex_lock(&lock);
    event->memory->users++;  // the record outlives the event
    pthread_mutex_unlock(&lock);
    return give(stream, (Action){REACH, 0, ++counters(event->memory)->recorded, 0, event->memory});
}
API cuStreamWaitValue64(Stream *stream, uint64_t at, uint64_t value, unsigned flags) {
    IN_CONTEXT;
    return flags ? INVALID_VALUE : give(stream, (Action){WAIT, at, value});
}
API cuMemcpyAsync(uint64_t to, uint64_t from, size_t size, Stream *stream) {
    IN_CONTEXT;
    return stream ? give(stream, (Action){COPY, to, from, size}) : INVALID_VALUE;
}
API cuMemcpyHtoD(uint64_t to, const void *from, size_t size) { IN_CONTEXT; return memcpy((void *)to, from, size), OK; }
API cuMemcpyDtoH(void *to, uint64_t from, size_t size) { IN_CONTEXT; return memcpy(to, (void *)from, size), OK; }

typedef struct { int order, from[2], to[2]; unsigned flags; } Attributes;

API cuMemcpyBatchAsync(uint64_t *to, uint64_t *from, size_t *sizes, size_t count, Attributes *attributes, size_t *indices,
                       size_t kinds, size_t *failed, Stream *stream) {
    IN_CONTEXT;
    *failed = (size_t)-1;
    if (!count || kinds != 1 || indices[0] || attributes->order != 1 || attributes->flags > 1 || !stream) return INVALID_VALUE;
    for (size_t index = 0; index < count; index++) {
        if (!sizes[index]) return *failed = index, INVALID_VALUE;
        give(stream, (Action){COPY, to[index], from[index], sizes[index]});
    }
    return OK;
}

API cuGetProcAddress(const char *symbol, void **found, int version, uint64_t flags, int *status) {
    int too_new = !strcmp(symbol, "cuMemcpyBatchAsync") && version != 12080;
    Dl_info here;
    dladdr(&cuInit, &here);
    *found = too_new ? NULL : dlsym(dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD), symbol);
    if (status) *status = *found ? 0 : 1;
    return OK;
}
API cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags, int *status) {
    return cuGetProcAddress(symbol, found, version, flags, status);
}
