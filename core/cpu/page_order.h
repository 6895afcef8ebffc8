// Where the code and the parameters of an element stand inside one tensor's part of a page.
#pragma once
#include <cstdint>

#include "format/layout.h"

namespace kivi::cpu {

// canonical: the order of export (format/layout.h). lanes: the order that the SIMD kernels read; see
// page_order.cpp for its picture. Which specs use lanes is decided here alone.
enum class Order { canonical, lanes };

// Of the lanes order.
constexpr int kTile = 16;       // tokens and channels of a tile; tokens of a unit
constexpr int kLineBytes = 64;  // sixteen lanes

struct PageOrder {
    Order order = Order::canonical;
    kivi_spec spec{};
    int dim = 0;
};

PageOrder page_order(const kivi_spec& spec, int dim);

int code_get(const PageOrder& order, const uint8_t* part, int token, int channel);
void code_put(const PageOrder& order, uint8_t* part, int token, int channel, int code);  // overwrites
int64_t scale_offset(const PageOrder& order, int token, int channel);  // byte offset in the part
int64_t min_offset(const PageOrder& order, int token, int channel);

}  // namespace kivi::cpu
