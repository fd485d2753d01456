// Runs the CPU library where sanitizers watch: driver (operations | batches | threads) ISA SEED COUNT
#include <algorithm>
#include <thread>

#include "batches.h"
#include "operations.h"

namespace {

using PoolHandle = std::unique_ptr<pdm_pool, void (*)(pdm_pool *)>;

PoolHandle make_pool(int num_threads) {
    PoolHandle pool(pdm_pool_create(num_threads, nullptr), pdm_pool_destroy);
    REQUIRE(pool, "%d threads", num_threads);
    return pool;
}

template <typename Kind>
void run(int isa, uint64_t seed, int count) {
    for (const int num_threads : {1, 3}) {
        const PoolHandle pool = make_pool(num_threads);
        Kind kind(pool.get(), isa, seed);
        kind.run(count);
        printf("%d threads: %ld done, %ld refused\n", num_threads, kind.num_done, kind.num_refused);
        REQUIRE(kind.num_done && kind.num_refused, "nothing was tested");
    }
}

// Bytes of a step's results and of the KV that it left.
std::vector<uint8_t> life(const Weights &weights, int isa, uint64_t seed, int num_threads) {
    Random random(seed);
    Model model(weights, isa, random);
    for (auto &blocks : model.pools) memset(blocks->data(), 0, blocks->size());
    std::vector<uint8_t> results;
    const auto keep = [&](const void *data, size_t num_bytes) {
        const uint8_t *const bytes = static_cast<const uint8_t *>(data);
        results.insert(results.end(), bytes, bytes + num_bytes);
    };
    for (int round = 0; round < 3; round++) {
        const PoolHandle pool = make_pool(num_threads);
        for (int i = 0; i < 3; i++) {
            Step step(weights.shape, random);
            REQUIRE(!model.run(pool.get(), step.batch, step.logits->data(), step.best->data()), "%s", pdm_last_error());
            keep(step.logits->data(), step.logits->size() * sizeof(float));
            keep(step.best->data(), step.best->size() * sizeof(int32_t));
        }
    }
    for (auto &blocks : model.pools) keep(blocks->data(), blocks->size());
    return results;
}

// Programs with pools of their own at the same time, on weights that they share: each gives what it gives alone.
void threads(int isa, uint64_t seed, int count) {
    Random random(seed);
    for (int i = 0; i < count; i++) {
        const Weights weights(any_shape(random), random);
        const uint64_t step_seed = random.engine();
        const std::vector<uint8_t> alone = life(weights, isa, step_seed, 1);
        std::vector<std::vector<uint8_t>> found(4);
        std::vector<std::thread> services;
        for (size_t service = 0; service < found.size(); service++)
            services.emplace_back([&, service] { found[service] = life(weights, isa, step_seed, int(service) + 1); });
        for (std::thread &service : services) service.join();
        for (size_t service = 0; service < found.size(); service++)
            REQUIRE(found[service] == alone, "%zu threads give something else than one, format %d", service + 1, weights.shape.format);
    }
    for (int i = 0; i < count; i++) make_pool(1 + i % 5);
    printf("%d models, each 5 times the same\n", count);
}

}  // namespace

int main(int argc, char **argv) {
    REQUIRE(argc == 5, "driver (operations | batches | threads) ISA SEED COUNT");
    const std::string what = argv[1];
    const int isa = atoi(argv[2]), count = atoi(argv[4]);
    const uint64_t seed = strtoull(argv[3], nullptr, 10);
    if (what == "operations")
        run<Operations>(isa, seed, count);
    else if (what == "batches")
        run<Batches>(isa, seed, count);
    else if (what == "threads")
        threads(isa, seed, count);
    else
        REQUIRE(false, "%s", what.c_str());
    return 0;
}
