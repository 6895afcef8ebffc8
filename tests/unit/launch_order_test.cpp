// cuda/launch_order: when an attend may look at a layer before the kernels in front of it have ended.
#include "cuda/launch_order.h"

#include <doctest/doctest.h>

using namespace kivi::cuda;

namespace {

Stream stream_at(uintptr_t address) { return reinterpret_cast<Stream>(address); }
const Stream kOne = stream_at(0x1000), kOther = stream_at(0x2000), kDefault = nullptr, kPerThread = stream_at(2);

}  // namespace

TEST_CASE("a layer is settled behind a gate that came after its last change") {
    LaunchOrder order(2);
    CHECK_FALSE(order.settled(0, kOne));
    order.gate(kOne);
    CHECK(order.settled(0, kOne));
    CHECK(order.settled(1, kOne));
    order.change(0);
    CHECK_FALSE(order.settled(0, kOne));
    CHECK(order.settled(1, kOne));
    order.gate(kOne);
    CHECK(order.settled(0, kOne));
    order.change();
    CHECK_FALSE(order.settled(0, kOne));
    CHECK_FALSE(order.settled(1, kOne));
}

TEST_CASE("gates hold for the stream that they are on, and the last one counts") {
    LaunchOrder order(1);
    CHECK_FALSE(order.settled(0, kDefault));
    order.gate(kOne);
    CHECK_FALSE(order.settled(0, kOther));
    CHECK_FALSE(order.settled(0, kDefault));
    order.gate(kDefault);
    CHECK(order.settled(0, kDefault));
    CHECK_FALSE(order.settled(0, kOne));
}

TEST_CASE("a name that stands for another stream in each thread is no stream") {
    LaunchOrder order(1);
    order.gate(kPerThread);
    CHECK_FALSE(order.settled(0, kPerThread));
    order.gate(kOne);
    order.gate(kPerThread);
    CHECK(order.settled(0, kOne));
    CHECK_FALSE(order.settled(0, kPerThread));
}
