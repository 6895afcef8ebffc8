// What both kinds of blob have in common (FORMAT.md, "Sequence blob" and "Moments blob"):
//
//   magic, 8 bytes | version, u32 | byte order mark, u32 | bytes of the whole blob, u64 | ... | CRC-32, u32
#pragma once
#include <cstddef>
#include <cstdint>

#include "cache/bytes.h"
#include "cache/refuse.h"

namespace kivi {

struct BlobKind {
    const char* name;  // begins the sentences
    uint8_t magic[8];
    uint32_t version;
    size_t header_bytes;
};

constexpr size_t kBlobCrcBytes = 4;

// Writes the frame's part of the header; the writer stands behind it.
ByteWriter begin_blob(const BlobKind& kind, uint8_t* blob, size_t bytes);
// Writes the CRC of a blob that is otherwise complete.
void seal_blob(uint8_t* blob, size_t bytes);
// Checks the frame: nothing is believed before the CRC holds. The reader stands behind it. Throws CORRUPT or,
// for another version, MISMATCH.
ByteReader open_blob(const BlobKind& kind, const uint8_t* blob, size_t bytes);

template <class... Parts>
[[noreturn]] void refuse_corrupt(const BlobKind& kind, const Parts&... parts) {
    refuse(KIVI_ERROR_CORRUPT, kind.name, " is damaged: ", parts...);
}

}  // namespace kivi
