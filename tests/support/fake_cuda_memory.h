/* The memory of fake GPUs that all processes of a test use, as /proc says; included by fake_cuda.c. */
/* Whether a link of /proc names an allocation of this tag; which GPU's, how long, and its handle types. */
static int is_ours(const char *link, int *gpu, size_t *size, int *types) {
    char prefix[200];
    snprintf(prefix, sizeof prefix, "/memfd:fake-cuda:%s:", tag());
    size_t n = strlen(prefix);
    return strncmp(link, prefix, n) == 0 && sscanf(link + n, "%d:%zu:%d", gpu, size, types) == 3;
}

static size_t used(int gpu) {
    static __thread ino_t seen[MAX_FILES];
    int count = 0;
    size_t total = 0;
    DIR *proc = opendir("/proc");
    struct dirent *process;
    while (proc && (process = readdir(proc))) {
        char path[600], link[600], line[1000];
        if (process->d_name[0] < '0' || process->d_name[0] > '9') continue;
        if (is("FAKE_CUDA_ALONE", "1") && atoi(process->d_name) != getpid()) continue;
        ino_t found[2];
        snprintf(path, sizeof path, "/proc/%s/fd", process->d_name);
        DIR *fds = opendir(path);
        struct dirent *fd;
        snprintf(path, sizeof path, "/proc/%s/maps", process->d_name);
        FILE *maps = fopen(path, "r");
        for (;;) {
            int whose, types;
            size_t size;
            if (fds && (fd = readdir(fds))) {
                struct stat stat_of;
                snprintf(path, sizeof path, "/proc/%s/fd/%s", process->d_name, fd->d_name);
                ssize_t n = readlink(path, link, sizeof link - 1);
                if (n < 0) continue;
                link[n] = 0;
                if (!is_ours(link, &whose, &size, &types) || stat(path, &stat_of)) continue;
                found[0] = stat_of.st_ino;
            } else if (maps && fgets(line, sizeof line, maps)) {
                char *name = strstr(line, "/memfd:fake-cuda:");
                unsigned long inode;
                if (!name || !is_ours(name, &whose, &size, &types) || sscanf(line, "%*s %*s %*s %*s %lu", &inode) != 1) continue;
                found[0] = inode;
            } else {
                break;
            }
            int known = whose != gpu;
            for (int i = 0; i < count && !known; i++) known = seen[i] == found[0];
            if (!known && count < MAX_FILES) {
                seen[count++] = found[0];
                total += size;
            }
        }
        if (fds) closedir(fds);
        if (maps) fclose(maps);
    }
    if (proc) closedir(proc);
    return total;
}
