// How many threads to start for work that memory bandwidth bounds: copying, and zeroing fresh pages.
#pragma once

namespace shardsnap {

// One per core that this process may use, at most 16: bandwidth is spent long before more cores take part.
unsigned memory_bound_threads();

}  // namespace shardsnap
