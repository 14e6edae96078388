// The update of `adamw` for tensors in host memory, bit for bit that of `adamw_kernels`.
//
// A thread takes pieces of a tensor. Each tile of a piece passes once through the first-level cache:
//
//   memory -> float32 weights, gradients, both moments -> the update -> codes, scales, weights -> memory
//
// What differs by type is chosen once a tile, so that there is one program for all types, and it
// compiles in seconds. Loops are such that a compiler makes vectors of them. Nothing is contracted but
// torch's own `lerp` (-ffp-contract=off), and divisions and roots are IEEE 754's.
//
// Little endian, as all hosts of GPUs are.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#ifdef __AVX512VBMI__
#include <immintrin.h>
#endif

constexpr int TILE = 1024;         // numbers; a multiple of every block
constexpr int PIECE = 64 * TILE;   // numbers that a thread takes at a time
constexpr int EACH = 8;            // numbers that one draw of Philox rounds
enum Type { FLOAT32, BFLOAT16 };

// Filled by `adamw_host`, in this order.
struct Places {
  int64_t weight, gradient, codes[2][2];  // of each moment: codes, scales
  int64_t tensor, draw, numbers, step;
};
struct Numbers {
  float lr, decay, eps, first, second, bias1, bias2, factor;
};
struct Kind {
  int32_t weight, gradient, moment, levels, block, chance, decoupled;
};
struct Job {
  Places at;
  Numbers by;
  Kind kind;
  const float *maps;  // levels and thresholds of the first moment, and of the second
};

static inline uint32_t bits(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}

static inline float number(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}

// ------------------------------------------------------------------------------ plain numbers

static void load(float *out, int64_t from, int type, int64_t start, int n) {
  if (type == FLOAT32) {
    std::memcpy(out, (const float *)from + start, 4 * n);
    return;
  }
  auto in = (const uint16_t *)from + start;
  for (int i = 0; i < n; i++) out[i] = number((uint32_t)in[i] << 16);
}

// NaN stays NaN: rounding could carry into its exponent.
static inline uint16_t rounded(float x, uint32_t more) {
  return x == x ? (bits(x) + more) >> 16 : bits(x) >> 16 | 0x40;
}

static void store(const float *x, int64_t to, int type, int64_t start, int n) {
  if (type == FLOAT32) {
    std::memcpy((float *)to + start, x, 4 * n);
    return;
  }
  auto out = (uint16_t *)to + start;
  for (int i = 0; i < n; i++) out[i] = rounded(x[i], 0x7FFF + (bits(x[i]) >> 16 & 1));
}

// Philox-4x32-7: see `adamw`.
static void store_by_chance(const float *x, const Places &at, int64_t start, int n) {
  alignas(64) uint32_t words[TILE / 2];
  uint16_t halves[TILE];
  uint32_t first = (uint32_t)(at.draw + start / EACH), tensor = (uint32_t)at.tensor;
  uint32_t low = (uint32_t)at.step, high = (uint32_t)((uint64_t)at.step >> 32);
  for (int i = 0; i < (n + EACH - 1) / EACH; i++) {
    uint32_t c0 = first + i, c1 = tensor, c2 = 0, c3 = 0, key0 = low, key1 = high;
    for (int round = 0; round < 7; round++) {
      uint64_t a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
      c0 = (uint32_t)(b >> 32) ^ c1 ^ key0, c1 = (uint32_t)b;
      c2 = (uint32_t)(a >> 32) ^ c3 ^ key1, c3 = (uint32_t)a;
      key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    words[4 * i] = c0, words[4 * i + 1] = c1, words[4 * i + 2] = c2, words[4 * i + 3] = c3;
  }
  std::memcpy(halves, words, sizeof halves);  // the low half of a word is its first number's
  auto out = (uint16_t *)at.weight + start;
  for (int i = 0; i < n; i++) out[i] = rounded(x[i], halves[i]);
}

// ------------------------------------------------------------------------------------ moments

#ifdef __AVX512VBMI__
// out[i] = table[index[i]] for whole 64s of i; returns how many. By permutations of bytes: those of the
// table's numbers lie apart, 256 to four registers, and what they give is interleaved, which goes by
// lanes of 16 bytes. A third of the time that loads for each number take.
static int look_up_64s(float *out, const uint8_t *index, const float *table, int n) {
  alignas(64) uint8_t bytes[4][256], lanes[64];
  for (int i = 0; i < 256; i++)
    for (int b = 0; b < 4; b++) bytes[b][i] = bits(table[i]) >> 8 * b;
  for (int i = 0; i < 64; i++) lanes[i] = i % 16 / 4 * 16 + i / 16 * 4 + i % 4;
  const __m512i order = _mm512_load_si512(lanes);
  int start = 0;
  for (; start + 64 <= n; start += 64) {
    const __m512i at = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(index + start));
    __m512i x[4];
    for (int b = 0; b < 4; b++) {
      auto part = [&](int i) { return _mm512_load_si512(bytes[b] + 64 * i); };
      const __m512i low = _mm512_permutex2var_epi8(part(0), at, part(1));
      const __m512i high = _mm512_permutex2var_epi8(part(2), at, part(3));
      x[b] = _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high);
    }
    for (int half = 0; half < 2; half++) {
      auto joined = half ? [](__m512i a, __m512i b) { return _mm512_unpackhi_epi8(a, b); }
                         : [](__m512i a, __m512i b) { return _mm512_unpacklo_epi8(a, b); };
      const __m512i low = joined(x[0], x[1]), high = joined(x[2], x[3]);
      float *to = out + start + 32 * half;
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low, high));
      _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi16(low, high));
    }
  }
  return start;
}
#else
static int look_up_64s(float *, const uint8_t *, const float *, int) { return 0; }
#endif

static void look_up(float *out, const uint8_t *index, const float *table, int n) {
  for (int i = look_up_64s(out, index, table, n); i < n; i++) out[i] = table[index[i]];
}

static void load_moment(float *out, const Job &job, int which, int64_t start, int n) {
  const int levels = job.kind.levels, block = job.kind.block;
  auto code = (const uint8_t *)job.at.codes[which][0];
  auto scale = (const float *)job.at.codes[which][1];
  const float *level = job.maps + 2 * which * levels;
  if (levels == 0) return load(out, (int64_t)code, job.kind.moment, start, n);
  if (levels == 16) {
    for (int i = 0; i < n / 2; i++) {
      uint8_t two = code[start / 2 + i];
      out[2 * i] = level[two >> 4], out[2 * i + 1] = level[two & 15];
    }
  } else if (levels == 256) {
    look_up(out, code + start, level, n);
  } else {  // E4M3: its bits in float32's places, and the difference of both biases
    for (int i = 0; i < n; i++) {
      uint32_t c = code[start + i], sign = (c & 128) << 24;
      float x = (c & 127) == 127 ? NAN : number((c & 127) << 20) * 0x1p120f;
      out[i] = number(bits(x) | sign);
    }
  }
  for (int b = 0; b < n; b += block) {
    const float by = scale[(start + b) / block];
    for (int i = b; i < b + block; i++) out[i] *= by;
  }
}

// Code of the nearest of 256 levels, or the one below it: see `adamw_kernels`.
template <int COUNT> static inline int32_t below(float x) {
  constexpr double TENS[] = {1e6, 1e5, 1e4, 1e3, 1e2, 1e1, 1e0};
  float code = INFINITY;
#pragma GCC unroll 7
  for (int i = 0; i < 7; i++) {
    const double n = COUNT * (1 << i), first = COUNT * ((1 << i) - 1) + 1;
    float line = __builtin_fmaf(x, (float)(n / 0.9 * TENS[i]), (float)(first - n / 9 - 0.5 - 0.21));
    code = line < code ? line : code;
  }
  return (int32_t)bits(code + 0x1p23f) - 0x4B000000;
}

static void find_256(float *x, uint8_t *out, const float *threshold, bool is_signed, int n) {
  alignas(64) uint8_t above[TILE];  // the code above, which the comparison may leave
  alignas(64) float next[TILE];
  const float lowest = is_signed ? -1.0f : 0.0f;  // NaN has its code, as in torchao
  for (int i = 0; i < n; i++) x[i] = x[i] >= lowest ? x[i] : lowest;
  if (is_signed) {
    for (int i = 0; i < n; i++) {
      int32_t rank = below<1>(std::fabs(x[i]));
      above[i] = x[i] < 0 ? 127 - rank : 128 + rank;
    }
  } else {
    for (int i = 0; i < n; i++) above[i] = below<2>(x[i]) + 1;
  }
  look_up(next, above, threshold, n);
  for (int i = 0; i < n; i++) out[i] = above[i] - !(x[i] >= next[i]);
}

static void find_16(const float *x, uint8_t *out, const float *threshold, int n) {
  alignas(64) int32_t code[TILE];
  for (int i = 0; i < n; i++) {
    code[i] = 0;
#pragma GCC unroll 15
    for (int k = 1; k < 16; k++) code[i] += x[i] >= threshold[k];
  }
  for (int i = 0; i < n / 2; i++) out[i] = code[2 * i] << 4 | code[2 * i + 1];
}

// To nearest, to even; beyond 464 NaN, as torch has it.
static void cast_e4m3(const float *x, uint8_t *out, int n) {
  constexpr uint32_t SUBNORMAL = 121u << 23, SHIFT = 141u << 23, BEYOND = 1087u << 20;
  for (int i = 0; i < n; i++) {
    uint32_t b = bits(x[i]) & 0x7FFFFFFF, sign = bits(x[i]) >> 24 & 128;
    uint32_t small = bits(number(b) + number(SHIFT)) - SHIFT;  // the sum rounds
    uint32_t usual = (b - (120u << 23) + 0x7FFFF + (b >> 20 & 1)) >> 20;
    out[i] = sign | (b >= BEYOND ? 127 : b < SUBNORMAL ? small : usual);
  }
}

static void store_moment(float *x, const Job &job, int which, int64_t start, int n) {
  const int levels = job.kind.levels, block = job.kind.block;
  auto code = (uint8_t *)job.at.codes[which][0];
  auto scales = (float *)job.at.codes[which][1];
  if (levels == 0) return store(x, (int64_t)code, job.kind.moment, start, n);
  for (int b = 0; b < n; b += block) {
    uint32_t largest = 0;  // NaN has the largest bits of all, and stays
    for (int i = b; i < b + block; i++) largest = std::max(largest, bits(x[i]) & 0x7FFFFFFF);
    float scale = number(largest) < 1e-12f ? 1e-12f : number(largest);
    if (levels == 8) scale /= 448.0f;
    scales[(start + b) / block] = scale;
    for (int i = b; i < b + block; i++) x[i] /= scale;
  }
  const float *threshold = job.maps + (2 * which + 1) * levels;
  if (levels == 256) find_256(x, code + start, threshold, which == 0, n);
  else if (levels == 16) find_16(x, code + start / 2, threshold, n);
  else cast_e4m3(x, code + start, n);
}

// --------------------------------------------------------------------------------- the update

static void update(const Job &job, int64_t start, int n) {
  alignas(64) float w[TILE], y[TILE], x[TILE], z[TILE];
  const Numbers by = job.by;
  load(w, job.at.weight, job.kind.weight, start, n);
  load(y, job.at.gradient, job.kind.gradient, start, n);
  load_moment(x, job, 0, start, n);
  load_moment(z, job, 1, start, n);
  for (int i = 0; i < n; i++) y[i] *= by.factor;
  if (job.kind.decoupled)
    for (int i = 0; i < n; i++) w[i] -= by.decay * w[i];
  else
    for (int i = 0; i < n; i++) y[i] += by.decay * w[i];
  for (int i = 0; i < n; i++) {
    x[i] = __builtin_fmaf(y[i] - x[i], by.first, x[i]);
    z[i] = __builtin_fmaf(y[i] * y[i] - z[i], by.second, z[i]);
    w[i] -= by.lr * (x[i] / by.bias1) / (std::sqrt(z[i]) / by.bias2 + by.eps);
  }
  store_moment(x, job, 0, start, n);
  store_moment(z, job, 1, start, n);
  if (job.kind.chance) store_by_chance(w, job.at, start, n);
  else store(w, job.at.weight, job.kind.weight, start, n);
}

static double squares_of(int64_t from, int type, int64_t start, int n) {
  alignas(64) float y[TILE], lanes[64] = {};
  load(y, from, type, start, n);
  std::fill(y + n, y + TILE, 0.0f);
  for (int i = 0; i < TILE; i += 64)
    for (int k = 0; k < 64; k++) lanes[k] += y[i + k] * y[i + k];
  double total = 0;
  for (float lane : lanes) total += lane;
  return total;
}

// Calls work(start, n) for each tile, and done(piece) behind those of a piece.
template <class Work, class Done>
static void everywhere(int64_t numbers, int threads, Work work, Done done) {
  std::atomic<int64_t> next{0};
  auto run = [&] {
    for (int64_t begin; (begin = next.fetch_add(PIECE)) < numbers;) {
      const int64_t end = std::min<int64_t>(numbers, begin + PIECE);
      auto found = work(begin, (int)std::min<int64_t>(TILE, end - begin));
      for (int64_t start = begin + TILE; start < end; start += TILE)
        found += work(start, (int)std::min<int64_t>(TILE, end - start));
      done(begin / PIECE, found);
    }
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min<int64_t>(threads, (numbers + PIECE - 1) / PIECE); i++)
    others.emplace_back(run);
  run();
  for (auto &one : others) one.join();
}

extern "C" void adamw(const Job *job, int threads) {
  auto work = [&](int64_t start, int n) { return update(*job, start, n), 0; };
  everywhere(job->at.numbers, threads, work, [](int64_t, int) {});
}

// Added up in the order of pieces, whichever thread took them.
extern "C" double squares(int64_t from, int type, int64_t numbers, int threads) {
  std::vector<double> parts((numbers + PIECE - 1) / PIECE);
  auto work = [&](int64_t start, int n) { return squares_of(from, type, start, n); };
  everywhere(numbers, threads, work, [&](int64_t piece, double found) { parts[piece] = found; });
  double total = 0;
  for (double part : parts) total += part;
  return total;
}
