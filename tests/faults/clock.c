/* Moves the wall clock of a process: the seconds that lie in the file named by FAULTS_CLOCK are added to it.
 * CLOCK_MONOTONIC is as it was. Loaded with LD_PRELOAD by tests/faults. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long long *moved_by;
static char from[4096]; /* the variable's text: a forked program (tests/support/forked.py) has another one */

static void begin(void) {
    const char *path = getenv("FAULTS_CLOCK");
    if (!path || !strcmp(path, from)) return;
    strncpy(from, path, sizeof from - 1);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    void *found = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *moved_by, PROT_READ, MAP_SHARED, fd, 0);
    moved_by = found == MAP_FAILED ? NULL : found;
    if (fd >= 0) close(fd);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int status = (int)syscall(SYS_clock_gettime, id, now);
    begin();
    if (!status && moved_by && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *moved_by;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return status;
}

time_t time(time_t *into) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (into) *into = found.tv_sec;
    return found.tv_sec;
}
