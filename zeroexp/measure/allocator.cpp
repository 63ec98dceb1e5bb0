// Counts what torch allocates on the CPU: a c10 allocator around the one in place, exact for every thread. While a step
// is traced it also logs every allocation with address, size, time and the operator that asked for it.
//
// A block is `header` bytes longer than asked for; its size is written there, so that giving it back needs no table
// and no lock. The header keeps torch's alignment of 64 bytes and is not counted.
//
// The operator comes from torch's own record functions, which it calls around operators, nodes of autograd, collectives
// and the ranges that a user names. Nothing observes them unless a step is traced.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

namespace {

constexpr size_t header = 64;
constexpr int32_t nobody = -1;

// These two are what Python reads, field by field.
struct Change {
  int64_t nanoseconds;  // of the steady clock, which is time.perf_counter
  int64_t bytes;        // negative where a block is given back
  uint64_t address;
  int32_t op;      // index of the outermost operator's name
  int32_t thread;  // 0 is the thread that started the log
};

struct Span {
  int64_t began;
  int64_t ended;
  int32_t name;
  int32_t asynchronous;  // another thread ended it
};

struct Memory {
  std::atomic<int64_t> current{0};
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> total{0};

  void add(int64_t size) {
    total.fetch_add(size, std::memory_order_relaxed);
    const int64_t now = current.fetch_add(size, std::memory_order_relaxed) + size;
    int64_t highest = peak.load(std::memory_order_relaxed);
    while (now > highest && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed)) {
    }
  }
};

// What stands before a block.
struct Header {
  int64_t size;
  bool of_host;
};
static_assert(sizeof(Header) <= header);

c10::Allocator* inner = nullptr;
Memory device;
Memory host;
std::atomic<int64_t> limit{INT64_MAX};
thread_local bool on_host = false;

std::atomic<bool> logging{false};
std::mutex log_lock;  // of all that follows
std::vector<Change> changes;
std::vector<Span> spans;
std::deque<std::string> names;
std::unordered_map<std::string, int32_t> numbers;
int32_t num_threads = 0;
int64_t generation = 0;
at::CallbackHandle handle = 0;

thread_local std::vector<int32_t> running;  // names of the operators that run in this thread, outermost first
thread_local int32_t thread_number = nobody;
thread_local int64_t thread_generation = 0;

int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int32_t number_of(const char* name) {
  auto [found, is_new] = numbers.try_emplace(name, static_cast<int32_t>(names.size()));
  if (is_new) {
    names.emplace_back(name);
  }
  return found->second;
}

void log_change(void* data, int64_t bytes) {
  const std::lock_guard<std::mutex> guard(log_lock);
  if (thread_generation != generation) {
    thread_generation = generation;
    thread_number = num_threads++;
  }
  const int32_t op = running.empty() ? nobody : running.front();
  changes.push_back({nanoseconds(), bytes, reinterpret_cast<uint64_t>(data), op, thread_number});
}

void give_back(void* data) {
  if (data == nullptr) {
    return;
  }
  char* block = static_cast<char*>(data) - header;
  const auto [size, of_host] = *reinterpret_cast<Header*>(block);
  (of_host ? host : device).current.fetch_sub(size, std::memory_order_relaxed);
  if (!of_host && logging.load(std::memory_order_relaxed)) {
    log_change(data, -size);
  }
  inner->raw_deallocate(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) {
      return {nullptr, nullptr, &give_back, c10::Device(c10::DeviceType::CPU)};
    }
    const int64_t size = static_cast<int64_t>(num_bytes);
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        on_host || device.current.load(std::memory_order_relaxed) + size <= limit.load(std::memory_order_relaxed),
        "an allocation of ", size, " bytes beside ", device.current.load(), " exceeds the limit of ", limit.load());
    char* block = static_cast<char*>(inner->raw_allocate(num_bytes + header));
    *reinterpret_cast<Header*>(block) = {size, on_host};
    (on_host ? host : device).add(size);
    void* data = block + header;
    if (!on_host && logging.load(std::memory_order_relaxed)) {
      log_change(data, size);
    }
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    default_copy_data(target, source, num_bytes);
  }
};

// What a record function needs when it ends, maybe in another thread.
struct Running final : at::ObserverContext {
  int64_t began = 0;
  int32_t name = nobody;
  bool asynchronous = false;
  bool pushed = false;
  bool spans = false;
};

// Autograd wraps each of its nodes in a range that names no operator.
bool names_operator(const at::RecordFunction& function) {
  const bool is_range = function.scope() == at::RecordScope::USER_SCOPE;
  return !is_range && !std::string_view(function.name()).starts_with("autograd::engine");
}

// Collectives, and what the engines of torch name of themselves.
bool is_of_backend(const at::RecordFunction& function) {
  return function.scope() == at::RecordScope::USER_SCOPE || std::string_view(function.name()).starts_with("c10d::");
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  auto context = std::make_unique<Running>();
  context->asynchronous = function.isAsync();
  context->pushed = !context->asynchronous && names_operator(function);
  context->spans = is_of_backend(function);
  if (context->pushed || context->spans) {
    const std::lock_guard<std::mutex> guard(log_lock);
    context->name = number_of(function.name());
  }
  if (context->pushed) {
    running.push_back(context->name);
  }
  context->began = nanoseconds();
  return context;
}

void end(const at::RecordFunction&, at::ObserverContext* context) {
  auto* ended = static_cast<Running*>(context);
  if (ended->pushed && !running.empty()) {
    running.pop_back();
  }
  if (ended->spans && logging.load(std::memory_order_relaxed)) {
    const std::lock_guard<std::mutex> guard(log_lock);
    spans.push_back({ended->began, nanoseconds(), ended->name, ended->asynchronous});
  }
}

template <typename Row>
int64_t take(std::vector<Row>& rows, Row* out) {
  const std::lock_guard<std::mutex> guard(log_lock);
  std::copy(rows.begin(), rows.end(), out);
  return static_cast<int64_t>(rows.size());
}

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

int64_t zeroexp_current() { return device.current.load(); }
int64_t zeroexp_peak() { return device.peak.load(); }
int64_t zeroexp_total() { return device.total.load(); }
int64_t zeroexp_host_peak() { return host.peak.load(); }
void zeroexp_limit(int64_t num_bytes) { limit.store(num_bytes); }
void zeroexp_reset_peak() {
  device.peak.store(device.current.load());
  host.peak.store(host.current.load());
}

// Whether what this thread allocates from now on is the host's.
void zeroexp_on_host(int64_t is_on_host) { on_host = is_on_host != 0; }

// Whether the storage behind a tensor was allocated here, and so is counted.
int64_t zeroexp_counts(int64_t storage) {
  const auto* found = reinterpret_cast<const c10::StorageImpl*>(storage);
  return found->data_ptr().get() != nullptr && found->data_ptr().get_deleter() == &give_back;
}

// The log begins anew with each call, and keeps its rows after `zeroexp_stop_log` until the next one.
void zeroexp_start_log() {
  {
    const std::lock_guard<std::mutex> guard(log_lock);
    changes.clear();
    spans.clear();
    num_threads = 0;
    ++generation;
  }
  running.clear();
  handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&begin, &end)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
  logging.store(true);
}

void zeroexp_stop_log() {
  logging.store(false);
  at::removeCallback(handle);
}

int64_t zeroexp_num_changes() { return static_cast<int64_t>(changes.size()); }
int64_t zeroexp_num_spans() { return static_cast<int64_t>(spans.size()); }
int64_t zeroexp_take_changes(void* out) { return take(changes, static_cast<Change*>(out)); }
int64_t zeroexp_take_spans(void* out) { return take(spans, static_cast<Span*>(out)); }
const char* zeroexp_name(int64_t number) { return names.at(static_cast<size_t>(number)).c_str(); }

}
