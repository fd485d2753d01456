// Steps over random sequences, right ones and ones that lie.
#pragma once

#include <set>

#include "model.h"

// Everything that a step's batch points to, exactly sized.
struct Step {
    Step(const Shape &shape, Random &random) : shape(shape) {
        // Blocks are dealt without regard to their content: what lies in them from before is as good as any.
        std::vector<int> starts = {0}, contexts;
        const int num_sequences = random.between(1, std::min(6, shape.num_blocks));
        int width = 1;
        for (int sequence = 0; sequence < num_sequences; sequence++) {
            const int most = shape.num_blocks / num_sequences * shape.block_size;
            const int total = random.between(1, std::max(1, most));
            const int length = random.once_in(8) ? 0 : random.once_in(2) ? 1 : random.between(1, std::min(total, 90));
            contexts.push_back(total - std::min(length, total));
            starts.push_back(starts.back() + std::min(length, total));
            width = std::max(width, (total + shape.block_size - 1) / shape.block_size + random.between(0, 2));
        }
        if (starts.back() == 0) {
            starts.back() = 1;
            contexts.back() = 0;
        }
        make(random, starts, contexts, width);
    }

    pdm_batch batch{};
    const Shape shape;
    std::unique_ptr<Exact<int64_t>> tokens, positions, starts, contexts, logits_index;
    std::unique_ptr<Exact<int32_t>> tables[2], best;
    std::unique_ptr<Exact<const int32_t *>> table_list;
    std::unique_ptr<Exact<float>> logits;
    std::set<int> written[2];  // blocks that the step may change

  private:
    void make(Random &random, const std::vector<int> &start, const std::vector<int> &context, int width) {
        const size_t num_sequences = context.size(), num_tokens = size_t(start.back());
        const int num_logits = random.between(0, int(num_tokens));
        tokens = std::make_unique<Exact<int64_t>>(num_tokens, random.guard());
        positions = std::make_unique<Exact<int64_t>>(num_tokens, random.guard());
        starts = std::make_unique<Exact<int64_t>>(num_sequences + 1, random.guard());
        contexts = std::make_unique<Exact<int64_t>>(num_sequences, random.guard());
        logits_index = std::make_unique<Exact<int64_t>>(size_t(num_logits), random.guard());
        logits = std::make_unique<Exact<float>>(size_t(num_logits) * size_t(shape.vocabulary), random.guard());
        best = std::make_unique<Exact<int32_t>>(size_t(num_logits), random.guard());
        table_list = std::make_unique<Exact<const int32_t *>>(2, random.guard());
        for (int64_t &token : *tokens) token = random.between(0, shape.vocabulary - 1);
        for (int64_t &index : *logits_index) index = random.between(0, int(num_tokens) - 1);
        std::copy(start.begin(), start.end(), starts->begin());
        std::copy(context.begin(), context.end(), contexts->begin());
        for (int group = 0; group < 2; group++) {
            tables[group] = std::make_unique<Exact<int32_t>>(num_sequences * size_t(width), random.guard());
            (*table_list)[size_t(group)] = tables[group]->data();
            fill_tables(random, group, width);
        }
        batch = {int(num_tokens), int(num_sequences), width, 2, tokens->data(), positions->data(), starts->data(), contexts->data(),
                 table_list->data(), logits_index->data(), num_logits, 0};
    }

    // Where no block is needed, any number stands.
    void fill_tables(Random &random, int group, int width) {
        std::vector<int> blocks(static_cast<size_t>(shape.num_blocks));
        for (int i = 0; i < shape.num_blocks; i++) blocks[size_t(i)] = i;
        std::shuffle(blocks.begin(), blocks.end(), random.engine);
        const int32_t unneeded[] = {-1, INT32_MIN, INT32_MAX, shape.num_blocks, -2};
        for (size_t sequence = 0; sequence + 1 < starts->size(); sequence++) {
            int32_t *const table = tables[group]->data() + sequence * size_t(width);
            for (int place = 0; place < width; place++) table[place] = random.one_of(unneeded);
            const int context = int((*contexts)[sequence]), length = int((*starts)[sequence + 1] - (*starts)[sequence]);
            for (int token = 0; token < length; token++) (*positions)[size_t((*starts)[sequence]) + size_t(token)] = context + token;
            if (!length) continue;
            const int first = group ? std::max(0, context - shape.window + 1) : 0;
            for (int place = first / shape.block_size; place <= (context + length - 1) / shape.block_size; place++) {
                REQUIRE(!blocks.empty(), "the step needs more blocks than there are");
                table[place] = blocks.back();
                blocks.pop_back();
                if (place >= context / shape.block_size) written[group].insert(table[place]);
            }
        }
    }
};

struct Batches {
    Batches(pdm_pool *pool, int isa, uint64_t seed) : pool(pool), isa(isa), random(seed) {}

    void run(int count) {
        for (int i = 0; i < count; i++) {
            const Weights weights(any_shape(random), random);
            Model model(weights, isa, random);
            for (auto &blocks : model.pools) memset(blocks->data(), 0, blocks->size());
            for (int step = 0; step < 4; step++) right(model);
            for (int step = 0; step < 12; step++) wrong(model);
            for (int part = 0; part < 12; part++) wrong_part(model);
            right(model);
        }
    }

    pdm_pool *const pool;
    const int isa;
    Random random;
    long num_done = 0, num_refused = 0;

  private:
    void right(Model &model) {
        Step step(model.shape, random);
        std::vector<uint8_t> before[2];
        for (int group = 0; group < 2; group++) before[group].assign(model.pools[group]->begin(), model.pools[group]->end());
        REQUIRE(!model.run(pool, step.batch, step.logits->data(), step.best->data()), "refused: %s", pdm_last_error());
        num_done++;
        for (int group = 0; group < 2; group++)
            for (int block = 0; block < model.shape.num_blocks; block++) {
                const size_t place = size_t(block) * model.block_bytes;
                const bool is_changed = memcmp(model.pools[group]->data() + place, before[group].data() + place, model.block_bytes);
                REQUIRE(!is_changed || step.written[group].count(block), "block %d of group %d is not the step's", block, group);
            }
        for (size_t row = 0; row < step.best->size(); row++) {
            const float *const logits = step.logits->data() + row * size_t(model.shape.vocabulary);
            const int best = (*step.best)[row];
            REQUIRE(best >= -1 && best < model.shape.vocabulary, "best id %d", best);
            for (int id = 0; id < model.shape.vocabulary; id++) {
                REQUIRE(best == -1 || logits[id] < logits[best] || (logits[id] == logits[best] && id >= best), "%d beats %d", id, best);
            }
        }
    }

    // One lie; those that may be none are only required not to reach beyond the buffers.
    void wrong(Model &model) {
        Step step(model.shape, random);
        pdm_batch batch = step.batch;
        const int64_t numbers[] = {-1, INT64_MIN, INT64_MAX, INT32_MAX, int64_t{1} << 32, 1000000, -1000000};
        const auto any = [&](const std::unique_ptr<Exact<int64_t>> &array) -> int64_t & {
            return (*array)[size_t(random.between(0, int(array->size()) - 1))];
        };
        bool must_fail = true;
        switch (random.between(0, 13)) {
            case 0: any(step.tokens) = random.one_of(numbers); break;
            case 1: any(step.positions) = random.one_of(numbers); break;
            case 2: any(step.positions) += random.once_in(2) ? 1 : -1; break;
            case 3: any(step.starts) = random.one_of(numbers); break;
            case 4: any(step.contexts) = random.one_of(numbers), must_fail = false; break;
            case 5: any(step.contexts)++, must_fail = false; break;
            case 6:
                if (!step.batch.num_logits) return;
                any(step.logits_index) = random.once_in(2) ? random.one_of(numbers) : batch.num_tokens;
                break;
            case 7: batch.num_tokens = random.once_in(2) ? 0 : random.between(-5, 500), must_fail = batch.num_tokens != step.batch.num_tokens; break;
            case 8: batch.num_sequences = random.between(-3, 0); break;
            case 9: batch.table_width = random.between(-2, batch.table_width - 1), must_fail = false; break;
            case 10: batch.num_groups = random.between(-1, 1); break;
            case 11: (*step.table_list)[size_t(random.between(0, 1))] = nullptr; break;
            case 12: batch.num_logits = -1; break;
            default:
                for (auto &table : step.tables)
                    for (int32_t &block : *table)
                        if (random.once_in(3)) block = random.once_in(2) ? model.shape.num_blocks + random.between(0, 9) : random.between(-9, 30);
                must_fail = false;
        }
        const int result = model.run(pool, batch, step.logits->data(), step.best->data());
        REQUIRE(result == 0 || (result == -1 && pdm_last_error()[0]), "result %d", result);
        REQUIRE(result == -1 || !must_fail, "a lie was believed");
        (result ? num_refused : num_done)++;
    }

    // A part of a program that would not fit the others or memory.
    void wrong_part(const Model &model) {
        pdm_program *const program = model.program.get();
        pdm_kv kv = model.kv[random.between(0, 1)];
        const int group = kv.window ? 1 : 0;
        pdm_heads_args heads{};
        heads.qkv_dtype = model.shape.activations();
        heads.num_heads = model.shape.num_heads;
        heads.kv = &kv;
        heads.group = group;
        pdm_attention_args attention{};
        attention.num_heads = model.shape.num_heads;
        attention.scale = 1.0f;
        attention.kv = &kv;
        attention.group = group;
        int qkv = 2, queries = 3, attended = 4;
        switch (random.between(0, 14)) {
            case 0: heads.group = attention.group = random.once_in(2) ? -1 : 64; break;
            case 1: kv.num_blocks++; break;
            case 2: kv.window++; break;
            case 3: kv.block_size *= 2, kv.head_bytes *= 2, kv.block_bytes *= 2; break;
            case 4: kv.head_bytes -= 64; break;
            case 5: kv.layer_offset = random.once_in(2) ? 64 : SIZE_MAX - 63; break;
            case 6: kv.block_size = random.once_in(2) ? INT32_MAX - 31 : 16; break;
            case 7: kv.head_dim = random.between(-2, 1); break;
            case 8: kv.head_dim = 258; break;
            case 9: kv.num_kv_heads = random.once_in(2) ? INT32_MAX : 0; break;
            case 10: kv.blocks = nullptr; break;
            case 11: kv.dtype = 3; break;
            case 12: heads.num_heads = attention.num_heads = random.once_in(2) ? INT32_MAX : -model.shape.num_heads; break;
            case 13: qkv = queries = attended = random.once_in(2) ? -1 : 1000; break;
            default: heads.kv = attention.kv = nullptr;
        }
        REQUIRE(pdm_program_heads(program, &heads, qkv, queries, -1) == -1 && pdm_last_error()[0], "heads were accepted");
        REQUIRE(pdm_program_attention(program, &attention, queries, attended) == -1 && pdm_last_error()[0], "attention was accepted");
        REQUIRE(pdm_program_buffer(program, PDM_I8, 1) == -1 && pdm_program_buffer(program, PDM_F32, 0) == -1, "a buffer");
        num_refused += 2;
    }
};
