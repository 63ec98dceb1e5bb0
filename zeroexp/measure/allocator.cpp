// Counts what torch allocates on the CPU: a c10 allocator around the one in place, exact for every thread.
//
// A block is `header` bytes longer than asked for; its size is written there, so that giving it back needs no table
// and no lock. The header keeps torch's alignment of 64 bytes and is not counted.

#include <atomic>
#include <cstdint>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace {

constexpr size_t header = 64;

c10::Allocator* inner = nullptr;
std::atomic<int64_t> current{0};
std::atomic<int64_t> peak{0};
std::atomic<int64_t> total{0};

void give_back(void* data) {
  if (data == nullptr) {
    return;
  }
  char* block = static_cast<char*>(data) - header;
  current.fetch_sub(*reinterpret_cast<int64_t*>(block), std::memory_order_relaxed);
  inner->raw_deallocate(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) {
      return {nullptr, nullptr, &give_back, c10::Device(c10::DeviceType::CPU)};
    }
    char* block = static_cast<char*>(inner->raw_allocate(num_bytes + header));
    const int64_t size = static_cast<int64_t>(num_bytes);
    *reinterpret_cast<int64_t*>(block) = size;
    total.fetch_add(size, std::memory_order_relaxed);
    const int64_t now = current.fetch_add(size, std::memory_order_relaxed) + size;
    int64_t highest = peak.load(std::memory_order_relaxed);
    while (now > highest && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed)) {
    }
    void* data = block + header;
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    default_copy_data(target, source, num_bytes);
  }
};

}  // namespace

extern "C" {

// Blocks allocated before keep their own deleter and are never counted. Calling it again changes nothing.
void zeroexp_install() {
  static CountingAllocator allocator;
  if (inner == nullptr) {
    inner = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&allocator, /*priority=*/100);
  }
}

int64_t zeroexp_current() { return current.load(); }
int64_t zeroexp_peak() { return peak.load(); }
int64_t zeroexp_total() { return total.load(); }
void zeroexp_reset_peak() { peak.store(current.load()); }

}
