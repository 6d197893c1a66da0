#ifndef DAFJAX_POOL_EVICTION_H_
#define DAFJAX_POOL_EVICTION_H_

#include <cstdint>
#include <map>
#include <utility>

namespace dafjax::pool {

// The error of codes of `bits` bits, as a share of the importance C of their site:
//
//     error(b) = C / (2^b - 1)^2                          b = 1, 2, 4, 8
//     error(0) = 3 C                                      block means
//
// Stochastic rounding to levels that are range / (2^b - 1) apart has a variance in
// proportion to 1 / (2^b - 1)^2, and no bias. Block means alone have a smaller variance
// than one bit, but what they lose is a bias, which does not average out over elements
// and steps. The factor 3 makes the last bit cost 2 C, more than any bit above it (the
// second: 8/9 C; the third and fourth: 0.053 C each), so that planes of one entry go in
// the order of rising cost.
constexpr double RelativeError(int bits) {
  const double levels = static_cast<double>((1 << bits) - 1);
  return bits == 0 ? 3.0 : 1.0 / (levels * levels);
}

// What the loss of a plane costs for each byte that it frees.
constexpr double LossPerByte(double importance, int bits, int lower_bits,
                             int64_t freed_nbytes) {
  const double added = RelativeError(lower_bits) - RelativeError(bits);
  return importance * (added / static_cast<double>(freed_nbytes > 0 ? freed_nbytes : 1));
}

// The order in which planes are lost: of entries that need all bits after all others,
// else the cheapest first, of equal ones the oldest.
struct EvictionKey {
  bool needs_all = false;
  double loss_per_byte = 0;
  uint64_t sequence = 0;
};

inline bool operator<(const EvictionKey& a, const EvictionKey& b) {
  if (a.needs_all != b.needs_all) return b.needs_all;
  if (a.loss_per_byte != b.loss_per_byte) return a.loss_per_byte < b.loss_per_byte;
  return a.sequence < b.sequence;
}
inline bool operator==(const EvictionKey& a, const EvictionKey& b) {
  return !(a < b) && !(b < a);
}

// Slots of entries in the order in which they lose planes: a red-black tree whose nodes
// belong to the entries, so that after Place::Prepare nothing is allocated.
class EvictionTree {
 public:
  using Tree = std::multimap<EvictionKey, uint32_t>;

  // Where an entry is in the tree, or the node that it will be put in with.
  //
  // Invariant: `node` is empty if and only if the entry is in the tree, at `at`, or was
  // not prepared.
  class Place {
   public:
    // Throws std::bad_alloc with nothing changed.
    void Prepare() {
      if (!node_.empty() || inside_) return;
      Tree single;
      node_ = single.extract(single.emplace(EvictionKey{}, 0));
    }
    bool inside() const { return inside_; }

   private:
    friend class EvictionTree;
    Tree::node_type node_;
    Tree::iterator at_;
    bool inside_ = false;
  };

  // Requires that `place` is prepared and not in the tree.
  void Insert(Place* place, const EvictionKey& key, uint32_t slot) {
    place->node_.key() = key;
    place->node_.mapped() = slot;
    place->at_ = tree_.insert(std::move(place->node_));
    place->inside_ = true;
  }
  void Remove(Place* place) {
    place->node_ = tree_.extract(place->at_);
    place->inside_ = false;
  }

  // In order.
  Tree::const_iterator begin() const { return tree_.begin(); }
  Tree::const_iterator end() const { return tree_.end(); }
  int64_t size() const { return static_cast<int64_t>(tree_.size()); }

 private:
  Tree tree_;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_EVICTION_H_
