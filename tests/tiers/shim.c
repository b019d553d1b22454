/* The system calls that threads of a pool make, with an error for those that a file names. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* The file KVO_FAULT holds "call errno size": calls on files of that many bytes or more fail. */
static int fault(const char *name, int fd) {
    char line[64] = "", call[16];
    int number;
    long size;
    struct stat status;
    FILE *file = fopen(getenv("KVO_FAULT"), "r");
    if (!file)
        return 0;
    if (!fgets(line, sizeof line, file))
        line[0] = 0;
    fclose(file);
    if (sscanf(line, "%15s %d %ld", call, &number, &size) != 3 || strcmp(call, name))
        return 0;
    if (fstat(fd, &status) || status.st_size < size)
        return 0;
    errno = number;
    return 1;
}
#define WRAP(name, arguments, values)                                                              \
    ssize_t name arguments {                                                                       \
        ssize_t(*next) arguments = (ssize_t(*) arguments)dlsym(RTLD_NEXT, #name);                  \
        return fault(#name, fd) ? -1 : next values;                                                \
    }
WRAP(preadv, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
WRAP(pwritev, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
WRAP(preadv64, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at))
WRAP(pwritev64, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at))
WRAP(pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at))
WRAP(pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at))
