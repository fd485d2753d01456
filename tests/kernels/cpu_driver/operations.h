// Every operation by itself, over odd shapes and with arguments that it must refuse.
#pragma once

#include <functional>

#include "weights.h"

struct Operations {
    Operations(pdm_pool *pool, int isa, uint64_t seed) : pool(pool), isa(isa), random(seed) {}

    void run(int count) {
        for (int i = 0; i < count; i++) {
            linear();
            norm();
            embed();
            if (i % 4 == 0) unpack();
            if (i % 4 == 0) angles();
        }
    }

    pdm_pool *const pool;
    const int isa;
    Random random;
    long num_done = 0, num_refused = 0;

  private:
    void accept(int result) {
        REQUIRE(result == 0, "refused: %s", pdm_last_error());
        num_done++;
    }
    void refuse(int result) {
        REQUIRE(result == -1 && pdm_last_error()[0], "result %d", result);
        num_refused++;
    }

    static size_t matrix(int num_rows, size_t stride, int width) { return num_rows ? size_t(num_rows - 1) * stride + size_t(width) : 0; }

    void linear() {
        const int formats[] = {PDM_W_F32, PDM_W_BF16, PDM_W_I8, PDM_W_Q8, PDM_W_Q4, PDM_W_Q4_WIDE};
        const int format = random.one_of(formats), is_gated = random.once_in(3);
        const int num_outputs = is_gated ? 2 * random.between(1, 80) : random.between(1, 150);
        const int num_inputs = random.once_in(20) ? random.between(1500, 2600) : random.between(1, 400);
        const int num_rows = random.once_in(8) ? random.between(250, 290) : random.between(0, 70);
        Packed packed(format, num_outputs, num_inputs, is_gated, random);
        const int width = is_gated ? num_outputs / 2 : num_outputs;
        const size_t input_stride = size_t(num_inputs + (random.once_in(2) ? random.between(0, 70) : 0));
        const size_t output_stride = size_t(width + (random.once_in(2) ? random.between(0, 70) : 0));
        const int open_epilogues[] = {PDM_STORE, PDM_ADD, PDM_LOGITS}, gates[] = {PDM_SILU_MUL, PDM_GELU_MUL};
        const int epilogue = is_gated ? random.one_of(gates) : random.one_of(open_epilogues);
        const bool is_wide = epilogue == PDM_ADD || epilogue == PDM_LOGITS || random.once_in(2);
        Exact<float> input(format == PDM_W_F32 ? matrix(num_rows, input_stride, num_inputs) : 0, random.guard());
        Exact<uint16_t> narrow_input(format == PDM_W_F32 ? 0 : matrix(num_rows, input_stride, num_inputs), random.guard());
        Exact<float> output(is_wide ? size_t(num_rows) * output_stride : 0, random.guard());
        Exact<uint16_t> narrow_output(is_wide ? 0 : size_t(num_rows) * output_stride, random.guard());
        Exact<float> bias(size_t(num_outputs), random.guard());
        const size_t num_best = size_t(num_rows) * size_t(pdm_num_panels(num_outputs, 0));
        Exact<float> best_value(num_best, random.guard());
        Exact<int32_t> best_id(num_best, random.guard());
        Exact<uint8_t> scratch(pdm_linear_scratch_bytes(&packed.weight, num_rows), random.guard(), 64);
        fill(input.begin(), input.end(), random);
        fill(narrow_input.begin(), narrow_input.end(), random);
        // Now and then what no model should have.
        if (input.size() && random.once_in(10)) input[input.size() / 2] = 1.0f / 0.0f;
        if (narrow_input.size() && random.once_in(10)) narrow_input[narrow_input.size() / 2] = 0x7fc0;
        fill(output.begin(), output.end(), random);
        fill(bias.begin(), bias.end(), random);
        const bool has_best = epilogue == PDM_LOGITS && !random.once_in(3);
        pdm_linear_args args{};
        args.weight = &packed.weight;
        args.input = format == PDM_W_F32 ? static_cast<const void *>(input.data()) : narrow_input.data();
        args.input_stride = input_stride;
        args.num_rows = num_rows;
        args.epilogue = epilogue;
        args.bias = random.once_in(2) ? bias.data() : nullptr;
        args.output = is_wide ? static_cast<void *>(output.data()) : narrow_output.data();
        args.output_stride = output_stride;
        args.output_dtype = is_wide ? PDM_F32 : PDM_BF16;
        args.soft_cap = random.once_in(2) ? 30.0f : 0.0f;
        args.best_value = has_best ? best_value.data() : nullptr;
        args.best_id = has_best ? best_id.data() : nullptr;
        args.scratch = scratch.size() ? scratch.data() : nullptr;
        accept(pdm_linear(pool, isa, &args));
        if (has_best)
            for (size_t i = 0; i < num_best; i++) REQUIRE(best_id[i] >= 0 && best_id[i] < num_outputs, "best id %d", best_id[i]);
        wrong_linear(args);
    }

    // So that a row needs scratch, whatever it was.
    static void quantised(pdm_weight &weight) {
        weight.format = PDM_W_Q4, weight.int8_rows = 1, weight.group = 32;
        weight.panel_bytes = pdm_panel_bytes(weight.format, weight.num_inputs, weight.group);
    }

    void wrong_linear(const pdm_linear_args &good) {
        const std::function<void(pdm_linear_args &, pdm_weight &)> changes[] = {
            [](pdm_linear_args &args, pdm_weight &) { args.weight = nullptr; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.format = 6; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.format = -1; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.num_outputs = 0; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.num_outputs = -32; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.num_inputs = -1; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.num_inputs += 64; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.num_inputs = INT32_MAX; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.panel_bytes -= 64; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.int8_rows = 2; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.format = PDM_W_BF16, weight.int8_rows = 1; },
            [](pdm_linear_args &args, pdm_weight &weight) { quantised(weight), args.num_rows = 1, args.scratch = nullptr; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.panels = nullptr; },
            [](pdm_linear_args &, pdm_weight &weight) { weight.is_gated = !weight.is_gated; },
            [](pdm_linear_args &args, pdm_weight &) { args.epilogue = 5; },
            [](pdm_linear_args &args, pdm_weight &) { args.epilogue = -1; },
            [](pdm_linear_args &args, pdm_weight &) { args.output_dtype = PDM_I8; },
            [](pdm_linear_args &args, pdm_weight &) { args.num_rows = -1; },
            [](pdm_linear_args &args, pdm_weight &weight) { args.input_stride = size_t(weight.num_inputs) - 1; },
            [](pdm_linear_args &args, pdm_weight &) { args.output_stride = 0; },
            [](pdm_linear_args &args, pdm_weight &) { args.num_rows = 1, args.input = nullptr; },
            [](pdm_linear_args &args, pdm_weight &) { args.num_rows = 1, args.output = nullptr; },
        };
        pdm_weight weight = *good.weight;
        pdm_linear_args args = good;
        args.weight = &weight;
        changes[size_t(random.between(0, int(std::size(changes)) - 1))](args, weight);
        refuse(pdm_linear(pool, isa, &args));
        refuse(pdm_linear(nullptr, isa, &good));
        refuse(pdm_linear(pool, PDM_NUM_ISAS, &good));
        refuse(pdm_linear(pool, -1, &good));
    }

    void norm() {
        const int width = random.between(1, 300), num_rows = random.between(0, 40), num_sources = random.between(1, 40);
        const size_t input_stride = size_t(width + random.between(0, 20)), output_stride = size_t(width + random.between(0, 20));
        const bool has_index = random.once_in(2), adds = random.once_in(3), is_narrow_in = random.once_in(2);
        const bool is_narrow_out = !adds && random.once_in(2);
        const int num_read = has_index ? num_sources : num_rows;
        Exact<float> input(is_narrow_in ? 0 : matrix(num_read, input_stride, width), random.guard());
        Exact<uint16_t> narrow_input(is_narrow_in ? matrix(num_read, input_stride, width) : 0, random.guard());
        Exact<float> output(is_narrow_out ? 0 : matrix(num_rows, output_stride, width), random.guard());
        Exact<uint16_t> narrow_output(is_narrow_out ? matrix(num_rows, output_stride, width) : 0, random.guard());
        Exact<float> gain(size_t(width), random.guard()), bias(size_t(width), random.guard());
        Exact<int64_t> index(size_t(num_rows), random.guard());
        fill(input.begin(), input.end(), random);
        fill(narrow_input.begin(), narrow_input.end(), random);
        fill(gain.begin(), gain.end(), random);
        fill(bias.begin(), bias.end(), random);
        for (int64_t &row : index) row = random.between(0, num_sources - 1);
        pdm_norm_args args{};
        args.input = is_narrow_in ? static_cast<const void *>(narrow_input.data()) : input.data();
        args.input_stride = input_stride;
        args.num_rows = num_rows;
        args.width = width;
        args.gain = gain.data();
        args.bias = random.once_in(2) ? bias.data() : nullptr;
        args.epsilon = 1e-5f;
        args.is_layer_norm = random.once_in(2);
        args.adds = adds;
        args.input_dtype = is_narrow_in ? PDM_BF16 : PDM_F32;
        args.output_dtype = is_narrow_out ? PDM_BF16 : PDM_F32;
        args.output = is_narrow_out ? static_cast<void *>(narrow_output.data()) : output.data();
        args.output_stride = output_stride;
        args.row_index = has_index ? index.data() : nullptr;
        accept(pdm_norm(pool, isa, &args));
        const std::function<void(pdm_norm_args &)> changes[] = {
            [](pdm_norm_args &a) { a.width = 0; },
            [](pdm_norm_args &a) { a.width = INT32_MAX; },
            [](pdm_norm_args &a) { a.gain = nullptr; },
            [](pdm_norm_args &a) { a.input_dtype = PDM_I8; },
            [](pdm_norm_args &a) { a.num_rows = -1; },
            [](pdm_norm_args &a) { a.input_stride = size_t(a.width) - 1; },
            [](pdm_norm_args &a) { a.output_stride = size_t(a.width) - 1; },
        };
        changes[size_t(random.between(0, int(std::size(changes)) - 1))](args);
        refuse(pdm_norm(pool, isa, &args));
    }

    void embed() {
        const int formats[] = {PDM_W_F32, PDM_W_BF16, PDM_W_I8, PDM_W_Q8, PDM_W_Q4, PDM_W_Q4_WIDE};
        const int vocabulary = random.between(1, 90), width = random.between(1, 200), num_rows = random.between(0, 30);
        Packed table(random.one_of(formats), vocabulary, width, 0, random);
        const size_t stride = size_t(width + random.between(0, 20));
        Exact<float> output(matrix(num_rows, stride, width), random.guard());
        Exact<int64_t> ids(size_t(num_rows), random.guard());
        for (int64_t &id : ids) id = random.between(0, vocabulary - 1);
        const pdm_embed_args args{&table.weight, ids.data(), num_rows, random.once_in(2) ? 1.0f : 8.5f, output.data(), stride, random.once_in(2)};
        accept(pdm_embed(pool, isa, &args));
        if (num_rows) {
            const int64_t wrong[] = {-1, vocabulary, INT64_MIN, INT64_MAX, int64_t{1} << 32};
            ids[size_t(random.between(0, num_rows - 1))] = random.one_of(wrong);
            refuse(pdm_embed(pool, isa, &args));
        }
    }

    void unpack() {
        const int formats[] = {PDM_W_F32, PDM_W_BF16, PDM_W_I8, PDM_W_Q8, PDM_W_Q4, PDM_W_Q4_WIDE};
        const int is_gated = random.once_in(2), num_outputs = 2 * random.between(1, 40), num_inputs = random.between(1, 200);
        Packed packed(random.one_of(formats), num_outputs, num_inputs, is_gated, random);
        Exact<float> values(size_t(num_inputs), random.guard());
        for (int row = 0; row < num_outputs; row++) accept(pdm_unpack_row(&packed.weight, row, values.data()));
        for (float value : values) REQUIRE(value == value && value > -100 && value < 100, "value %g", double(value));
        refuse(pdm_unpack_row(&packed.weight, -1, values.data()));
        refuse(pdm_unpack_row(&packed.weight, num_outputs, values.data()));
    }

    void angles() {
        const int num_tokens = random.between(0, 70), rotary_dim = 2 * random.between(0, 40);
        Exact<int64_t> positions(size_t(num_tokens), random.guard());
        Exact<float> frequencies(size_t(rotary_dim / 2), random.guard()), table(size_t(num_tokens) * size_t(rotary_dim), random.guard());
        for (int64_t &position : positions) position = random.between(0, 1 << 20);
        fill(frequencies.begin(), frequencies.end(), random);
        accept(pdm_angles(pool, positions.data(), num_tokens, frequencies.data(), rotary_dim, 1.5f, table.data()));
        refuse(pdm_angles(pool, positions.data(), -1, frequencies.data(), rotary_dim, 1.5f, table.data()));
        refuse(pdm_angles(pool, positions.data(), num_tokens, frequencies.data(), rotary_dim + 1, 1.5f, table.data()));
    }
};
