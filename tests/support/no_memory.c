/* Memory that does not come: allocating a memory file whose name has "hungry" in it waits until a file is gone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int (*allocate)(int, long, long);

static void wait_for_memory(int fd) {
    char link[64], name[256];
    const char *held = getenv("NO_MEMORY_WHILE");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, name, sizeof name - 1);
    if (held == NULL || n <= 0) return;
    name[n] = 0;
    while (strstr(name, "hungry") != NULL && access(held, F_OK) == 0) usleep(10000);
}

int posix_fallocate(int fd, long at, long n) {
    wait_for_memory(fd);
    return ((allocate)dlsym(RTLD_NEXT, "posix_fallocate"))(fd, at, n);
}

int posix_fallocate64(int fd, long at, long n) {
    wait_for_memory(fd);
    return ((allocate)dlsym(RTLD_NEXT, "posix_fallocate64"))(fd, at, n);
}
