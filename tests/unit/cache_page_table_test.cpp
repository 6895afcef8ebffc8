// Blocks are handed out, taken back, and never twice at once.
#include <doctest/doctest.h>

#include <set>

#include "cache/page_table.h"

using kivi::PageTable;

TEST_CASE("a lone sequence takes the blocks in order and gives them back") {
    PageTable table(2, 8, 10);
    CHECK(table.free() == 10);
    table.resize(0, 5);
    for (int page = 0; page < 5; page++) CHECK(table.blocks(0)[page] == page);
    CHECK(table.used() == 5);
    table.resize(0, 2);
    CHECK(table.count(0) == 2);
    CHECK(table.used() == 2);
    table.resize(0, 0);
    CHECK(table.free() == 10);
}

TEST_CASE("no block belongs to two sequences, whatever the order of growing and shrinking") {
    PageTable table(4, 16, 40);
    const int64_t steps[][2] = {{0, 9}, {1, 16}, {2, 3}, {0, 2}, {3, 12},
                                {1, 4}, {2, 16}, {0, 7}, {3, 0}, {3, 1}};
    for (const auto& step : steps) {
        table.resize(static_cast<int32_t>(step[0]), step[1]);
        std::set<int32_t> held;
        int64_t count = 0;
        for (int32_t sequence = 0; sequence < 4; sequence++) {
            held.insert(table.blocks(sequence), table.blocks(sequence) + table.count(sequence));
            count += table.count(sequence);
        }
        CHECK(static_cast<int64_t>(held.size()) == count);
        CHECK(table.used() == count);
        CHECK(*held.rbegin() < 40);
    }
}

TEST_CASE("added blocks come after those that were free") {
    PageTable table(1, 8, 2);
    table.resize(0, 1);
    table.prepare(3);
    table.add_blocks(3);
    CHECK(table.total() == 5);
    CHECK(table.free() == 4);
    table.resize(0, 5);
    for (int page = 0; page < 5; page++) CHECK(table.blocks(0)[page] == page);
}

TEST_CASE("a table without blocks is valid") {
    PageTable table(3, 0, 0);
    table.resize(1, 0);
    CHECK(table.free() == 0);
    CHECK(table.count(1) == 0);
}
