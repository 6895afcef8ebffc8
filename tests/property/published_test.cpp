// The published schedule against a restatement of the published algorithm (arXiv 2402.02750, section 4),
// token by token: queues of full-precision rows that are quantised as the paper's code does it, attend
// before quantise.

#include "property/random_case.h"
#include "support/oracle.h"

using namespace kivi_test;

namespace {

// One tensor of one head: what is quantised, and the queue of what is not.
struct Queue {
    kivi_spec spec{};
    int dim = 0;
    Floats packed_rows;  // stored rows that have left the queue, oldest first
    Floats decoded;      // what they decode to
    Floats residual;

    int64_t rows(const Floats& x) const { return int64_t(x.size()) / dim; }

    void pack_oldest(int64_t count) {
        const Floats rows(residual.begin(), residual.begin() + count * dim);
        residual.erase(residual.begin(), residual.begin() + count * dim);
        const Packed packed = pack(rows, dim, spec, nullptr);
        packed_rows.insert(packed_rows.end(), rows.begin(), rows.end());
        decoded.insert(decoded.end(), packed.decoded.begin(), packed.decoded.end());
    }
    Floats all() const {
        Floats x = decoded;
        x.insert(x.end(), residual.begin(), residual.end());
        return x;
    }
};

struct Published {
    int64_t residual_length = 0;
    Queue k, v;

    void push(const Floats& key, const Floats& value) {
        k.residual.insert(k.residual.end(), key.begin(), key.end());
        v.residual.insert(v.residual.end(), value.begin(), value.end());
    }
    void prompt_done() {
        k.pack_oldest(k.rows(k.residual) / residual_length * residual_length);
        v.pack_oldest(std::max<int64_t>(0, v.rows(v.residual) - residual_length));
    }
    void step_done() {
        if (k.rows(k.residual) == residual_length) k.pack_oldest(residual_length);
        if (v.rows(v.residual) > residual_length) v.pack_oldest(1);
    }
};

}  // namespace

TEST_CASE(
    "kivi2-paper is the published algorithm: what is packed when, its codes, and the attention, step by "
    "step") {
    struct Setting {
        int bits, group, residual, dim, prompt;
    };
    for (const Setting& s : {Setting{2, 32, 128, 128, 1},
                             {2, 32, 128, 64, 127},
                             {2, 32, 128, 64, 128},
                             {2, 32, 128, 80, 300},
                             {4, 32, 32, 64, 33},
                             {2, 64, 64, 64, 64},
                             {2, 32, 96, 64, 200}}) {
        CAPTURE(s.residual);
        CAPTURE(s.prompt);
        const bool is_preset = s.bits == 2 && s.group == 32 && s.residual == 128;
        const Heads heads{1, 2, s.dim, s.dim};
        const kivi_config with =
            is_preset ? preset("kivi2-paper", heads)
                      : published(channel(s.bits, s.group), token(s.bits, s.group), heads, s.residual);
        const Cache cache(with);
        Random random{uint64_t(s.prompt + s.residual)};
        const int64_t total = s.prompt + 150;
        Tokens tokens = random_tokens(random, cache.layer(), total);
        for (Floats* part : {&tokens.k, &tokens.v}) {
            for (float& x : *part) x = round_to(KIVI_F16, x);
        }
        const size_t dim = size_t(s.dim);
        Published model;
        model.residual_length = s.residual;
        model.k.spec = with.layer.k;
        model.v.spec = with.layer.v;
        model.k.dim = model.v.dim = s.dim;
        cache.append(0, tokens, 0, s.prompt);
        for (int64_t t = 0; t < s.prompt; ++t)
            model.push(rows_of(tokens.k, dim, t, t + 1), rows_of(tokens.v, dim, t, t + 1));
        model.prompt_done();
        for (int64_t t = s.prompt; t < total; ++t) {
            CAPTURE(t);
            cache.append(0, tokens, t, t + 1);
            model.push(rows_of(tokens.k, dim, t, t + 1), rows_of(tokens.v, dim, t, t + 1));
            // Between append and quantise: what the attend of token t sees.
            const kivi_length length = cache.length();
            CHECK(length.key_border == model.k.rows(model.k.packed_rows));
            CHECK(length.value_border == model.v.rows(model.v.packed_rows));
            const Tokens read = cache.dequantize();
            CHECK(bit_equal(read.k, model.k.all()));
            CHECK(bit_equal(read.v, model.v.all()));
            if (t % 10 == 0 || t < s.prompt + 3) {
                const Floats q = random.normals(2 * dim);
                const Exact exact = exact_attention(cache.layer(), {model.k.all(), model.v.all()}, q, {});
                const Distance d = distance(cache.attend({{0, 1}}, q), exact, s.dim);
                CHECK(d.whole <= backend().tolerance);
                CHECK(d.lse <= backend().tolerance);
            }
            model.step_done();
        }
    }
}
