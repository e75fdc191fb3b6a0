// CRC-64/NVME of ranges of device memory, many at once.
//
// A range is cut into pieces, and a warp takes one piece at a time. A row of a piece is 512 bytes: lane l has the 16
// bytes at 16 * l, two words, and keeps a remainder for each. From one row to the next a remainder is carried over 512
// bytes of zeros, a linear map of 64 bits that 16 look-ups of 4 bits each carry out, and the lane's next word is added.
// The tables for that lie in shared memory in 16 copies, one for each pair of banks, so that no two lanes of a half-warp
// ever ask the same bank: 256 bytes of a row cost 32 cycles of shared memory, 8 bytes a cycle and multiprocessor.
//
// At the end of a piece the remainders are carried over what follows them in their row, added, and carried over what
// follows the piece in its range. The sum of a range's pieces, which the host forms, is its CRC without the initial
// value and the final inversion, which depend on the length alone.
//
// The same algorithm in Rust, with the constants, is in src/device/cuda/checksum/model.rs. checksum.ptx is made of this by
// regenerate.py, and committed.

struct Piece {
    unsigned long long address;  // a multiple of 16
    unsigned long long bytes;    // a multiple of 512
    unsigned long long after;    // x^(8 * bytes that follow it in its range), reflected
};

struct Constants {
    unsigned long long carried[64];  // bit i, carried over 512 bytes of zeros
    unsigned long long lane[32];     // x^(8 * bytes from the second word of lane l to the end of the row)
};

static __device__ const unsigned long long POLYNOMIAL = 0x9A6C9329AC4BC9B5ull;

// times x: one bit of zeros further
__device__ __forceinline__ unsigned long long times_x(unsigned long long a) {
    return (a >> 1) ^ (POLYNOMIAL & (0ull - (a & 1)));
}

// a * b modulo the polynomial; the highest bit is x^0
__device__ unsigned long long times(unsigned long long a, unsigned long long b) {
    unsigned long long product = 0;
    for (int i = 63; i >= 0; i--) {
        product ^= b & (0ull - ((a >> i) & 1));
        b = times_x(b);
    }
    return product;
}

// The look-ups of one word: table p holds the 4 bits from bit 4 * p on, 16 values of 16 copies each.
__device__ __forceinline__ unsigned long long carry(const unsigned long long* mine, unsigned long long a) {
    const char* base = (const char*)mine;
    unsigned long long sum = 0;
    const unsigned low = (unsigned)a, high = (unsigned)(a >> 32);
#pragma unroll
    for (int p = 0; p < 8; p++) {
        // 16 copies of 8 bytes each: a value is 128 bytes from the next.
        const unsigned at_low = p < 2 ? (low << (7 - 4 * p)) & 0x780 : (low >> (4 * p - 7)) & 0x780;
        const unsigned at_high = p < 2 ? (high << (7 - 4 * p)) & 0x780 : (high >> (4 * p - 7)) & 0x780;
        sum ^= *(const unsigned long long*)(base + p * 2048 + at_low);
        sum ^= *(const unsigned long long*)(base + (p + 8) * 2048 + at_high);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(256, 4) kvhoist_checksum(
    const Piece* __restrict__ pieces, unsigned count, unsigned long long* __restrict__ sums, const Constants constants) {
    __shared__ unsigned long long tables[16 * 16 * 16];
    const unsigned lane = threadIdx.x % 32;

    // 256 threads, 256 values: table threadIdx.x / 16, value threadIdx.x % 16.
    unsigned long long value = 0;
#pragma unroll
    for (int bit = 0; bit < 4; bit++) {
        if (threadIdx.x >> bit & 1) value ^= constants.carried[threadIdx.x / 16 * 4 + bit];
    }
    for (int copy = 0; copy < 16; copy++) tables[threadIdx.x * 16 + (copy + threadIdx.x) % 16] = value;
    __syncthreads();
    const unsigned long long* mine = tables + lane % 16;

    const unsigned stride = gridDim.x * (blockDim.x / 32);
    for (unsigned at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; at < count; at += stride) {
        const Piece piece = pieces[at];
        const ulonglong2* row = (const ulonglong2*)piece.address + lane;
        unsigned long long rows = piece.bytes / 512;
        unsigned long long first = 0, second = 0;
        // Four rows are asked for before the first is needed: 2 KiB a warp in flight.
        for (; rows >= 4; rows -= 4, row += 4 * 32) {
            ulonglong2 held[4];
#pragma unroll
            for (int i = 0; i < 4; i++) held[i] = __ldcs(row + 32 * i);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                first = carry(mine, first) ^ held[i].x;
                second = carry(mine, second) ^ held[i].y;
            }
        }
        for (; rows > 0; rows--, row += 32) {
            const ulonglong2 held = __ldcs(row);
            first = carry(mine, first) ^ held.x;
            second = carry(mine, second) ^ held.y;
        }
        // The first word of a lane is followed by the second.
        for (int bit = 0; bit < 64; bit++) first = times_x(first);
        unsigned long long sum = times(first ^ second, constants.lane[lane]);
        for (int distance = 16; distance > 0; distance /= 2) sum ^= __shfl_xor_sync(0xffffffff, sum, distance);
        if (lane == 0) sums[at] = times(sum, piece.after);
    }
}
