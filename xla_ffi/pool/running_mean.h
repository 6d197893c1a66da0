#ifndef DAFJAX_POOL_RUNNING_MEAN_H_
#define DAFJAX_POOL_RUNNING_MEAN_H_

#include <algorithm>

namespace dafjax {

// What counts of a sample. Of one far above the mean of those before (0: unknown) little
// does: an execution that noise has spoiled would outweigh hundreds of others.
inline double Bounded(double sample, double mean) {
  constexpr double kMost = 8;
  return mean > 0 ? std::min(sample, kMost * mean) : sample;
}

// The mean of about eight samples, one more counted in.
inline double RunningMean(double mean, double sample) {
  constexpr double kWeight = 1.0 / 8;
  return mean + kWeight * (Bounded(sample, mean) - mean);
}

}  // namespace dafjax

#endif  // DAFJAX_POOL_RUNNING_MEAN_H_
