/* Address space that is reserved at once and gets memory page by page as it is touched. */
#ifndef KVOFFLOAD_MEMORY_H
#define KVOFFLOAD_MEMORY_H

#ifdef _WIN32
#error "kvoffload's extensions need mmap; on Windows the package is pure Python"
#endif

#include <stddef.h>
#include <sys/mman.h>

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

/* Huge pages win on tables far beyond the caches, and cost resident memory on small ones. Where
 * address space is reserved for more than a host can hold it is filled thinly: each page touched
 * would be cleared whole for a few bytes. */
#define KVO_HUGE_PAGE_FROM ((size_t)64 << 20)
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

#endif
