/* Loads the codecs' libraries, which stay loaded until the process ends, and fills the table of
 * their functions. */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "codec/library.h"

struct mqd_codec_functions mqd_codec_functions;

static const char *const file_names[] = {"", "libz.so.1", "libsnappy.so.1", "liblz4.so.1", "libzstd.so.1"};
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool available[MQD_CODEC_ZSTD + 1];

static void open_all(void)
{
    void *handle;
    bool complete;
#define FIND(result, name, parameters)                                                                                 \
    {                                                                                                                  \
        void *function = dlsym(handle, #name);                                                                         \
        memcpy(&mqd_codec_functions.name, &function, sizeof function);                                                 \
        complete = complete && function;                                                                               \
    }
#define OPEN(codec, FUNCTIONS)                                                                                         \
    handle = dlopen(file_names[codec], RTLD_NOW | RTLD_LOCAL);                                                         \
    complete = handle != NULL;                                                                                         \
    if (handle) {                                                                                                      \
        FUNCTIONS(FIND)                                                                                                \
    }                                                                                                                  \
    available[codec] = complete;
    OPEN(MQD_CODEC_GZIP, MQD_ZLIB_FUNCTIONS)
    OPEN(MQD_CODEC_SNAPPY, MQD_SNAPPY_FUNCTIONS)
    OPEN(MQD_CODEC_LZ4, MQD_LZ4_FUNCTIONS)
    OPEN(MQD_CODEC_ZSTD, MQD_ZSTD_FUNCTIONS)
#undef OPEN
#undef FIND
}

bool mqd_codec_available(uint8_t codec)
{
    pthread_once(&once, open_all);
    return codec <= MQD_CODEC_ZSTD && available[codec];
}

const char *mqd_codec_library(uint8_t codec)
{
    return codec <= MQD_CODEC_ZSTD ? file_names[codec] : "";
}
