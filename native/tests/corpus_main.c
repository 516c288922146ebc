/* Replays files (or all files of folders) through a fuzz harness that was built without libFuzzer. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        return -1;
    }
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    uint8_t *bytes = malloc(size > 0 ? (size_t)size : 1); /* exact size: an overrun by one byte must be detected */
    size_t got = fread(bytes, 1, (size_t)size, file);
    fclose(file);
    LLVMFuzzerTestOneInput(bytes, got);
    free(bytes);
    return 0;
}

static int replay(const char *path, int *count)
{
    struct stat status;
    if (stat(path, &status) != 0) {
        perror(path);
        return -1;
    }
    if (!S_ISDIR(status.st_mode)) {
        ++*count;
        return replay_file(path);
    }
    DIR *folder = opendir(path);
    if (!folder) {
        perror(path);
        return -1;
    }
    int result = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        char name[4096];
        if (entry->d_name[0] == '.')
            continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        result |= replay(name, count);
    }
    closedir(folder);
    return result;
}

int main(int argc, char **argv)
{
    int count = 0;
    int result = 0;
    for (int i = 1; i < argc; i++)
        result |= replay(argv[i], &count);
    LLVMFuzzerTestOneInput((const uint8_t *)"", 0);
    const char *name = strrchr(argv[0], '/');
    printf("%s: %d passed, %d failed\n", name ? name + 1 : argv[0], count, result ? 1 : 0);
    return result || !count ? 1 : 0; /* an empty corpus is a mistake */
}
