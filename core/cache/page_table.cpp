// Handing out and taking back blocks.
#include "cache/page_table.h"

#include <cstddef>

namespace kivi {

PageTable::PageTable(int32_t sequences, int64_t blocks_per_sequence, int64_t blocks)
    : blocks_per_sequence_(blocks_per_sequence),
      entries_(static_cast<size_t>(sequences) * blocks_per_sequence),
      counts_(sequences) {
    add_blocks(blocks);
}

void PageTable::resize(int32_t sequence, int64_t count) {
    int32_t* const entries = entries_.data() + sequence * blocks_per_sequence_;
    int64_t& have = counts_[sequence];
    while (have < count) {
        const int32_t block = free_.back();
        free_.pop_back();
        references_[block] = 1;
        entries[have++] = block;
    }
    while (have > count) {
        const int32_t block = entries[--have];
        if (--references_[block] == 0) free_.push_back(block);
    }
}

void PageTable::prepare(int64_t more) {
    free_.reserve(total() + more);
    references_.reserve(total() + more);
}

void PageTable::add_blocks(int64_t more) {
    const int64_t before = total();
    prepare(more);
    references_.resize(before + more);
    // Below what is free already, the lowest numbers on top: a lone sequence fills the pool from its start.
    free_.insert(free_.begin(), more, 0);
    for (int64_t i = 0; i < more; i++) free_[i] = static_cast<int32_t>(before + more - 1 - i);
}

uint64_t PageTable::bytes(int32_t sequences, int64_t blocks_per_sequence, int64_t blocks) {
    const uint64_t per_sequence = blocks_per_sequence * sizeof(int32_t) + sizeof(int64_t);
    return sequences * per_sequence + blocks * 2 * sizeof(int32_t);
}

}  // namespace kivi
