// Eight bytes a step: table k advances the remainder of a byte over k further zero bytes.
#include "format/checksum.h"

#include <array>

namespace kivi {

namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1u ? 0xEDB88320u : 0u);
        tables[0][byte] = crc;
    }
    for (size_t k = 1; k < tables.size(); ++k) {
        for (size_t byte = 0; byte < 256; ++byte) {
            const uint32_t crc = tables[k - 1][byte];
            tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xFFu];
        }
    }
    return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t crc32(const void* data, size_t bytes, uint32_t before) {
    const uint8_t* p = static_cast<const uint8_t*>(data);
    uint32_t crc = ~before;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        const uint8_t mixed[4] = {static_cast<uint8_t>(p[0] ^ crc), static_cast<uint8_t>(p[1] ^ (crc >> 8)),
                                  static_cast<uint8_t>(p[2] ^ (crc >> 16)),
                                  static_cast<uint8_t>(p[3] ^ (crc >> 24))};
        crc = kTables[7][mixed[0]] ^ kTables[6][mixed[1]] ^ kTables[5][mixed[2]] ^ kTables[4][mixed[3]] ^
              kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^ kTables[0][p[7]];
    }
    for (; bytes > 0; --bytes, ++p) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xFFu];
    return ~crc;
}

}  // namespace kivi
