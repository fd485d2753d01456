/* A model step's shadow: layers one after the other, each a fixed amount of work in tiles that native threads take in turn. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/prctl.h>

#define MAX_THREADS 64
#define MAX_LAYERS 256
#define SPINS 4000

static atomic_int next_tile[MAX_LAYERS], num_done[MAX_LAYERS];
static int num_layers, num_tiles;
static long num_rounds;
static atomic_ulong sink;

static void work(void) {
    unsigned long value = 1;
    for (int layer = 0; layer < num_layers; ++layer) {
        while (atomic_fetch_add(&next_tile[layer], 1) < num_tiles) {
            for (long round = 0; round < num_rounds; ++round)
                value = value * 6364136223846793005UL + 1442695040888963407UL;
            atomic_fetch_add(&num_done[layer], 1);
        }
        for (int spin = 0; atomic_load(&num_done[layer]) < num_tiles; ++spin)
            if (spin > SPINS)
                sched_yield();
    }
    atomic_fetch_add(&sink, value);
}

static void *help(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "burn");
    work();
    return 0;
}

/* Returns the threads that took part, the caller among them, when all layers are done. */
int burn(int threads, int layers, int tiles, long rounds) {
    pthread_t helpers[MAX_THREADS];
    int started = 0;
    num_layers = layers < MAX_LAYERS ? layers : MAX_LAYERS;
    num_tiles = tiles;
    num_rounds = rounds;
    for (int layer = 0; layer < num_layers; ++layer) {
        atomic_store(&next_tile[layer], 0);
        atomic_store(&num_done[layer], 0);
    }
    while (started < threads - 1 && started < MAX_THREADS && !pthread_create(&helpers[started], 0, help, 0))
        ++started;
    work();
    for (int index = 0; index < started; ++index)
        pthread_join(helpers[index], 0);
    return started + 1;
}
