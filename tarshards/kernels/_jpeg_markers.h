/* Walk through the markers of a JPEG up to its first scan, for the kernels that read headers (ITU-T T.81, annex B). */
#include <stdint.h>

#define START_OF_SCAN 0xda
#define IS_FRAME(marker) \
    ((marker) >= 0xc0 && (marker) <= 0xcf && (marker) != 0xc4 && (marker) != 0xc8 && (marker) != 0xcc)

/* The bytes of a marker that has a length: the marker, the length, and what it counts, which may not all be there. */
typedef struct {
    int marker;
    int64_t at, end;
} Segment;

static inline int two_bytes(const uint8_t *at) { return at[0] << 8 | at[1]; }

/* Find the first segment from an offset on; its marker is -1 if there is none. */
static inline Segment next_segment(const uint8_t *data, int64_t size, int64_t at) {
    while (at + 4 <= size && data[at] == 0xff) {
        const int marker = data[at + 1], is_alone = marker == 1 || (marker >= 0xd0 && marker <= 0xd8);
        if (marker != 0xff && !is_alone) return (Segment){marker, at, at + 2 + two_bytes(data + at + 2)};
        at += is_alone ? 2 : 1; /* 0xff: a fill byte */
    }
    return (Segment){-1, at, at};
}
