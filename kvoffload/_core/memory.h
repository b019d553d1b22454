/* Address space that is reserved at once and gets memory page by page when it is touched; and, in
 * builds for tests, allocations that are refused. */
#ifndef KVOFFLOAD_MEMORY_H
#define KVOFFLOAD_MEMORY_H

#ifdef _WIN32
#error "kvoffload's extensions need mmap; on Windows the package is pure Python"
#endif

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

/* Huge pages save page-table walks when nodes are visited out of order. They waste up to one page
 * per table, so small tables do without. So do reservations larger than a host's memory, which are
 * filled sparsely: each touched page would be cleared whole. */
#define KVO_HUGE_PAGE_FROM ((size_t)4 << 20)
#define KVO_HUGE_PAGE_TO ((size_t)4 << 30)

static inline void *kvo_map(size_t bytes) {
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        return NULL;
#ifdef MADV_HUGEPAGE
    if (bytes >= KVO_HUGE_PAGE_FROM && bytes <= KVO_HUGE_PAGE_TO)
        (void)madvise(address, bytes, MADV_HUGEPAGE);
#endif
    return address;
}

static inline void kvo_unmap(void *address, size_t bytes) { munmap(address, bytes); }

/* Whether an allocation is refused, which happens only in builds for tests (setup.py). */
#ifdef KVOFFLOAD_REFUSE_ALLOCATIONS
/* Allocations that still succeed; negative: all of them. Set by tests/allocations.py. */
__attribute__((visibility("default"))) int64_t kvo_allocations_left = -1;

static inline int kvo_refused(void) {
    if (kvo_allocations_left > 0)
        kvo_allocations_left--;
    else if (kvo_allocations_left == 0)
        return 1;
    return 0;
}
#else
#define kvo_refused() 0
#endif

#endif
