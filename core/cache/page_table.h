// Which blocks of the page pool each sequence holds. Blocks carry reference counts, so that sequences can
// share them; a free list hands them out. All memory is taken at construction and in add_blocks.
#pragma once
#include <cstdint>
#include <vector>

namespace kivi {

class PageTable {
  public:
    PageTable(int32_t sequences, int64_t blocks_per_sequence, int64_t blocks);

    // Blocks of page 0, 1, ... of the sequence; count() of them are valid.
    const int32_t* blocks(int32_t sequence) const {
        return entries_.data() + sequence * blocks_per_sequence_;
    }
    int64_t count(int32_t sequence) const { return counts_[sequence]; }
    int64_t total() const { return static_cast<int64_t>(references_.size()); }
    int64_t free() const { return static_cast<int64_t>(free_.size()); }
    int64_t used() const { return total() - free(); }

    // Gives the sequence `count` blocks, more or fewer than it has; enough of them are free.
    void resize(int32_t sequence, int64_t count);
    // Enlarges the pool: prepare takes the memory and may fail, add_blocks then cannot.
    void prepare(int64_t more);
    void add_blocks(int64_t more);

    // Exact memory of a table of this size.
    static uint64_t bytes(int32_t sequences, int64_t blocks_per_sequence, int64_t blocks);

  private:
    int64_t blocks_per_sequence_;
    std::vector<int32_t> entries_;     // [sequence][page]
    std::vector<int64_t> counts_;      // [sequence]
    std::vector<int32_t> references_;  // [block]: sequences that hold it
    std::vector<int32_t> free_;        // stack of blocks that nobody holds; capacity for all
};

}  // namespace kivi
