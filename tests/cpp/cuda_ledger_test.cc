// Notes of a GPU for a ledger, run by the simulator: all that is enqueued is in the ledger
// when somebody has waited for the stream, as it was when the device was there.
//
//   cuda_ledger_test

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/device.h"
#include "ledger/device_notes.h"
#include "ledger/ledger.h"
#include "pool/by_hash.h"
#include "values.h"

namespace dafjax {
namespace {

constexpr uint64_t kName = 7;
constexpr int64_t kSites = 3;
constexpr int64_t kColumns = kSites + 1;
constexpr int64_t kMostRows = 700;  // more than a note has room for at first

// What is enqueued as one: values are written to the device's memory, noted, and
// overwritten.
struct Step {
  std::vector<float> values;
  std::vector<float> other = std::vector<float>(kMostRows * kColumns, 1e9f);
  std::vector<float> on_device = std::vector<float>(kMostRows * kColumns);
};

void Enqueue(Stream stream, int64_t num_rows, Step* step) {
  std::vector<int64_t> sites = {1, -2, 3};
  const size_t nbytes = static_cast<size_t>(num_rows * kColumns) * sizeof(float);
  float* const rows = step->on_device.data();
  const auto copy = [=](const std::vector<float>& from) {
    CHECK(cudaMemcpyAsync(rows, from.data(), nbytes, cudaMemcpyHostToDevice, stream) == 0);
  };
  copy(step->values);
  CHECK(NoteFromDevice(stream, &NoteInLedger, kName, sites.data(), kSites, rows,
                       num_rows) == nullptr);
  copy(step->other);
  sites.assign(kSites, 0);
}

void Run(unsigned delay, int num_steps, Random* random) {
  simulator::CurrentDevice().delay = delay;
  // The second of the sites is not known.
  auto ledger = std::make_shared<Ledger>(std::vector<uint64_t>{1, 3});
  CHECK(ByHash<Ledger>::All().Register(kName, ledger));
  Stream streams[2];
  for (Stream& stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, 0) == 0);
  std::vector<Step> steps(static_cast<size_t>(num_steps));
  for (int round = 0; round < 3; ++round) {
    double sums[kColumns] = {};
    int64_t notes = 0;
    for (Step& step : steps) {
      const int64_t num_rows =
          random->Next() % 8 == 0 ? kMostRows : 1 + random->Next() % 4;
      step.values.clear();
      for (int64_t i = 0; i < num_rows * kColumns; ++i) {
        const float value = 1.0f + static_cast<float>(random->Next() % 2);
        step.values.push_back(value);
        sums[i % kColumns] += static_cast<double>(value);
      }
      notes += num_rows;
      Enqueue(streams[random->Next() % 2], num_rows, &step);
    }
    for (const Stream stream : streams) CHECK(cudaStreamSynchronize(stream) == 0);
    const Measured taken = ledger->Take();
    CHECK(taken.notes == notes);
    CHECK(taken.refused == 0);
    CHECK(taken.importances.at(1) == sums[0]);
    CHECK(taken.importances.at(3) == sums[2]);
    CHECK(taken.gradient_energy == sums[3]);
  }
  // Nobody wants to know any more.
  Enqueue(streams[0], 1, &steps[0]);
  ledger.reset();
  for (const Stream stream : streams) {
    CHECK(cudaStreamSynchronize(stream) == 0);
    CHECK(cudaStreamDestroy(stream) == 0);
  }
}

}  // namespace
}  // namespace dafjax

int main() {
  dafjax::Random random;
  for (const unsigned delay : {100u, 100u, 90u, 50u, 0u}) dafjax::Run(delay, 40, &random);
}
