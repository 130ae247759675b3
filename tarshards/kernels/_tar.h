/* Parse tar headers in a buffer, one member at a time; used by _tar.c.
 *
 * Formats: POSIX.1-2017 pax "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format".
 */
#include <stdint.h>
#include <string.h>

#define BLOCK 512
#define MAX_EXTENDED (1 << 20) /* bytes of the long names and pax headers before one member */
#define MAX_SIZE (INT64_MAX / 4)
#define MAX_END ((1 << 16) + BLOCK) /* bytes of zeros at the end of an archive: the most that `tar -b128` writes */
#define MAX_RECORD (1 << 20)        /* bytes of a record that `tar -b2048` fills with zeros: larger ones are not known */
#define EMPTY (2 * BLOCK)           /* the least bytes of an archive without members */
#define RECORD (20 * BLOCK)         /* those of GNU tar and Python's tarfile */

static const char zeros[BLOCK];
static const char continued[] = "continued members of multi-volume archives are not supported";
static const char global_place[] = "a global pax header that sets path, size, linkpath or a sparse map is not supported";
static const char sparse[] = "sparse member";
static const char after_end[] = "members after the end of the archive";

/* The contents of the extended headers before a member. */
typedef struct {
    const char *path;
    int64_t path_length; /* -1: not given */
    int64_t size;        /* -1: not given */
    int sparse;          /* whether they say that the member is sparse */
    int named;           /* whether the path is from GNU.sparse.name, which replaces any other */
} Extended;

static int64_t round_up(int64_t size) { return (size + BLOCK - 1) & ~(int64_t)(BLOCK - 1); }

static int64_t bounded_length(const char *text, int64_t limit) {
    const char *end = memchr(text, 0, (size_t)limit);
    return end ? end - text : limit;
}

/* Read an octal field that ends at a NUL, a space or the end of the field; -1 if it is not a number. */
static int64_t parse_octal(const char *field, int width) {
    int i = 0;
    int64_t value = 0;
    while (i < width && field[i] == ' ') i++;
    if (i == width || field[i] < '0' || field[i] > '7') return -1;
    for (; i < width && field[i] >= '0' && field[i] <= '7'; i++) value = value * 8 + (field[i] - '0');
    return i == width || field[i] == 0 || field[i] == ' ' ? value : -1;
}

/* Read a size: octal, or base-256 if the first bit is set; -1 if it is not a number or too large. */
static int64_t parse_size(const char *field) {
    if (!((unsigned char)field[0] & 0x80)) return parse_octal(field, 12);
    if ((unsigned char)field[0] != 0x80) return -1;
    uint64_t value = 0;
    for (int i = 1; i < 12; i++) {
        if (value > (uint64_t)MAX_SIZE >> 8) return -1;
        value = value << 8 | (unsigned char)field[i];
    }
    return value <= (uint64_t)MAX_SIZE ? (int64_t)value : -1;
}

/* Sum the bytes of a block, eight at a time: 64 words of at most 2 x 255 per lane stay below 2^16. */
static int64_t sum_bytes(const unsigned char *block) {
    const uint64_t even = 0x00ff00ff00ff00ffULL;
    uint64_t lanes = 0, word;
    for (int i = 0; i < BLOCK; i += 8) {
        memcpy(&word, block + i, 8);
        lanes += (word & even) + (word >> 8 & even);
    }
    return (int64_t)((lanes & 0xffff) + (lanes >> 16 & 0xffff) + (lanes >> 32 & 0xffff) + (lanes >> 48));
}

/* Compare the stored checksum with the sum of the header, in which the checksum field counts as spaces. Some old
   programs summed signed bytes: each byte from 128 up then counts 256 less. */
static int checksum_is_right(const unsigned char *block) {
    int64_t stored = parse_octal((const char *)block + 148, 8);
    int64_t sum = sum_bytes(block), high = 0;
    if (stored < 0) return 0; /* otherwise a signed sum of -1 would match a missing number */
    for (int i = 148; i < 156; i++) sum += ' ' - block[i];
    if (stored == sum) return 1;
    for (int i = 0; i < BLOCK; i++) high += i < 148 || i >= 156 ? block[i] >> 7 : 0;
    return stored == sum - 256 * high;
}

/* Read the records of a pax header; return what is wrong with them, or NULL. */
static const char *parse_pax(const char *data, int64_t length, int global, Extended *extended) {
    int64_t position = 0;
    while (position < length) {
        int64_t record = 0;
        int64_t i = position;
        for (; i < length && data[i] >= '0' && data[i] <= '9' && i - position < 7; i++)
            record = record * 10 + (data[i] - '0');
        if (i == position || i >= length || data[i] != ' ' || record <= i - position + 1 ||
            record > length - position || data[position + record - 1] != '\n')
            return "bad pax header";
        const char *key = data + i + 1;
        int64_t left = position + record - 1 - (i + 1);
        const char *equals = memchr(key, '=', (size_t)left);
        if (!equals) return "bad pax header";
        int64_t key_length = equals - key;
        const char *value = equals + 1;
        int64_t value_length = left - key_length - 1;
        int is_path = key_length == 4 && !memcmp(key, "path", 4);
        int is_size = key_length == 4 && !memcmp(key, "size", 4);
        int is_sparse = key_length >= 10 && !memcmp(key, "GNU.sparse", 10);
        int is_link = key_length == 8 && !memcmp(key, "linkpath", 8);
        int is_real_name = key_length == 15 && !memcmp(key, "GNU.sparse.name", 15);
        if (key_length == 17 && !memcmp(key, "GNU.volume.offset", 17)) return continued;
        if (global && (is_path || is_size || is_link || is_sparse)) return global_place;
        if (is_sparse) extended->sparse = 1;
        if (is_real_name || (is_path && !extended->named)) {
            if (memchr(value, 0, (size_t)value_length)) return "bad pax header";
            extended->named = is_real_name;
            extended->path = value;
            extended->path_length = value_length;
        }
        if (is_size) {
            int64_t size = 0;
            if (value_length == 0 || value_length > 18) return "bad pax header";
            for (int64_t j = 0; j < value_length; j++) {
                if (value[j] < '0' || value[j] > '9') return "bad pax header";
                size = size * 10 + (value[j] - '0');
            }
            extended->size = size;
        }
        position += record;
    }
    return NULL;
}

/* Return the name of a member's type: "" for a regular file, NULL for an unknown type. */
static const char *kind_of(char type, const char *name, int64_t length) {
    switch (type) {
    case 0: case '0': return length && name[length - 1] == '/' ? "directory" : "";
    case '7': return "";
    case '1': return "hard link";
    case '2': return "symbolic link";
    case '3': return "character device";
    case '4': return "block device";
    case '5': case 'D': return "directory";
    case '6': return "fifo";
    case 'S': return sparse;
    case 'V': return "volume label";
    default: return NULL;
    }
}

/* The state of a scan. */
typedef struct {
    int64_t position;    /* offset in the buffer of the next header, or of the problem */
    int64_t need;        /* bytes from there that the next step needs */
    int64_t zeros;       /* the number of blocks before the position that contain only zeros */
    const char *problem; /* what is wrong, or NULL */
    int trusts;          /* whether checksums need not be verified */
} Scan;

typedef struct {
    const char *name;
    int64_t name_length, header, start, end; /* offsets in the buffer */
    const char *kind;
    int elsewhere;    /* whether its content is not the bytes after its headers: a link, or a sparse member */
    char joined[257]; /* buffer for a prefix and a name */
} Found;

/* Find the next member in the buffer; 0 if there is a problem, or the buffer does not hold all of its headers. */
static int next_member(const char *data, int64_t length, int64_t limit, Scan *scan, Found *found) {
    Extended extended = {NULL, -1, -1, 0, 0};
    int64_t at = scan->position; /* the current block; beyond the position within a chain of extended headers */
    scan->need = BLOCK;
    while (at <= length - BLOCK) {
        const char *block = data + at;
        if (block[0] == 0 && !memcmp(block, zeros, BLOCK)) {
            if (at != scan->position) {
                scan->problem = "an extended header without a member";
                break;
            }
            scan->zeros++;
            scan->position = at += BLOCK;
            continue;
        }
        if (!scan->trusts && !checksum_is_right((const unsigned char *)block)) {
            scan->problem = scan->zeros ? "junk after the end of the archive" : "bad header checksum";
            break;
        }
        if (scan->zeros) {
            scan->problem = after_end;
            break;
        }
        char type = block[156];
        int64_t size = parse_size(block + 124);
        if (type == 'x' || type == 'X' || type == 'g' || type == 'L' || type == 'K') {
            if (size < 0 || size > MAX_EXTENDED - (at - scan->position)) {
                scan->problem = "an extended header with a bad size";
                break;
            }
            int64_t next = at + BLOCK + round_up(size);
            if (next > length) {
                scan->need = next - scan->position;
                break;
            }
            const char *body = block + BLOCK;
            if (type == 'L' && extended.path_length < 0) {
                extended.path = body;
                extended.path_length = bounded_length(body, size);
            } else if (type != 'L' && type != 'K') {
                scan->problem = parse_pax(body, size, type == 'g', &extended);
                if (scan->problem) break;
            }
            at = next;
            if (type == 'g' && extended.path_length < 0 && extended.size < 0) scan->position = at;
            scan->need = at - scan->position + BLOCK;
            continue;
        }
        if (type == 'M') {
            scan->problem = continued;
            break;
        }
        int64_t start = at + BLOCK;
        int more = type == 'S' && block[482]; /* blocks that continue the map of a sparse member */
        for (; more && start <= length - BLOCK; start += BLOCK) more = data[start + 504] != 0;
        if (more) {
            scan->need = start + BLOCK - scan->position;
            if (scan->need > MAX_EXTENDED) scan->problem = "an extended header with a bad size";
            break;
        }

        found->name = block;
        found->name_length = bounded_length(block, 100);
        if (extended.path_length >= 0) {
            found->name = extended.path;
            found->name_length = extended.path_length;
        } else if (!memcmp(block + 257, "ustar", 6) && block[345]) {
            int64_t prefix_length = bounded_length(block + 345, 155);
            memcpy(found->joined, block + 345, (size_t)prefix_length);
            found->joined[prefix_length] = '/';
            memcpy(found->joined + prefix_length + 1, block, (size_t)found->name_length);
            found->name = found->joined;
            found->name_length += prefix_length + 1;
        }
        found->kind = kind_of(type, found->name, found->name_length);
        int is_sparse = type == 'S' || (extended.sparse && found->kind && !*found->kind);
        if (is_sparse) found->kind = sparse;
        found->elsewhere = is_sparse || type == '1' || type == '2';
        int has_data = type == 0 || type == '0' || type == '7' || type == 'D' || type == 'S';
        if (extended.size >= 0 && has_data) size = extended.size;
        if (!has_data) size = 0;
        if (!found->kind) scan->problem = "a member of an unknown type";
        else if (found->name_length == 0) scan->problem = "a member without a name";
        else if (size < 0) scan->problem = "a size that is not a number";
        else if (size > limit) scan->problem = "a member larger than the limit";
        if (scan->problem) break;
        found->header = scan->position;
        found->start = start;
        found->end = found->start + size;
        scan->position = found->start + round_up(size);
        scan->need = BLOCK;
        return 1;
    }
    if (scan->problem) scan->position = at; /* the faulty block, not the first of its chain */
    return 0;
}

/* If a scan stopped at a header after zeros, let it continue there, with another archive, and return 1; return 0 if it
   stopped for another reason. */
static int pass_end(Scan *scan) {
    if (scan->problem != after_end) return 0;
    scan->problem = NULL;
    scan->zeros = 0;
    return 1;
}
