/* A HIP runtime without a device, for tests: the functions that Carom calls, with the signatures and error codes of
 * include/hip/hip_runtime_api.h of https://github.com/ROCm/HIP. Copies are done at once. */
#include <stddef.h>
#include <string.h>

typedef int hipError_t;
enum { hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorOutOfMemory = 2, hipErrorInvalidHandle = 400,
       hipErrorNotReady = 600, hipErrorHostMemoryAlreadyRegistered = 712, hipErrorHostMemoryNotRegistered = 713,
       hipErrorLaunchFailure = 719 };
enum { hipEventDisableTiming = 2, hipMemcpyDefault = 4, MOST = 64 };
struct event { int made, recorded; };

static __thread hipError_t last;
static struct event events[MOST];
static void *pinned[MOST];
static char failing[64];
static hipError_t failure;

/* For the tests: let the function `name` fail with `code`; how many events are alive; the version built. */
void standInFail(const char *name, hipError_t code) { strncpy(failing, name, sizeof failing - 1); failure = code; }
int standInEvents(void) { int n = 0; for (int i = 0; i < MOST; i++) n += events[i].made; return n; }
hipError_t hipRuntimeGetVersion(int *version) { *version = VERSION; return hipSuccess; }

static hipError_t give(const char *name, hipError_t code) {
    if (!strcmp(name, failing)) code = failure;
    if (code) last = code;
    return code;
}
static int valid(struct event *event) { return event >= events && event < events + MOST && event->made; }

hipError_t hipGetLastError(void) { hipError_t code = last; last = hipSuccess; return code; }
const char *hipGetErrorName(hipError_t code) {
    switch (code) {
    case hipErrorInvalidValue: return "hipErrorInvalidValue";
    case hipErrorOutOfMemory: return "hipErrorOutOfMemory";
    case hipErrorInvalidHandle: return "hipErrorInvalidHandle";
    case hipErrorNotReady: return "hipErrorNotReady";
    case hipErrorHostMemoryAlreadyRegistered: return "hipErrorHostMemoryAlreadyRegistered";
    case hipErrorHostMemoryNotRegistered: return "hipErrorHostMemoryNotRegistered";
    case hipErrorLaunchFailure: return "hipErrorLaunchFailure";
    default: return "hipErrorUnknown";
    }
}
hipError_t hipHostRegister(void *host, size_t size, unsigned flags) {
    for (int i = 0; i < MOST; i++) if (pinned[i] == host) return give("hipHostRegister", hipErrorHostMemoryAlreadyRegistered);
    hipError_t code = give("hipHostRegister", size && !flags ? hipSuccess : hipErrorInvalidValue);
    for (int i = 0; !code && i < MOST; i++) if (!pinned[i]) { pinned[i] = host; break; }
    return code;
}
hipError_t hipHostUnregister(void *host) {
    for (int i = 0; i < MOST; i++) if (host && pinned[i] == host) { pinned[i] = NULL; return give("hipHostUnregister", hipSuccess); }
    return give("hipHostUnregister", hipErrorHostMemoryNotRegistered);
}
hipError_t hipHostGetDevicePointer(void **device, void *host, unsigned flags) {
    for (int i = 0; i < MOST; i++) if (host && pinned[i] == host) { *device = host; return give("hipHostGetDevicePointer", hipSuccess); }
    return give("hipHostGetDevicePointer", hipErrorInvalidValue);
}
hipError_t hipMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    hipError_t code = give("hipMemcpyAsync", kind == hipMemcpyDefault && stream ? hipSuccess : hipErrorInvalidValue);
    if (!code) memcpy(to, from, size);
    return code;
}
hipError_t hipEventCreateWithFlags(struct event **event, unsigned flags) {
    hipError_t code = give("hipEventCreateWithFlags", flags == hipEventDisableTiming ? hipSuccess : hipErrorInvalidValue);
    for (int i = 0; !code && i < MOST; i++) if (!events[i].made) { events[i].made = 1; *event = &events[i]; return code; }
    return code ? code : give("hipEventCreateWithFlags", hipErrorOutOfMemory);
}
hipError_t hipEventDestroy(struct event *event) {
    if (!valid(event)) return give("hipEventDestroy", hipErrorInvalidHandle);
    event->made = event->recorded = 0;
    return give("hipEventDestroy", hipSuccess);
}
hipError_t hipEventRecord(struct event *event, void *stream) {
    hipError_t code = give("hipEventRecord", valid(event) && stream ? hipSuccess : hipErrorInvalidHandle);
    if (!code) event->recorded = 1;
    return code;
}
hipError_t hipStreamWaitEvent(void *stream, struct event *event, unsigned flags) {
    return give("hipStreamWaitEvent", valid(event) && stream && !flags ? hipSuccess : hipErrorInvalidHandle);
}
hipError_t hipEventQuery(struct event *event) { return give("hipEventQuery", valid(event) ? hipSuccess : hipErrorInvalidHandle); }
hipError_t hipEventSynchronize(struct event *event) { return give("hipEventSynchronize", valid(event) ? hipSuccess : hipErrorInvalidHandle); }
