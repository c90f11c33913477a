/* Lets fsync and fdatasync fail while the file named by FAULTS_SYNC begins with 1. Loaded with LD_PRELOAD. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static int fails(void) {
    const char *path = getenv("FAULTS_SYNC");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    char found = '0';
    if (fd < 0) return 0;
    if (read(fd, &found, 1) != 1) found = '0';
    close(fd);
    return found == '1';
}

int fsync(int fd) {
    if (fails()) return errno = EIO, -1;
    return (int)syscall(SYS_fsync, fd);
}

int fdatasync(int fd) {
    if (fails()) return errno = EIO, -1;
    return (int)syscall(SYS_fdatasync, fd);
}
