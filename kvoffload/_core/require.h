/* Assertions of the debug build (KVOFFLOAD_DEBUG=1); other builds have none. */
#ifndef KVOFFLOAD_REQUIRE_H
#define KVOFFLOAD_REQUIRE_H

#ifdef KVOFFLOAD_DEBUG
#include <stdio.h>
#include <stdlib.h>
static inline void kvo_broken(const char *invariant, const char *file, int line) {
    fprintf(stderr, "kvoffload: %s:%d: broken: %s\n", file, line, invariant);
    abort();
}
#define kvo_require(holds, invariant)                                                              \
    do {                                                                                           \
        if (!(holds))                                                                              \
            kvo_broken((invariant), __FILE__, __LINE__);                                           \
    } while (0)
#else
#define kvo_require(holds, invariant) ((void)sizeof(invariant))
#endif

#endif
