// Copies scattered ranges between pinned host memory and device memory, either way.
//
// One warp takes one tile at a time. It reads the description of its next tile before it moves the current one, so
// that the way over PCIe for the one overlaps that for the other, and it has eight 16-byte loads of every lane in
// flight (4 KiB a warp) before the first store: at 16 thread blocks of 16 warps that is 1 MiB, far more than what
// covers the latency of the bus.
//
// copy.ptx is made of this by regenerate.py, and committed: machines that build kvhoist need no CUDA.

struct Tile {
    unsigned long long src;
    unsigned long long dst;
    unsigned long long len;
};

template <typename Word, int IN_FLIGHT>
__device__ __forceinline__ void move_words(Word* dst, const Word* src, unsigned long long words, unsigned lane) {
    unsigned long long at = lane;
    for (; at + 32 * (IN_FLIGHT - 1) < words; at += 32 * IN_FLIGHT) {
        Word held[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) held[i] = __ldcs(src + at + 32 * i);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) __stcs(dst + at + 32 * i, held[i]);
    }
    for (; at < words; at += 32) __stcs(dst + at, __ldcs(src + at));
}

extern "C" __global__ void __launch_bounds__(512) kvhoist_copy(const Tile* __restrict__ tiles, unsigned count) {
    const unsigned lane = threadIdx.x % 32;
    const unsigned stride = gridDim.x * (blockDim.x / 32);
    unsigned at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (at >= count) return;
    Tile tile = tiles[at];
    for (;;) {
        const unsigned next = at + stride;
        Tile coming = tile;
        if (next < count) coming = tiles[next];
        const unsigned long long all = tile.src | tile.dst | tile.len;
        if (all % 16 == 0) {
            move_words<uint4, 8>((uint4*)tile.dst, (const uint4*)tile.src, tile.len / 16, lane);
        } else if (all % 4 == 0) {
            move_words<unsigned, 8>((unsigned*)tile.dst, (const unsigned*)tile.src, tile.len / 4, lane);
        } else {
            move_words<unsigned char, 8>((unsigned char*)tile.dst, (const unsigned char*)tile.src, tile.len, lane);
        }
        if (next >= count) return;
        at = next;
        tile = coming;
    }
}
