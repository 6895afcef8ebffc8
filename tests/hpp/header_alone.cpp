// kivi.hpp brings all that it needs, and may be included in several files of a program.
#include "kivi/kivi.hpp"

#include "kivi/kivi.hpp"

static_assert(!std::is_copy_constructible<kivi::Cache>::value, "a cache has one owner");
static_assert(std::is_nothrow_move_constructible<kivi::Cache>::value, "a cache moves");
static_assert(!std::is_convertible<kivi::ConstTensor, kivi::Tensor>::value, "what is read is not written");
