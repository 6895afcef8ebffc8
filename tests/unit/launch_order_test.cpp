// cuda/launch_order: when an attend may look at a layer before the kernels in front of it have ended.
#include "cuda/launch_order.h"

#include <doctest/doctest.h>

using namespace kivi::cuda;

namespace {

LaunchPlace at(uintptr_t stream, uint64_t capture = 0) { return {reinterpret_cast<Stream>(stream), capture, true}; }
const LaunchPlace kOne = at(0x1000), kOther = at(0x2000), kDefault = at(0), kUnknown;
const LaunchPlace kCaptured = at(0x1000, 7), kBranch = at(0x2000, 7), kSecondCapture = at(0x1000, 8);

}  // namespace

TEST_CASE("a layer is settled behind a gate that came after its last change") {
    LaunchOrder order(2);
    order.change(kOne);
    CHECK_FALSE(order.settled(0, kOne));
    order.gate(kOne);
    CHECK(order.settled(0, kOne));
    CHECK(order.settled(1, kOne));
    order.change(0, kOne);
    CHECK_FALSE(order.settled(0, kOne));
    CHECK(order.settled(1, kOne));
    order.gate(kOne);
    CHECK(order.settled(0, kOne));
    order.change(kOne);
    CHECK_FALSE(order.settled(0, kOne));
    CHECK_FALSE(order.settled(1, kOne));
}

TEST_CASE("gates and changes hold for the stream that they are on, and the last gate counts") {
    LaunchOrder order(1);
    order.change(kOne);
    CHECK_FALSE(order.settled(0, kDefault));
    order.gate(kOne);
    CHECK_FALSE(order.settled(0, kOther));
    CHECK_FALSE(order.settled(0, kDefault));
    order.gate(kOther);  // behind the change only if events say so
    CHECK_FALSE(order.settled(0, kOther));
    CHECK_FALSE(order.settled(0, kOne));
    order.change(kDefault);
    order.gate(kDefault);
    CHECK(order.settled(0, kDefault));
}

TEST_CASE("a gate of a capture is none outside of it, nor the other way round") {
    LaunchOrder order(1);
    order.change(kOne);
    order.gate(kCaptured);
    CHECK_FALSE(order.settled(0, kOne));
    CHECK_FALSE(order.settled(0, kSecondCapture));
    CHECK(order.settled(0, kCaptured));
    order.gate(kOne);
    CHECK_FALSE(order.settled(0, kCaptured));
    CHECK(order.settled(0, kOne));
}

TEST_CASE("in a capture, changes of other streams of it count, those from outside do not") {
    LaunchOrder order(1);
    order.change(kBranch);
    order.gate(kCaptured);
    CHECK_FALSE(order.settled(0, kCaptured));
    order.change(kOther);  // a capture's changes are not forgotten for it
    order.gate(kCaptured);
    CHECK_FALSE(order.settled(0, kCaptured));
    order.change(kCaptured);
    order.gate(kCaptured);
    CHECK(order.settled(0, kCaptured));
    order.gate(kSecondCapture);
    CHECK(order.settled(0, kSecondCapture));
}

TEST_CASE("after a captured change nothing is settled outside: a replay may follow any gate") {
    LaunchOrder order(2);
    order.change(kOne);
    order.change(0, kCaptured);
    order.change(0, kOne);
    order.gate(kOne);
    CHECK_FALSE(order.settled(0, kOne));
    CHECK(order.settled(1, kOne));
}

TEST_CASE("where it is not known what a place is, nothing is settled") {
    LaunchOrder order(1);
    order.change(kOne);
    order.gate(kUnknown);
    CHECK_FALSE(order.settled(0, kUnknown));
    order.change(kUnknown);
    order.gate(kOne);
    CHECK_FALSE(order.settled(0, kOne));
    order.gate(kCaptured);
    CHECK_FALSE(order.settled(0, kCaptured));
}
