/* Resize an image, for the kernels of images.
 *
 * Each pixel is the weighted sum of the source pixels under a triangle as wide as the scale (Pillow's BILINEAR with a
 * box), first along rows, then along columns. Weights have 14 bits, and the results of the first step 8 bits.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(PORTABLE)
#include <cpuid.h>
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

#define PRECISION 14
#define HALF (1 << (PRECISION - 1))
#define LANES 16 /* bytes of a row that resample_column_avx2 computes at once */
#define PADDED(bytes) (((bytes) + 2 * LANES - 1) / LANES * LANES)
#define MAX_SIDE (1 << 24)

/* The source pixels, and their weights, that make each pixel of one axis. */
typedef struct {
    int32_t *first, *count; /* of source pixels; counts are even, since weights are used in pairs: the last may be 0 */
    int16_t *weights;       /* of output pixel i: count[i] weights from weights[i * most] on, then zeros up to *most* */
    int32_t most;           /* weights that there is memory for */
    int32_t longest;        /* the largest count */
    int32_t length;         /* of the source, and */
    float low, high;        /* the range of it that the weights were computed for */
} Axis;

static double triangle(double x) {
    if (x < 0) x = -x;
    return x < 1 ? 1 - x : 0;
}

/* Return an even upper bound for the number of weights of an output pixel. */
static int32_t most_taps(float low, float high, int32_t size) {
    double scale = (double)(high - low) / size;
    return 2 * (int32_t)(scale < 1 ? 2 : scale + 2);
}

/* Compute the weights of *length* source pixels for *size* output pixels over [low, high], unless they are there. The
 * rounded weights of each output pixel add up to exactly 1. */
static void weigh(Axis *axis, float low, float high, int32_t length, int32_t size) {
    if (axis->low == low && axis->high == high && axis->length == length) return;
    axis->low = low;
    axis->high = high;
    axis->length = length;
    axis->longest = 0;
    const double scale = (double)(axis->high - axis->low) / size, support = scale < 1 ? 1 : scale;
    for (int32_t i = 0; i < size; i++) {
        const double center = axis->low + (i + 0.5) * scale;
        int32_t first = (int32_t)(center - support + 0.5), last = (int32_t)(center + support + 0.5), before = 0;
        double total = 0, sum = 0;
        if (first < 0) first = 0;
        if (last > length) last = length;
        int16_t *weights = axis->weights + (int64_t)i * axis->most;
        for (int32_t x = first; x < last; x++) total += triangle((x - center + 0.5) / support);
        for (int32_t x = first; x < last; x++) {
            sum += triangle((x - center + 0.5) / support);
            const int32_t now = (int32_t)(sum / total * (1 << PRECISION) + 0.5);
            weights[x - first] = (int16_t)(now - before);
            before = now;
        }
        axis->first[i] = first;
        axis->count[i] = last - first + (last - first) % 2;
        if (axis->longest < axis->count[i]) axis->longest = axis->count[i];
        for (int32_t t = last - first; t < axis->most; t++) weights[t] = 0;
    }
}

/* Resample two rows. Bytes after a row are read (see read_past), and 4 written from its last output pixel on. */
static void resample_rows(uint8_t *out[2], const uint8_t *const rows[2], const Axis *axis, int32_t width,
                          int32_t channels, int flip) {
    for (int side = 0; side < 2; side++)
        for (int32_t x = 0; x < width; x++) {
            const int32_t i = flip ? width - 1 - x : x;
            const int16_t *weights = axis->weights + (int64_t)i * axis->most;
            const uint8_t *pixel = rows[side] + (int64_t)axis->first[i] * channels;
            for (int32_t c = 0; c < channels; c++) {
                int32_t sum = HALF;
                for (int32_t t = 0; t < axis->count[i]; t++) sum += weights[t] * pixel[t * channels + c];
                out[side][x * channels + c] = (uint8_t)(sum >> PRECISION);
            }
        }
}

/* Write the weighted sum of *count* rows of a ring buffer, from row *first* on; rows are *stride* bytes apart and
 * padded to a multiple of LANES. */
static void resample_column(uint8_t *out, const uint8_t *ring, int64_t stride, int32_t capacity, int32_t first,
                            const int16_t *weights, int32_t count, int64_t bytes) {
    for (int64_t x = 0; x < bytes; x++) {
        int32_t sum = HALF;
        for (int32_t t = 0; t < count; t++) sum += weights[t] * ring[(first + t) % capacity * stride + x];
        out[x] = (uint8_t)(sum >> PRECISION);
    }
}

#ifdef AVX2
static int has_avx2; /* whether the processor and the system support it */

/* Ask the processor: with zig's runtime library, __builtin_cpu_supports always returns 0. */
static int find_avx2(void) {
    unsigned a, b, c, d, saved, more;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(more) : "c"(0));
    const int are_saved = (saved & 6) == 6; /* the system saves SSE and AVX registers when it switches processes */
    return are_saved && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

static __m128i load(const void *from) { return _mm_loadl_epi64(from); }

AVX2 static __m256i pair_of(const int16_t *weights) {
    int32_t pair;
    memcpy(&pair, weights, 4);
    return _mm256_set1_epi32(pair);
}

/* Do what resample_rows does with *pairs* pairs of weights for every pixel, a constant where it is inlined: a loop whose
 * length changes from pixel to pixel would be mispredicted. */
AVX2 INLINE void resample_pairs(uint8_t *out[2], const uint8_t *const rows[2], const Axis *axis, int32_t width,
                                int32_t channels, int flip, int32_t pairs) {
    /* Interleave two adjacent pixels into pairs of 16-bit values, one pair for each channel. */
    const __m128i three = _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1);
    const __m128i four = _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1);
    const __m256i order = _mm256_broadcastsi128_si256(channels == 3 ? three : four);
    const __m256i lowest = _mm256_set1_epi64x(0x0c080400);
    /* Pointers to bytes may alias anything, so the compiler would reload these values after each store. */
    const int32_t step = flip ? -1 : 1, most = axis->most * step, begin = flip ? width - 1 : 0;
    const int32_t *first = axis->first + begin;
    const int16_t *weights = axis->weights + (int64_t)begin * axis->most;
    const uint8_t *const row_above = rows[0], *const row_below = rows[1];
    uint8_t *above = out[0], *below = out[1];
    for (int32_t x = 0; x < width; x++, above += channels, below += channels) {
        const uint8_t *pixel_above = row_above + (int64_t)*first * channels;
        const uint8_t *pixel_below = row_below + (int64_t)*first * channels;
        __m256i sums = _mm256_set1_epi32(HALF);
        for (int32_t t = 0; t < pairs; t++, pixel_above += 2 * channels, pixel_below += 2 * channels) {
            const __m256i pixels = _mm256_inserti128_si256(_mm256_castsi128_si256(load(pixel_above)), load(pixel_below), 1);
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, order), pair_of(weights + 2 * t)));
        }
        sums = _mm256_srai_epi32(sums, PRECISION);
        sums = _mm256_shuffle_epi8(sums, lowest);
        const int32_t made_above = _mm256_extract_epi32(sums, 0), made_below = _mm256_extract_epi32(sums, 4);
        memcpy(above, &made_above, 4);
        memcpy(below, &made_below, 4);
        first += step;
        weights += most;
    }
}

AVX2 static void resample_rows_avx2(uint8_t *out[2], const uint8_t *const rows[2], const Axis *axis, int32_t width,
                                    int32_t channels, int flip) {
    const int32_t pairs = axis->longest / 2;
    if (channels == 1) resample_rows(out, rows, axis, width, channels, flip);
    else if (channels == 3 && pairs == 1) resample_pairs(out, rows, axis, width, 3, flip, 1);
    else if (channels == 3 && pairs == 2) resample_pairs(out, rows, axis, width, 3, flip, 2);
    else if (channels == 3 && pairs == 3) resample_pairs(out, rows, axis, width, 3, flip, 3);
    else resample_pairs(out, rows, axis, width, channels, flip, pairs);
}

AVX2 static void resample_column_avx2(uint8_t *out, const uint8_t *ring, int64_t stride, int32_t capacity, int32_t first,
                                      const int16_t *weights, int32_t count, int64_t bytes) {
    for (int64_t x = 0; x < bytes; x += LANES) {
        __m256i low = _mm256_set1_epi32(HALF), high = low;
        int32_t slot = first % capacity;
        for (int32_t t = 0; t < count; t += 2) {
            const __m128i above = _mm_loadu_si128((const __m128i *)(ring + slot * stride + x));
            if (++slot == capacity) slot = 0;
            const __m128i below = _mm_loadu_si128((const __m128i *)(ring + slot * stride + x));
            if (++slot == capacity) slot = 0;
            const __m256i pair = pair_of(weights + t);
            low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(above, below)), pair));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(above, below)), pair));
        }
        __m256i words = _mm256_packs_epi32(_mm256_srai_epi32(low, PRECISION), _mm256_srai_epi32(high, PRECISION));
        words = _mm256_permute4x64_epi64(words, 0xd8);
        const __m128i done = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i *)(out + x), done);
    }
}
#endif

typedef struct {
    int32_t height, width, channels, out_height, out_width;
    int planar;
    const float *divisors, *offsets; /* one per channel; NULL if the output is bytes */
} Shapes;

/* Write a row of pixels as float32 or bytes; in planar output, channels are *plane* elements apart. With three
 * channels, the first *split_count* pixels are already in *split*, by channel. */
INLINE void write_line(char *out, const uint8_t *restrict line, uint8_t *restrict split, const Shapes *s, int64_t plane,
                       int32_t split_count) {
    const int32_t width = s->out_width, channels = s->channels, rows = s->planar ? channels : 1;
    const int64_t length = (int64_t)width * channels / rows;
    if (rows == 3)
        for (int32_t x = split_count; x < width; x++) {
            split[x] = line[3 * x];
            split[width + x] = line[3 * x + 1];
            split[2 * width + x] = line[3 * x + 2];
        }
    else if (rows == 4)
        for (int32_t x = 0; x < 4 * width; x++) split[x % 4 * width + x / 4] = line[x];
    else
        split = (uint8_t *)line;
    for (int32_t c = 0; c < rows; c++, split += length) {
        if (!s->divisors) {
            memcpy(out + c * plane, split, (size_t)length);
            continue;
        }
        float *restrict target = (float *)out + c * plane;
        const float divisor = s->divisors[c], offset = s->offsets[c];
        if (s->planar || channels == 1)
            for (int64_t x = 0; x < length; x++) target[x] = split[x] / divisor - offset;
        else
            for (int64_t x = 0; x < length; x += channels)
                for (int32_t i = 0; i < channels; i++) target[x + i] = split[x + i] / s->divisors[i] - s->offsets[i];
    }
}

static void write_line_plain(char *out, const uint8_t *line, uint8_t *split, const Shapes *s, int64_t plane) {
    write_line(out, line, split, s, plane, 0);
}

#ifdef AVX2
/* Shuffles that select the bytes of channel c from the v-th of the three vectors that hold 16 pixels. */
#define PLACE(c, v, i) ((3 * (i) + (c)) / 16 == (v) ? (3 * (i) + (c)) % 16 : 0x80)
#define FOUR(c, v, i) PLACE(c, v, i), PLACE(c, v, (i) + 1), PLACE(c, v, (i) + 2), PLACE(c, v, (i) + 3)
#define VECTOR(c, v) {FOUR(c, v, 0), FOUR(c, v, 4), FOUR(c, v, 8), FOUR(c, v, 12)}
static const uint8_t shuffles[3][3][16] = {{VECTOR(0, 0), VECTOR(0, 1), VECTOR(0, 2)},
                                         {VECTOR(1, 0), VECTOR(1, 1), VECTOR(1, 2)},
                                         {VECTOR(2, 0), VECTOR(2, 1), VECTOR(2, 2)}};

AVX2 static __m128i load_whole(const uint8_t *from) { return _mm_loadu_si128((const __m128i *)from); }

/* Split a row into its three channels, in whole vectors; return the number of pixels that were split. */
AVX2 static int32_t split_three(uint8_t *split, const uint8_t *line, int32_t width) {
    int32_t x = 0;
    for (; x + 16 <= width; x += 16)
        for (int c = 0; c < 3; c++) {
            __m128i channel = _mm_setzero_si128();
            for (int v = 0; v < 3; v++) {
                const __m128i pixels = load_whole(line + 3 * x + 16 * v);
                channel = _mm_or_si128(channel, _mm_shuffle_epi8(pixels, load_whole(shuffles[c][v])));
            }
            _mm_storeu_si128((__m128i *)(split + c * width + x), channel);
        }
    return x;
}

AVX2 static void write_line_avx2(char *out, const uint8_t *line, uint8_t *split, const Shapes *s, int64_t plane) {
    const int32_t split_count = s->planar && s->channels == 3 ? split_three(split, line, s->out_width) : 0;
    write_line(out, line, split, s, plane, split_count);
}
#endif

/* The working memory of a resize; reallocated if it needs more. */
typedef struct {
    Axis across, down;
    uint8_t *ring;   /* rows that were resampled across */
    uint8_t *line;   /* the output row that they make */
    uint8_t *split;  /* its channels, one after the other */
    void *memory;    /* the allocation of all these */
    int64_t size;    /* of it, in bytes */
    int32_t out[3];  /* the height, width and channels that it is divided for */
} Scratch;

static Axis make_axis(int32_t *first, int32_t *count, int16_t *weights, int32_t most) {
    return (Axis){first, count, weights, most, 0, 0, 0, 0};
}

/* Prepare memory and weights for a box; return 0 if memory cannot be allocated. */
static int prepare(Scratch *scratch, const Shapes *s, const float *box) {
    const int32_t across = most_taps(box[0], box[2], s->out_width), down = most_taps(box[1], box[3], s->out_height);
    const int32_t out[] = {s->out_height, s->out_width, s->channels};
    if (across > scratch->across.most || down > scratch->down.most || memcmp(out, scratch->out, sizeof out)) {
        const int64_t row = PADDED((int64_t)s->out_width * s->channels), width = s->out_width, height = s->out_height;
        const int64_t size = 8 * (width + height) + 2 * (width * across + height * down) + row * (down + 4);
        memset(scratch->out, 0, sizeof out);
        if (size > scratch->size) {
            free(scratch->memory);
            scratch->memory = calloc(1, (size_t)size);
            scratch->size = scratch->memory ? size : 0;
            if (!scratch->memory) return 0;
        }
        memcpy(scratch->out, out, sizeof out);
        int32_t *first = scratch->memory;
        int16_t *weights = (int16_t *)(first + 2 * (width + height));
        scratch->across = make_axis(first, first + width, weights, across);
        scratch->down = make_axis(first + 2 * width, first + 2 * width + height, weights + width * across, down);
        scratch->ring = (uint8_t *)(weights + width * across + height * down);
        scratch->line = scratch->ring + row * (down + 2);
        scratch->split = scratch->line + row;
    }
    weigh(&scratch->across, box[0], box[2], s->width, s->out_width);
    weigh(&scratch->down, box[1], box[3], s->height, s->out_height);
    return 1;
}

/* Return how many bytes after a row are read, too. */
static int64_t read_past(const Axis *axis, int32_t channels) { return (int64_t)axis->longest * channels + 8; }

/* Return a row of a source, with as many bytes after it as *read_past* says. Rows are asked for in ascending order, in
 * pairs, and both of a pair are used at once. */
typedef const uint8_t *(*GetRow)(void *source, int32_t row);

INLINE void resize_one(char *out, GetRow get_row, void *source, const Shapes *s, Scratch *scratch, int flip) {
    const Axis *down = &scratch->down;
    const int64_t bytes = (int64_t)s->out_width * s->channels;
    const int64_t stride = PADDED(bytes), plane = s->planar ? (int64_t)s->out_height * s->out_width : 1;
    const int64_t across = s->planar ? s->out_width : bytes; /* elements from one line to the next */
    const int64_t element = s->divisors ? sizeof(float) : 1;
    const int32_t capacity = down->most + 2;
    int32_t ready = 0; /* source rows before this one have been resampled, or are not needed */
    for (int32_t y = 0; y < s->out_height; y++) {
        const int32_t first = down->first[y], count = down->count[y];
        const int32_t last = first + count < s->height ? first + count : s->height;
        const int16_t *weights = down->weights + (int64_t)y * down->most;
        if (ready < first) ready = first;
        for (; ready < last; ready += 2) {
            const uint8_t *rows[2];
            uint8_t *made[2];
            for (int side = 0; side < 2; side++) {
                rows[side] = get_row(source, ready + side < s->height ? ready + side : s->height - 1);
                made[side] = scratch->ring + (ready + side) % capacity * stride;
            }
#ifdef AVX2
            if (has_avx2) resample_rows_avx2(made, rows, &scratch->across, s->out_width, s->channels, flip);
            else
#endif
                resample_rows(made, rows, &scratch->across, s->out_width, s->channels, flip);
        }
        char *const to = out + y * across * element;
#ifdef AVX2
        if (has_avx2) {
            resample_column_avx2(scratch->line, scratch->ring, stride, capacity, first, weights, count, bytes);
            write_line_avx2(to, scratch->line, scratch->split, s, plane);
            continue;
        }
#endif
        resample_column(scratch->line, scratch->ring, stride, capacity, first, weights, count, bytes);
        write_line_plain(to, scratch->line, scratch->split, s, plane);
    }
}

static int box_is_right(const float *box, const Shapes *s) {
    return box[0] >= 0 && box[1] >= 0 && box[0] < box[2] && box[1] < box[3] && box[2] <= (float)s->width &&
           box[3] <= (float)s->height;
}

static int shapes_are_right(const Shapes *s) {
    const int32_t sides[] = {s->height, s->width, s->out_height, s->out_width};
    for (int i = 0; i < 4; i++)
        if (sides[i] < 1 || sides[i] > MAX_SIDE) return 0;
    return s->channels == 1 || s->channels == 3 || s->channels == 4;
}
