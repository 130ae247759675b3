/* The members of shards as their sidecars list them, and their headers: the native twin of _headers_py.py, which
 * documents the functions.
 *
 * A member matches if the 512 bytes before its data are the header of a regular file with its name and size, and no
 * extended header can precede these: the header of the previous member has the size in the index, so its data ends
 * where the headers of this one begin. tarshards.index.header_checks decides on all other members.
 *
 * Sidecars and shards are mapped files, or bytes. Another process can write to a file or truncate it at any time, so
 * mapped files are read under the guard, and values from them are checked against bounds before use.
 */
#include <Python.h>
#include <stdlib.h>

#include "_guard.h"
#include "_tar.h"

#define FEW 16          /* members of a sample for which no memory is allocated */
#define HEAD 4096       /* bytes before a member's data that are read with it, at most */
#define SHORT 256       /* bytes of a key for which no memory is allocated */
#define TOGETHER 32     /* samples that are prefetched together, then read */
#define AHEAD 8         /* members whose headers are prefetched */
#define EVERY 64        /* a table has the offset, of 4 bytes, of each EVERY-th key */
#define PAGE 4096       /* bytes of a sidecar that have a checksum of their own */
#define LONGEST_HEAD 5  /* bytes before the text of a key */
#define DEEPEST 32      /* the deepest nesting of arrays and maps */
#define ROWS 64         /* comparing stops if a disk is read more than FEW_READS times for this many members */
#define FEW_READS 2
#define DAMAGED "damaged: truncated, or wrong checksum"

static const Guard *guard;
static PyObject *key_name, *url_name; /* "__key__", "__url__" */

typedef struct {
    const char *text;
    int64_t length;
} Text;

/* A member in a sidecar: the offset and size of its data, and the number of its field. */
typedef struct {
    int64_t offset, size, field;
} Entry;

/* The checksums of a sidecar's pages, which are compared when a page is first used. */
typedef struct {
    uint32_t *sums;      /* the CRC-32 of each page; the last one may be shorter */
    unsigned char *bits; /* a bit for each page that is set if it was compared, or nothing of it is read */
    int64_t end, left;   /* the bytes in all pages; the number of pages whose bit is not set */
    int is_damaged;      /* whether a page had another checksum */
} Checks;

/* The sidecar of a shard, and the offsets in it of its arrays and of each EVERY-th key. */
typedef struct {
    PyObject_HEAD
    Py_buffer sidecar;
    PyObject *file; /* the Mapping that *sidecar* is of; NULL if it is bytes */
    Py_ssize_t file_size;
    Witness witness; /* of *file* */
    int64_t samples, members, shard_size, field_count;
    int64_t each; /* the number of members of every sample; 0 if it varies */
    int64_t keys, sample, field, offset, size;
    uint32_t *marks; /* the offset of each EVERY-th key from *keys* */
    Checks checks;   /* of no page if the sidecar was checked as a whole */
    PyObject *names; /* the bytes that *fields* points to */
    Text *fields;
} MemberTable;

/* The members *begin* to *end* of a table, and bytes of their shard, from its offset *low* on. */
typedef struct {
    PyObject_HEAD
    Py_buffer shard;
    Witness witness; /* of *shard* */
    MemberTable *table;
    int64_t low, begin, end;
    int is_called; /* whether the shard is read by calls */
    PyObject *url, *names; /* for read_samples: the URL of the shard, and the names of the fields; or NULL */
    unsigned char *compared; /* a bit for each member that is set if it is known to match; NULL until one is */
} MappedMembers;

/* Read a little-endian number of 8 bytes, 4 or 2. */
static uint64_t number(const char *bytes, int width) {
    uint64_t value = 0;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    memcpy(&value, bytes, (size_t)width);
#else
    for (int i = 0; i < width; i++) value |= (uint64_t)(unsigned char)bytes[i] << 8 * i;
#endif
    return value;
}

/* Read a big-endian number. */
static uint64_t big(const unsigned char *bytes, int width) {
    uint64_t value = 0;
    for (int i = 0; i < width; i++) value = value << 8 | bytes[i];
    return value;
}

/* An item of msgpack. Format: https://github.com/msgpack/msgpack/blob/master/spec.md */
typedef struct {
    int64_t begin, end; /* of its content; for an array or a map, both are the beginning of its items */
    int64_t items; /* the number of items in an array, or of keys and values in a map; else -1 */
    int is_text, is_bytes, is_map;
} Item;

/* Read the head of the item at *at*; return 0 if there is no item, or it does not end before *limit*. */
static int read_item(const unsigned char *data, int64_t at, int64_t limit, Item *item) {
    if (at >= limit) return 0;
    const unsigned char type = data[at++];
    int64_t length = 0, width = 0, items = -1;
    const int is_map = (type >= 0x80 && type < 0x90) || type == 0xde || type == 0xdf;
    const int is_text = (type >= 0xa0 && type < 0xc0) || (type >= 0xd9 && type <= 0xdb);
    const int is_bytes = type >= 0xc4 && type <= 0xc6;
    if (type < 0x80 || type >= 0xe0 || type == 0xc0 || type == 0xc2 || type == 0xc3) length = 0;
    else if (type < 0xa0) items = is_map ? 2 * (type & 15) : type & 15;
    else if (type < 0xc0) length = type & 31;
    else if (is_bytes) width = 1 << (type - 0xc4);
    else if (type >= 0xc7 && type <= 0xc9) width = 1 << (type - 0xc7), length = 1; /* an extension also has a type */
    else if (type == 0xca || type == 0xcb) length = type == 0xca ? 4 : 8;
    else if (type >= 0xcc && type <= 0xd3) length = 1 << ((type - 0xcc) & 3);
    else if (type >= 0xd4 && type <= 0xd8) length = 1 + (1 << (type - 0xd4));
    else if (is_text) width = 1 << (type - 0xd9);
    else if (type >= 0xdc) width = type & 1 ? 4 : 2, items = 0;
    else return 0;
    if (width > limit - at) return 0;
    if (width && items < 0) length += (int64_t)big(data + at, (int)width);
    if (width && items == 0) items = (int64_t)big(data + at, (int)width) * (is_map ? 2 : 1);
    at += width;
    if (length > limit - at) return 0;
    *item = (Item){at, at + length, items, is_text, is_bytes, is_map};
    return 1;
}

/* Return the end of the item at *at*, including the items in it; -1 if there is no item. */
static int64_t skip_item(const unsigned char *data, int64_t at, int64_t limit, int depth) {
    Item item;
    if (depth > DEEPEST || !read_item(data, at, limit, &item)) return -1;
    at = item.end;
    for (int64_t i = 0; i < item.items && at >= 0; i++) at = skip_item(data, at, limit, depth + 1);
    return at;
}

static PyObject *layout(PyObject *self, PyObject *packed) {
    (void)self;
    Py_buffer buffer;
    Item map, name, value;
    if (PyObject_GetBuffer(packed, &buffer, PyBUF_SIMPLE) < 0) return NULL;
    const unsigned char *data = buffer.buf;
    PyObject *result = PyDict_New();
    int is_sound = read_item(data, 0, buffer.len, &map) && map.is_map;
    int64_t at = is_sound ? map.end : 0;
    for (int64_t i = 0; result && is_sound && i < map.items; i += 2) {
        is_sound = read_item(data, at, buffer.len, &name) && name.is_text && read_item(data, name.end, buffer.len, &value);
        if (!is_sound || (at = skip_item(data, name.end, buffer.len, 0)) < 0) break;
        PyObject *key = PyUnicode_DecodeUTF8((const char *)data + name.begin, (Py_ssize_t)(name.end - name.begin), "replace");
        PyObject *range = Py_BuildValue("LL", (long long)(value.is_bytes ? value.begin : name.end), (long long)at);
        if (!key || !range || PyObject_SetItem(result, key, range) < 0) Py_CLEAR(result);
        Py_XDECREF(key);
        Py_XDECREF(range);
    }
    if (result && (!is_sound || at != buffer.len)) {
        PyErr_SetString(PyExc_ValueError, "no whole msgpack map");
        Py_CLEAR(result);
    }
    PyBuffer_Release(&buffer);
    return result;
}

static int is_regular(char type) { return type == 0 || type == '0' || type == '7'; }

/* Return whether a name splits into a key and a field; the index has the field in lower case. */
static int is_name(const char *name, int64_t length, Text key, Text field) {
    if (length != key.length + 1 + field.length || memcmp(name, key.text, (size_t)key.length)) return 0;
    if (name[key.length] != '.') return 0;
    name += key.length + 1;
    if (!memcmp(name, field.text, (size_t)field.length)) return 1;
    for (Py_ssize_t i = 0; i < field.length; i++)
        if ((name[i] >= 'A' && name[i] <= 'Z' ? name[i] + 'a' - 'A' : name[i]) != field.text[i]) return 0;
    return 1;
}

/* Return whether a block is the header of a regular file with this name and size. */
static int is_header(const char *block, Text key, Text field, int64_t size) {
    const int64_t length = bounded_length(block, 100);
    if (!is_regular(block[156]) || parse_size(block + 124) != size) return 0;
    if (!block[345] || memcmp(block + 257, "ustar", 6)) return is_name(block, length, key, field);
    char joined[257];
    const int64_t before = bounded_length(block + 345, 155);
    memcpy(joined, block + 345, (size_t)before);
    joined[before] = '/';
    memcpy(joined + before + 1, block, (size_t)length);
    return is_name(joined, before + 1 + length, key, field);
}

/* Return whether the headers from *begin* on lead to data at *offset*, of a regular file with this name and size. A
 * header is known to begin at *begin*, so checksums are not verified. */
static int leads_to(const char *shard, int64_t begin, int64_t offset, Text key, Text field, int64_t size) {
    Scan scan = {begin, BLOCK, 0, NULL, 1};
    Found found;
    do {
        while (next_member(shard, offset, MAX_SIZE, &scan, &found))
            if (found.start == offset)
                return !*found.kind && found.end - offset == size && is_name(found.name, found.name_length, key, field);
    } while (pass_end(&scan)); /* the index may be of concatenated archives */
    return 0;
}

static const char *bytes_of(const MemberTable *table) { return table->sidecar.buf; }

static uint32_t crc_table[8][256]; /* CRC-32 of a byte that is followed by 0 to 7 zeros */

static void fill_crc_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0);
        crc_table[0][byte] = value;
    }
    for (int zeros = 1; zeros < 8; zeros++)
        for (int byte = 0; byte < 256; byte++) {
            const uint32_t value = crc_table[zeros - 1][byte];
            crc_table[zeros][byte] = value >> 8 ^ crc_table[0][value & 255];
        }
}

/* Return the CRC-32 of some bytes, eight at a time. */
static uint32_t crc32_of(const char *bytes, int64_t length) {
    uint32_t value = 0xffffffffu;
    for (; length >= 8; bytes += 8, length -= 8) {
        const uint64_t next = number(bytes, 8) ^ value;
        value = 0;
        for (int i = 0; i < 8; i++) value ^= crc_table[7 - i][next >> 8 * i & 255];
    }
    for (; length > 0; bytes++, length--) value = value >> 8 ^ crc_table[0][(value ^ (unsigned char)*bytes) & 255];
    return ~value;
}

/* End the work under the guard: what it has read of the sidecar is wrong. */
static void end_damaged(const MemberTable *table) {
    ((MemberTable *)table)->checks.is_damaged = 1;
    guard->stop();
}

/* Compare the pages with the bytes from *begin* to *end* of a sidecar, those that have not been. */
static void compare_pages(MemberTable *table, int64_t begin, int64_t end) {
    Checks *checks = &table->checks;
    for (int64_t page = begin / PAGE; page * PAGE < end && page * PAGE < checks->end; page++) {
        unsigned char *byte = checks->bits + page / 8, bit = (unsigned char)(1 << page % 8);
        if (__atomic_load_n(byte, __ATOMIC_ACQUIRE) & bit) continue;
        const int64_t length = checks->end - page * PAGE < PAGE ? checks->end - page * PAGE : PAGE;
        if (crc32_of(bytes_of(table) + page * PAGE, length) != checks->sums[page]) end_damaged(table);
        if (!(__atomic_fetch_or(byte, bit, __ATOMIC_ACQ_REL) & bit)) __atomic_fetch_sub(&checks->left, 1, __ATOMIC_ACQ_REL);
    }
}

/* Return the bytes at an offset of a sidecar, which are checked. */
static inline const char *use(const MemberTable *table, int64_t offset, int64_t length) {
    if (__atomic_load_n(&table->checks.left, __ATOMIC_ACQUIRE)) compare_pages((MemberTable *)table, offset, offset + length);
    return bytes_of(table) + offset;
}

static int64_t sample_of(const MemberTable *table, int64_t member) {
    return (int64_t)number(use(table, table->sample + 4 * member, 4), 4);
}

static Entry entry_of(const MemberTable *table, int64_t member) {
    return (Entry){(int64_t)number(use(table, table->offset + 8 * member, 8), 8),
                   (int64_t)number(use(table, table->size + 8 * member, 8), 8),
                   table->field_count == 1 ? 0 : (int64_t)number(use(table, table->field + 2 * member, 2), 2)};
}

/* Return an entry that may be wrong, to prefetch what it leads to. */
static Entry likely_entry(const MemberTable *table, int64_t member) {
    const char *bytes = bytes_of(table);
    return (Entry){(int64_t)number(bytes + table->offset + 8 * member, 8), (int64_t)number(bytes + table->size + 8 * member, 8),
                   table->field_count == 1 ? 0 : (int64_t)number(bytes + table->field + 2 * member, 2)};
}

/* Return whether all bytes of a mapped sidecar are there, so that what was read of it is valid. */
static int is_whole(const MemberTable *table) { return !table->file || guard->reaches(table->file, table->file_size); }

/* Set the exception for a sidecar that cannot be read. */
static PyObject *unreadable(const MemberTable *table) {
    PyErr_SetString(PyExc_OSError, table->checks.is_damaged ? DAMAGED : SHRUNK);
    return NULL;
}

/* Return an estimate of the number of a sample's first member. */
static int64_t guess_first(const MemberTable *table, int64_t sample) {
    if (table->each) return sample * table->each;
    return (int64_t)((double)sample * (double)table->members / (double)table->samples);
}

/* Return the number of a sample's first member; for the number of samples, that of members. Every sample has one or
 * more consecutive members, so the first members of two samples are at least as far apart as the samples. */
static int64_t first_of(const MemberTable *table, int64_t sample) {
    if (sample >= table->samples) return table->members;
    if (table->each) return sample * table->each;
    int64_t low = sample, high = table->members - (table->samples - sample), guess = guess_first(table, sample);
    for (int tries = 0; low < high; tries++) {
        if (tries > 4) guess = low + (high - low) / 2;
        guess = guess < low ? low : guess > high ? high : guess;
        const int64_t found = sample_of(table, guess);
        if (found < sample) {
            low = guess + (sample - found);
            guess += (sample - found) * (table->members / table->samples);
        } else {
            high = guess - (found - sample);
            guess = found == sample ? guess - 1 : guess - (found - sample) * (table->members / table->samples);
        }
    }
    low = low < 0 ? 0 : low > table->members ? table->members : low;
    if (!table->checks.sums) return low; /* the samples are known to be in order */
    if (low == table->members || sample_of(table, low) != sample || (low && sample_of(table, low - 1) != sample - 1)) end_damaged(table);
    return low;
}

/* Return the number of the member after the last one of a sample whose *first* member is known. */
static int64_t end_of(const MemberTable *table, int64_t sample, int64_t first) {
    if (table->each) return first + table->each;
    while (first < table->members && sample_of(table, first) == sample) first++;
    return first;
}

/* The key that was read last: its table, its sample, and its offset in the sidecar. */
typedef struct {
    const MemberTable *table;
    int64_t sample, at;
} LastKey;

/* Return the key of a sample, in the sidecar; its text is NULL if the sidecar was written to. The search begins at the
 * *last* key, if that is nearer than the marked one. */
static Text key_after(const MemberTable *table, int64_t sample, LastKey *last) {
    const unsigned char *data = table->sidecar.buf;
    if (last->table != table || last->sample > sample || last->sample / EVERY != sample / EVERY)
        *last = (LastKey){table, sample / EVERY * EVERY, table->keys + table->marks[sample / EVERY]};
    int64_t at = last->at;
    Item item = {.end = at};
    const int is_unchecked = __atomic_load_n(&table->checks.left, __ATOMIC_ACQUIRE) > 0;
    for (int64_t i = sample - last->sample; i >= 0; i--) {
        at = item.end;
        if (is_unchecked && at < table->sidecar.len) use(table, at, LONGEST_HEAD);
        if (at < table->sidecar.len && data[at] >= 0xa0 && data[at] < 0xc0 && table->sidecar.len - at > (data[at] & 31))
            item.begin = at + 1, item.end = at + 1 + (data[at] & 31); /* a string of up to 31 bytes */
        else if (!read_item(data, at, table->sidecar.len, &item)) return (Text){NULL, 0};
    }
    use(table, item.begin, item.end - item.begin);
    last->sample = sample, last->at = at;
    return (Text){(const char *)data + item.begin, item.end - item.begin};
}

static Text key_of(const MemberTable *table, int64_t sample) { return key_after(table, sample, &(LastKey){0}); }

/* How far a copy from a mapped file is: it may end at any byte, and is not valid if the file was not whole after it. */
enum Stage { BEGUN, COPIED, VALID };

/* The data of one sample that is copied from a sidecar, under the guard. */
typedef struct {
    const MemberTable *table;
    int64_t sample, begin, end;
    int64_t low, high;          /* only members in this range are returned */
    Text key;                   /* copied to *text* if it fits into *space* bytes */
    char *text;
    int64_t space;
    Entry *entries;             /* of the member before *begin*, then of those from *begin* to *end*; or NULL */
    int64_t most;               /* the most members from *begin* on that fit into *entries* */
    volatile enum Stage stage;
} LookUp;

static void look_up(void *argument) {
    LookUp *up = argument;
    const MemberTable *table = up->table;
    up->begin = first_of(table, up->sample);
    up->end = end_of(table, up->sample, up->begin);
    if (up->begin < up->low) up->begin = up->low;
    if (up->end > up->high) up->end = up->high;
    if (up->end < up->begin) up->end = up->begin;
    up->key = key_of(table, up->sample);
    if (up->key.text && up->key.length <= up->space) memcpy(up->text, up->key.text, (size_t)up->key.length);
    if (up->entries) {
        up->entries[0] = up->begin ? entry_of(table, up->begin - 1) : (Entry){0, 0, 0};
        for (int64_t i = up->begin; i < up->end && i - up->begin < up->most; i++) up->entries[1 + i - up->begin] = entry_of(table, i);
    }
    up->stage = COPIED;
    if (is_unchanged(table->witness)) up->stage = VALID;
}

/* Look a sample up; return 0 with an exception set if that fails. If *text* or *entries* of the caller are too
 * small, they are replaced by allocated memory, which the caller must free. */
static int find_sample(LookUp *up) {
    char *const text = up->text;
    Entry *const entries = up->entries;
    for (int tries = 0; tries < 3; tries++) {
        up->stage = BEGUN;
        guard->run(look_up, up);
        if (up->stage == BEGUN || (up->stage == COPIED && !is_whole(up->table))) return unreadable(up->table), 0;
        if (!up->key.text) return PyErr_SetString(PyExc_OSError, "the index was written to since it was opened"), 0;
        if (up->key.length <= up->space && (!entries || up->end - up->begin <= up->most)) return 1;
        if (up->key.length > up->space) {
            if (up->text != text) PyMem_Free(up->text);
            up->space = up->key.length;
            if (!(up->text = PyMem_Malloc((size_t)up->space))) return up->text = text, PyErr_NoMemory(), 0;
        }
        if (entries && up->end - up->begin > up->most) {
            if (up->entries != entries) PyMem_Free(up->entries);
            up->most = up->end - up->begin;
            if (!(up->entries = PyMem_Malloc((size_t)(up->most + 1) * sizeof *entries))) return up->entries = entries, PyErr_NoMemory(), 0;
        }
    }
    return PyErr_SetString(PyExc_OSError, "the index was written to since it was opened"), 0;
}

static PyObject *decoded(const char *text, int64_t length) {
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)length, "surrogateescape");
}

/* Return the key of a sample as str. */
static PyObject *key_object(const MemberTable *table, int64_t sample) {
    char text[SHORT];
    if (sample < 0 || sample >= table->samples) return PyErr_Format(PyExc_IndexError, "sample %lld", (long long)sample);
    LookUp up = {.table = table, .sample = sample, .text = text, .space = SHORT};
    PyObject *key = find_sample(&up) ? decoded(up.text, up.key.length) : NULL;
    if (up.text != text) PyMem_Free(up.text);
    return key;
}

static const char *at(const MappedMembers *self, int64_t offset) { return (const char *)self->shard.buf + (offset - self->low); }

/* Return whether the bytes of the shard in *self* contain the header and the data of a member. */
static int is_here(const MappedMembers *self, const Entry *entry) {
    const int64_t here = entry->offset - self->low;
    return entry->field < self->table->field_count && entry->size >= 0 && here >= BLOCK && here <= self->shard.len &&
           entry->size <= self->shard.len - here;
}

static int is_compared(const MappedMembers *self, int64_t member) {
    const int64_t bit = member - self->begin;
    return self->compared && bit >= 0 && self->compared[bit / 8] >> bit % 8 & 1;
}

static void note_compared(MappedMembers *self, int64_t member) {
    const int64_t bit = member - self->begin;
    if (!is_compared(self, member)) /* atomic, since other threads set other bits of the byte */
        __atomic_fetch_or(self->compared + bit / 8, (unsigned char)(1 << bit % 8), __ATOMIC_RELAXED);
}

/* Allocate *compared* if necessary; return 0 with an exception set if that fails. Needs the GIL. */
static int can_note(MappedMembers *self) {
    if (!self->compared && !(self->compared = PyMem_Calloc((size_t)(self->end - self->begin) / 8 + 1, 1))) PyErr_NoMemory();
    return self->compared != NULL;
}

/* Prefetch the parts of a header that are compared: name, size, type and prefix. */
static void prefetch_header(const char *header) {
    __builtin_prefetch(header);
    __builtin_prefetch(header + 124);
    __builtin_prefetch(header + 156);
    __builtin_prefetch(header + 345);
}

/* Prefetch the parts of the previous member's header that are read: size, type and magic. */
static void prefetch_previous_header(const char *header) {
    __builtin_prefetch(header + 124);
    __builtin_prefetch(header + 156);
    __builtin_prefetch(header + 257);
}

/* Return whether a header is of a regular file of this size, and sound. */
static int is_sound_header(const char *block, int64_t size) {
    if (!is_regular(block[156]) || parse_size(block + 124) != size) return 0;
    return !memcmp(block + 257, "ustar", 5) || checksum_is_right((const unsigned char *)block);
}

/* Return whether a member's header has the size in the index. */
static int has_its_size(const MappedMembers *self, const Entry *entry) {
    return is_here(self, entry) && is_sound_header(at(self, entry->offset) - BLOCK, entry->size);
}

/* Return whether a member matches. The entry of the previous member precedes *entry* in memory; *known* says that the
 * previous member matches, otherwise the size in its header is compared here. */
static int matches(MappedMembers *self, int64_t member, Text key, const Entry *entry, int known) {
    const Entry *before = entry - 1;
    if (!is_here(self, entry) || before->offset > entry->offset || before->size < 0 || before->size > entry->offset) return 0;
    const Text field = self->table->fields[entry->field];
    const int64_t begin = member ? round_up(before->offset + before->size) : 0;
    if (begin < self->low || begin > entry->offset - BLOCK) return 0;
    if (member && !known && !is_compared(self, member) && !has_its_size(self, before)) return 0;
    const int same = begin == entry->offset - BLOCK
        ? is_header(at(self, begin), key, field, entry->size)
        : leads_to(self->shard.buf, begin - self->low, entry->offset - self->low, key, field, entry->size);
    if (same) note_compared(self, member);
    return same;
}

/* The members of a sample that are copied at once. */
typedef struct {
    MappedMembers *members;
    const LookUp *up;
    int64_t count, settled; /* members before *settled* need not be compared */
    struct Copy {
        int64_t member;
        const Entry *entry;
        PyObject *name, *data;
        char *target;
    } *copies;
    int64_t undecided; /* the first member that does not match; -1 if all were copied */
    volatile enum Stage stage;
} Copying;

static void copy_members(void *argument) {
    Copying *copying = argument;
    const Text key = {copying->up->text, copying->up->key.length};
    for (int64_t i = 0; i < copying->count; i++) {
        const struct Copy *each = copying->copies + i;
        if (each->member < copying->settled) continue;
        if (!matches(copying->members, each->member, key, each->entry, i && each[-1].member == each->member - 1)) {
            copying->undecided = each->member;
            break;
        }
    }
    for (int64_t i = 0; i < copying->count && copying->undecided < 0; i++) {
        const struct Copy *each = copying->copies + i;
        memcpy(each->target, at(copying->members, each->entry->offset), (size_t)each->entry->size);
    }
    copying->stage = COPIED;
    if (is_unchanged(copying->members->witness)) copying->stage = VALID;
}

/* Read a member's data by calls, unless its headers do not match; *known* says that the previous member matches. Its entry
 * precedes *entry* in memory. Return 1, 0 for a member that is undecided, or -1 if the file has shrunk. */
static int fetch_member(MappedMembers *self, int64_t member, Text key, const Entry *entry, int known, char *target) {
    char head[HEAD];
    const Entry *before = entry - 1;
    PyObject *const file = self->shard.obj;
    if (before->offset > entry->offset || before->size < 0 || before->size > entry->offset) return 0;
    int64_t low = member ? round_up(before->offset + before->size) : 0;
    const int64_t header = before->offset - BLOCK; /* of the previous member */
    known |= is_compared(self, member);
    const int is_near = member && !known && header >= 0 && entry->offset - header <= HEAD;
    if (is_near) low = header;
    if (low > entry->offset - BLOCK || entry->offset - low > HEAD) return 0;
    if (guard->fetch(file, low, head, entry->offset - low, target, entry->size)) return -1;
    if (member && !known && !is_near) {
        char block[BLOCK];
        if (header < 0 || guard->fetch(file, header, NULL, 0, block, BLOCK)) return -1;
        known = is_sound_header(block, before->size);
    } else if (is_near) {
        known = is_sound_header(head, before->size);
    }
    if (member && !known) return 0;
    MappedMembers read = *self; /* as if the data were there, too, at which nothing looks */
    read.shard.buf = head, read.low = low, read.shard.len = (Py_ssize_t)(entry->offset - low + entry->size);
    return matches(&read, member, key, entry, 1);
}

/* Read the members of a sample by calls, if they match; return whether that failed since the shard has shrunk. */
static int fetch_members(Copying *copying) {
    const Text key = {copying->up->text, copying->up->key.length};
    for (int64_t i = 0; i < copying->count && copying->undecided < 0; i++) {
        const struct Copy *each = copying->copies + i;
        const int known = i && each[-1].member == each->member - 1;
        const int is_settled = each->member < copying->settled;
        const int outcome = is_settled
            ? 1 - 2 * !!guard->fetch(copying->members->shard.obj, each->entry->offset, NULL, 0, each->target, each->entry->size)
            : fetch_member(copying->members, each->member, key, each->entry, known, each->target);
        if (outcome < 0) return 1;
        if (!outcome) copying->undecided = each->member;
    }
    return 0;
}

/* Copy the members, if they match; return whether that failed since the shard has shrunk. */
static int copy_checked(Copying *copying) {
    const MappedMembers *self = copying->members;
    guard->run(copy_members, copying);
    if (copying->stage != COPIED) return copying->stage == BEGUN;
    int64_t end = 0;
    for (int64_t i = 0; i < copying->count; i++) {
        const Entry *entry = copying->copies[i].entry;
        if (entry->offset + entry->size - self->low > end) end = entry->offset + entry->size - self->low;
    }
    return !guard->reaches(self->shard.obj, (Py_ssize_t)end);
}

/* Allocate bytes for the members of a sample; return their total size, or -1 with an exception set. Stops at a
 * member that is not in the bytes of the shard, which is then undecided. */
static int64_t prepare(Copying *copying, PyObject *names) {
    const LookUp *up = copying->up;
    MappedMembers *self = copying->members;
    int64_t total = 0;
    for (int64_t member = up->begin; member < up->end; member++) {
        const Entry *entry = up->entries + 1 + (member - up->begin);
        PyObject *name = PyList_GetItem(names, (Py_ssize_t)entry->field);
        if (name == Py_None) continue;
        if (name && !is_here(self, entry)) {
            copying->undecided = member;
            return total;
        }
        PyObject *data = NULL;
        if (name) {
            prefetch_header(at(self, entry->offset) - BLOCK);
            if (member && !copying->count && !is_compared(self, member) && is_here(self, entry - 1))
                prefetch_previous_header(at(self, entry[-1].offset) - BLOCK);
            data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)entry->size);
        }
        if (!data) return -1;
        copying->copies[copying->count++] = (struct Copy){member, entry, name, data, PyBytes_AsString(data)};
        total += entry->size;
    }
    return total;
}

/* Put the key and the copied members into the dict; return 0 with an exception set if that fails. */
static int deliver(const Copying *copying, PyObject *result) {
    PyObject *key = decoded(copying->up->text, copying->up->key.length);
    int failed = !key || PyObject_SetItem(result, key_name, key) < 0;
    Py_XDECREF(key);
    for (int64_t i = 0; !failed && i < copying->count; i++)
        failed = PyDict_SetItem(result, copying->copies[i].name, copying->copies[i].data) < 0;
    return !failed;
}

/* Put a sample into a dict, and add its size to *taken*. Return -1, or -2 with an exception set; or, if a member is
 * undecided, its number, and leave the dict unchanged. */
static int64_t fill_sample(MappedMembers *self, PyObject *result, PyObject *names, int64_t sample, int64_t settled, int64_t *taken) {
    char text[SHORT];
    Entry entries[FEW + 1];
    struct Copy few[FEW];
    LookUp up = {.table = self->table, .sample = sample, .low = self->begin, .high = self->end,
                 .text = text, .space = SHORT, .entries = entries, .most = FEW};
    Copying copying = {self, &up, 0, settled, few, -1, BEGUN};
    int64_t total = -1;
    if (can_note(self) && find_sample(&up)) {
        if (up.end - up.begin > FEW && !(copying.copies = PyMem_Malloc((size_t)(up.end - up.begin) * sizeof *few)))
            PyErr_NoMemory();
        if (copying.copies) total = prepare(&copying, names);
        int failed = 0;
        if (copying.undecided < 0 && total >= 0 && total < LARGE && !self->is_called && !guard->waits()) {
            failed = copy_checked(&copying);
        } else if (copying.undecided < 0 && total >= 0) {
            Py_BEGIN_ALLOW_THREADS
            failed = self->is_called ? fetch_members(&copying) : copy_checked(&copying);
            Py_END_ALLOW_THREADS
        }
        if (failed) PyErr_SetString(PyExc_OSError, SHRUNK);
        if (failed || (total >= 0 && copying.undecided < 0 && !deliver(&copying, result))) total = -1;
        for (int64_t i = 0; i < copying.count; i++) Py_DECREF(copying.copies[i].data);
        if (copying.copies != few) PyMem_Free(copying.copies);
    }
    if (up.text != text) PyMem_Free(up.text);
    if (up.entries != entries) PyMem_Free(up.entries);
    if (total < 0) return -2;
    *taken += total;
    return copying.undecided;
}

static PyObject *members_fill(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    MappedMembers *self = (MappedMembers *)object;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "fill takes a dict, names, a sample and a settled member");
    const int64_t sample = PyLong_AsLongLong(args[2]), settled = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (sample < 0 || sample >= self->table->samples)
        return PyErr_Format(PyExc_IndexError, "sample %lld", (long long)sample);
    int64_t taken = 0;
    const int64_t undecided = fill_sample(self, args[0], args[1], sample, settled, &taken);
    return undecided == -2 ? NULL : PyLong_FromLongLong(undecided);
}

static PyObject *members_settle(PyObject *object, PyObject *member) {
    MappedMembers *self = (MappedMembers *)object;
    const int64_t wanted = PyLong_AsLongLong(member);
    if (PyErr_Occurred()) return NULL;
    if (wanted < self->begin || wanted >= self->end) return PyErr_Format(PyExc_IndexError, "member %lld", (long long)wanted);
    if (!can_note(self)) return NULL;
    note_compared(self, wanted);
    Py_RETURN_NONE;
}

static PyTypeObject *table_type, *members_type;

/* Members of several shards that are compared at once. */
typedef struct {
    struct Row {
        MappedMembers *members;
        int64_t member, at; /* the number of the member, and its index in the arguments */
    } *rows;
    int64_t count;
    volatile int64_t at; /* the current row, kept in memory since the guard may jump out of the loop */
    int64_t *undecided;  /* the indices of members that do not match */
    volatile int64_t differing; /* their number */
    int stops_at_disk; /* whether to stop if pages are read from a disk */
} Comparing;

/* Return the sample that a member belongs to. */
static int64_t owner_of(const MemberTable *table, int64_t member) {
    return table->each ? member / table->each : sample_of(table, member);
}

/* Return the same, or another number, to prefetch what it leads to. */
static int64_t likely_owner(const MemberTable *table, int64_t member) {
    return table->each ? member / table->each : (int64_t)number(bytes_of(table) + table->sample + 4 * member, 4);
}

static void prefetch_entry(const MemberTable *table, int64_t member) {
    const char *bytes = bytes_of(table);
    __builtin_prefetch(bytes + table->offset + 8 * member);
    __builtin_prefetch(bytes + table->size + 8 * member);
    if (table->field_count != 1) __builtin_prefetch(bytes + table->field + 2 * member);
    if (!table->each) __builtin_prefetch(bytes + table->sample + 4 * member);
}

static void compare(void *argument) {
    Comparing *comparing = argument;
    LastKey last = {0};
    long before = comparing->stops_at_disk ? disk_reads() : 0;
    for (; comparing->at < comparing->count; comparing->at++) {
        const int64_t i = comparing->at;
        if (comparing->stops_at_disk && i % ROWS == ROWS - 1) {
            const long now = disk_reads();
            if (now - before > FEW_READS) return;
            before = now;
        }
        const struct Row *row = comparing->rows + i;
        const MemberTable *table = row->members->table;
        if (i + 2 * AHEAD < comparing->count) {
            const struct Row *later = row + 2 * AHEAD;
            prefetch_entry(later->members->table, later->member);
            if (later->members->table->each)
                __builtin_prefetch(later->members->table->marks + owner_of(later->members->table, later->member) / EVERY);
        }
        if (i + AHEAD < comparing->count) {
            const struct Row *later = row + AHEAD;
            const Entry entry = likely_entry(later->members->table, later->member);
            const MemberTable *its = later->members->table;
            const int64_t sample = likely_owner(its, later->member);
            for (int line = 0; line < 4 && sample < its->samples; line++)
                __builtin_prefetch(bytes_of(its) + its->keys + its->marks[sample / EVERY] + 64 * line);
            if (is_here(later->members, &entry)) prefetch_header(at(later->members, entry.offset) - BLOCK);
            if (later->member) {
                const Entry before = likely_entry(its, later->member - 1);
                if (is_here(later->members, &before))
                    prefetch_previous_header(at(later->members, before.offset) - BLOCK);
            }
        }
        const int64_t sample = owner_of(table, row->member);
        const Entry entries[2] = {row->member ? entry_of(table, row->member - 1) : (Entry){0, 0, 0}, entry_of(table, row->member)};
        const Text key = sample < table->samples ? key_after(table, sample, &last) : (Text){NULL, 0};
        const int known = row->member && is_compared(row->members, row->member - 1);
        if (!key.text || !matches(row->members, row->member, key, entries + 1, known))
            comparing->undecided[comparing->differing++] = row->at;
    }
}

static void compare_guarded(Comparing *comparing) {
    while (guard->run(compare, comparing)) /* a shard has shrunk: header_checks reports it for this member */
        comparing->undecided[comparing->differing++] = comparing->rows[comparing->at++].at;
}

/* Return the members of a shard by its number; NULL if it is not mapped, with an exception set if that is an error. */
static MappedMembers *members_at(PyObject *tables, int64_t shard) {
    PyObject *object = PyList_GetItem(tables, (Py_ssize_t)shard);
    if (!object || object == Py_None) return NULL;
    if (PyObject_TypeCheck(object, members_type)) return (MappedMembers *)object;
    PyErr_SetString(PyExc_ValueError, "not a member of a mapped shard");
    return NULL;
}

/* Add a row for *member* unless it is known to match; return 0 with an exception set if there is no such member. */
static int note_row(Comparing *comparing, MappedMembers *own, int64_t member, int64_t at) {
    if (member < 0 || !own || is_compared(own, member)) return 1;
    if (member < own->begin || member >= own->end) return PyErr_SetString(PyExc_ValueError, "not a member of a mapped shard"), 0;
    if (!can_note(own)) return 0;
    comparing->rows[comparing->count++] = (struct Row){own, member, at};
    return 1;
}

/* Add rows for all *members* not known to match; return 0 with an exception set if there is no such member. */
static int collect(Comparing *comparing, PyObject *tables, const int64_t *shards, const int64_t *members, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        MappedMembers *own = members[i] < 0 ? NULL : members_at(tables, shards[i]);
        if ((!own && PyErr_Occurred()) || !note_row(comparing, own, members[i], i)) return 0;
    }
    return 1;
}

static PyObject *find_undecided(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tables, *result = NULL;
    Py_buffer shards, members;
    if (!PyArg_ParseTuple(args, "O!y*y*:find_undecided", &PyList_Type, &tables, &shards, &members)) return NULL;
    const int64_t count = members.len / 8;
    Comparing comparing = {PyMem_Malloc((size_t)count * sizeof(struct Row) + 1), 0, 0,
                           PyMem_Malloc((size_t)count * 8 + 1), 0, 0};
    if (!comparing.rows || !comparing.undecided) PyErr_NoMemory();
    else if (shards.len != members.len) PyErr_SetString(PyExc_ValueError, "shards and members differ in length");
    else if (collect(&comparing, tables, shards.buf, members.buf, count)) {
        Py_BEGIN_ALLOW_THREADS
        compare_guarded(&comparing);
        Py_END_ALLOW_THREADS
        result = PyList_New(0);
        for (int64_t i = 0; result && i < comparing.differing; i++) {
            PyObject *index = PyLong_FromLongLong(comparing.undecided[i]);
            if (!index || PyList_Append(result, index) < 0) Py_CLEAR(result);
            Py_XDECREF(index);
        }
    }
    PyMem_Free(comparing.rows);
    PyMem_Free(comparing.undecided);
    PyBuffer_Release(&shards);
    PyBuffer_Release(&members);
    return result;
}

/* A shard in which samples are located. */
struct Source {
    MappedMembers *members;
    const int16_t *ranks; /* for each term and field: 0 if it is the best alternative, -1 if it is none */
};

/* Fields of samples of several shards that are located at once. */
typedef struct {
    const struct Source *sources;
    const int64_t *shards, *samples, *order; /* each sample's source and number; the order to locate the samples in */
    int64_t count, terms;
    volatile int64_t at; /* as in Comparing */
    int16_t *best; /* for each term, the best rank found in the current sample */
    volatile int are_new; /* whether the header of a member that was found has not been compared before */
    uint64_t *addresses;
    int64_t *sizes, *numbers; /* -1: the sample has no such field; -2: the shard cannot be read */
    int64_t *ends;            /* for each source, where the last of its located members ends */
} Locating;

static void locate_rows(void *argument) {
    Locating *locating = argument;
    const int64_t count = locating->count, terms = locating->terms;
    for (; locating->at < count; locating->at++) {
        if (locating->at + 2 * AHEAD < count) {
            const int64_t later = locating->order[locating->at + 2 * AHEAD];
            const MappedMembers *own = locating->sources[locating->shards[later]].members;
            if (own) prefetch_entry(own->table, guess_first(own->table, locating->samples[later]));
        }
        const int64_t i = locating->order[locating->at], sample = locating->samples[i];
        const struct Source *source = locating->sources + locating->shards[i];
        if (!source->members) continue;
        const MemberTable *table = source->members->table;
        for (int64_t term = 0; term < terms; term++) locating->best[term] = INT16_MAX;
        const int64_t first = first_of(table, sample), end = end_of(table, sample, first);
        for (int64_t member = first; member < end; member++) {
            const Entry entry = entry_of(table, member);
            if (!is_here(source->members, &entry)) continue; /* the index was written to */
            for (int64_t term = 0; term < terms; term++) {
                const int16_t rank = source->ranks[term * table->field_count + entry.field];
                if (rank < 0 || rank >= locating->best[term]) continue;
                locating->best[term] = rank;
                locating->addresses[term * count + i] = (uint64_t)(uintptr_t)at(source->members, entry.offset);
                locating->sizes[term * count + i] = entry.size;
                locating->numbers[term * count + i] = member;
                const int64_t end = entry.offset + entry.size - source->members->low;
                if (end > locating->ends[locating->shards[i]]) locating->ends[locating->shards[i]] = end;
                if (!is_compared(source->members, member)) locating->are_new = 1;
            }
        }
    }
}

/* Set the numbers of the samples whose index has shrunk to -2. */
static void check_sidecars(const Locating *locating, int64_t sources) {
    for (int64_t source = 0; source < sources; source++) {
        if (!locating->sources[source].members || is_whole(locating->sources[source].members->table)) continue;
        for (int64_t i = 0; i < locating->count; i++)
            for (int64_t term = 0; term < locating->terms && locating->shards[i] == source; term++)
                locating->numbers[term * locating->count + i] = -2;
    }
}

/* Compare the headers of the located members, in order, until a disk has to be waited for. Return whether any member
 * has not been compared or does not match, or -1 with an exception set. */
static int compare_located(const Locating *locating) {
    if (!locating->are_new) return 0;
    const int64_t count = locating->count, terms = locating->terms;
    Comparing comparing = {PyMem_Malloc((size_t)count * sizeof(struct Row) + 1), 0, 0,
                           PyMem_Malloc((size_t)count * 8 + 1), 0, 1};
    int left = 0;
    if (!comparing.rows || !comparing.undecided) PyErr_NoMemory(), left = -1;
    for (int64_t term = 0; term < terms && left >= 0; term++) {
        comparing.count = comparing.at = comparing.differing = 0;
        for (int64_t at = 0; at < count && left >= 0; at++) {
            const int64_t i = locating->order[at];
            MappedMembers *const own = locating->sources[locating->shards[i]].members;
            if (own && own->is_called) left |= locating->numbers[term * count + i] >= 0; /* fetching compares it */
            else if (!note_row(&comparing, own, locating->numbers[term * count + i], i)) left = -1;
        }
        if (!comparing.count || left < 0) continue;
        Py_BEGIN_ALLOW_THREADS
        compare_guarded(&comparing);
        Py_END_ALLOW_THREADS
        left |= comparing.differing || comparing.at < comparing.count;
    }
    PyMem_Free(comparing.rows);
    PyMem_Free(comparing.undecided);
    return left;
}

/* Fill *sources* from *tables*, with the ranks of the fields that *rank* returns for their names. Return a list that
 * owns the memory of the ranks, or NULL with an exception set. */
static PyObject *collect_sources(struct Source *sources, PyObject *tables, PyObject *rank, int64_t terms) {
    const MemberTable *before = NULL;
    const int16_t *ranks = NULL;
    PyObject *held = PyList_New(0);
    for (Py_ssize_t i = 0; held && i < PyList_Size(tables); i++) {
        MappedMembers *own = members_at(tables, i);
        if (own && (!before || before->names != own->table->names)) {
            before = own->table;
            PyObject *bytes = PyObject_CallFunctionObjArgs(rank, before->names, NULL);
            const int fits = bytes && PyBytes_Check(bytes) && PyBytes_Size(bytes) == 2 * terms * before->field_count;
            if (bytes && !fits) PyErr_SetString(PyExc_ValueError, "not a rank for each field and term");
            if (fits) ranks = (const int16_t *)PyBytes_AsString(bytes);
            if (fits) PyList_Append(held, bytes);
            Py_XDECREF(bytes);
        }
        if (PyErr_Occurred()) Py_CLEAR(held);
        sources[i] = (struct Source){own, ranks};
    }
    return held;
}

static PyObject *locate(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tables, *rank, *held = NULL;
    Py_buffer shards, samples, order, addresses, sizes, numbers, ends;
    if (!PyArg_ParseTuple(args, "O!Oy*y*y*w*w*w*w*:locate", &PyList_Type, &tables, &rank, &shards, &samples, &order, &addresses,
                          &sizes, &numbers, &ends))
        return NULL;
    const int64_t count = shards.len / 8, terms = count ? addresses.len / 8 / count : 0, shard_count = PyList_Size(tables);
    struct Source *const sources = PyMem_Malloc((size_t)shard_count * sizeof *sources + 1);
    Locating locating = {sources, shards.buf, samples.buf, order.buf, count, terms, 0, PyMem_Malloc((size_t)terms * sizeof(int16_t) + 1), 0,
                         addresses.buf, sizes.buf, numbers.buf, ends.buf};
    int failed = 1, left = 0;
    if (!locating.best || !sources) PyErr_NoMemory();
    else if (samples.len != 8 * count || order.len != 8 * count || addresses.len != 8 * count * terms || sizes.len != addresses.len ||
             numbers.len != addresses.len || ends.len != 8 * shard_count)
        PyErr_SetString(PyExc_ValueError, "arrays of different lengths");
    else failed = !(held = collect_sources(sources, tables, rank, terms));
    for (int64_t i = 0; i < count && !failed; i++) {
        if ((failed = locating.order[i] < 0 || locating.order[i] >= count)) {
            PyErr_SetString(PyExc_ValueError, "not an order of the samples");
            break;
        }
        const int64_t shard = locating.shards[i], sample = locating.samples[i];
        failed = shard < 0 || shard >= shard_count ||
                 (sources[shard].members && (sample < 0 || sample >= sources[shard].members->table->samples));
        if (failed) PyErr_Format(PyExc_ValueError, "no sample %lld of a mapped shard", (long long)sample);
    }
    for (int64_t i = 0; i < terms * count && !failed; i++) {
        locating.addresses[i] = 0;
        locating.sizes[i] = locating.numbers[i] = -1;
    }
    for (int64_t i = 0; i < shard_count && !failed; i++) locating.ends[i] = 0;
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        for (; guard->run(locate_rows, &locating); locating.at++) /* an index has shrunk */
            for (int64_t term = 0; term < terms; term++) locating.numbers[term * count + locating.order[locating.at]] = -2;
        check_sidecars(&locating, shard_count);
        Py_END_ALLOW_THREADS
        failed = (left = compare_located(&locating)) < 0;
    }
    PyMem_Free(locating.best);
    PyMem_Free(sources);
    Py_XDECREF(held);
    Py_buffer *const buffers[] = {&shards, &samples, &order, &addresses, &sizes, &numbers, &ends};
    for (int i = 0; i < 7; i++) PyBuffer_Release(buffers[i]);
    return failed ? NULL : PyBool_FromLong(left);
}

/* What is copied of a sidecar to compare the headers of a member: its key if that is short, its entry and the one before. */
typedef struct {
    const MemberTable *table;
    int64_t member, length; /* of the key; -1 if it was not copied */
    char key[SHORT];
    Entry entries[2];
} Lines;

static void copy_lines(void *argument) {
    Lines *lines = argument;
    const int64_t sample = owner_of(lines->table, lines->member);
    lines->entries[0] = lines->member ? entry_of(lines->table, lines->member - 1) : (Entry){0, 0, 0};
    lines->entries[1] = entry_of(lines->table, lines->member);
    const Text key = sample < lines->table->samples ? key_of(lines->table, sample) : (Text){NULL, 0};
    if (!key.text || key.length > SHORT) return;
    memcpy(lines->key, key.text, (size_t)key.length);
    lines->length = key.length;
}

/* Read a member by calls; return what fetch_member does. */
static int fetch_one(MappedMembers *own, int64_t member, int64_t offset, int64_t size, char *target) {
    if (is_compared(own, member)) return guard->fetch(own->shard.obj, offset, NULL, 0, target, size) ? -1 : 1;
    Lines lines = {.table = own->table, .member = member, .length = -1};
    if (guard->run(copy_lines, &lines) || lines.length < 0 || !is_whole(own->table)) return 0;
    if (lines.entries[1].offset != offset || lines.entries[1].size != size) return 0; /* the index was written to */
    return fetch_member(own, member, (Text){lines.key, lines.length}, lines.entries + 1, 0, target);
}

static PyObject *fetch(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tables;
    Py_buffer shards, members, sizes, addresses, arena;
    if (!PyArg_ParseTuple(args, "O!y*y*y*w*w*:fetch", &PyList_Type, &tables, &shards, &members, &sizes, &addresses, &arena)) return NULL;
    const int64_t count = shards.len / 8, all = members.len / 8, *number = members.buf, *size = sizes.buf;
    MappedMembers **const own = PyMem_Calloc((size_t)all + 1, sizeof *own);
    int failed = 0, left = 0;
    if (!own) PyErr_NoMemory(), failed = 1;
    else if (!count != !all || (count && all % count) || sizes.len != members.len || addresses.len != members.len)
        PyErr_SetString(PyExc_ValueError, "arrays of different lengths"), failed = 1;
    int64_t space = arena.len;
    for (int64_t i = 0; i < all && !failed; i++) {
        MappedMembers *const its = number[i] < 0 ? NULL : members_at(tables, ((int64_t *)shards.buf)[i % count]);
        if (!its && PyErr_Occurred()) failed = 1;
        if (!its || !its->is_called) continue;
        if (number[i] >= its->end || size[i] < 0 || (space -= size[i]) < 0)
            PyErr_SetString(PyExc_ValueError, "not a member of a mapped shard, or too little space"), failed = 1;
        else if (can_note(its)) own[i] = its;
        else failed = 1;
    }
    if (!failed) {
        char *target = arena.buf;
        Py_BEGIN_ALLOW_THREADS
        for (int64_t i = 0; i < all; i++) {
            if (!own[i]) continue;
            uint64_t *const address = (uint64_t *)addresses.buf + i;
            const int64_t offset = (const char *)(uintptr_t)*address - (const char *)own[i]->shard.buf;
            const int is_within = offset >= 0 && offset <= own[i]->shard.len - size[i];
            if (is_within && fetch_one(own[i], number[i], offset, size[i], target) > 0) *address = (uint64_t)(uintptr_t)target;
            else left = 1; /* it stays where it is mapped */
            target += size[i];
        }
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(own);
    Py_buffer *const buffers[] = {&shards, &members, &sizes, &addresses, &arena};
    for (int i = 0; i < 5; i++) PyBuffer_Release(buffers[i]);
    return failed ? NULL : PyBool_FromLong(left);
}

/* The members of several shards, whose witnesses are looked at. */
typedef struct {
    MappedMembers **members; /* NULL for each whose witness is as it was */
    volatile int64_t at;     /* as in Comparing */
    int64_t count;
} Looking;

static void look_at_witnesses(void *argument) {
    Looking *looking = argument;
    for (; looking->at < looking->count; looking->at++) {
        const int64_t at = looking->at;
        if (at + AHEAD < looking->count) __builtin_prefetch((const char *)looking->members[at + AHEAD]->witness.at);
        if (is_unchanged(looking->members[at]->witness)) looking->members[at] = NULL;
    }
}

static PyObject *find_shrunk(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tables, *result = NULL;
    Py_buffer shards, ends;
    if (!PyArg_ParseTuple(args, "O!y*y*:find_shrunk", &PyList_Type, &tables, &shards, &ends)) return NULL;
    const int64_t count = shards.len / 8, tables_count = PyList_Size(tables), *shard = shards.buf;
    Looking looking = {PyMem_Malloc((size_t)count * sizeof *looking.members + 1), 0, 0};
    int64_t *const asked = PyMem_Malloc((size_t)count * 8 + 1);
    char *const is_asked = PyMem_Calloc((size_t)tables_count + 1, 1);
    if (!looking.members || !asked || !is_asked) PyErr_NoMemory();
    else if (ends.len != 8 * tables_count) PyErr_SetString(PyExc_ValueError, "tables and ends differ in length");
    else result = PyList_New(0);
    for (int64_t i = 0; i < count && result; i++) {
        if (shard[i] >= 0 && shard[i] < tables_count && is_asked[shard[i]]) continue;
        MappedMembers *own = members_at(tables, shard[i]);
        if (!own && PyErr_Occurred()) {
            Py_CLEAR(result);
            break;
        }
        is_asked[shard[i]] = 1;
        if (!own || !((int64_t *)ends.buf)[shard[i]]) continue;
        __builtin_prefetch(&own->witness);
        looking.members[looking.count] = own;
        asked[looking.count++] = shard[i];
    }
    if (result) {
        Py_BEGIN_ALLOW_THREADS
        while (guard->run(look_at_witnesses, &looking)) looking.at++; /* a shard has shrunk */
        Py_END_ALLOW_THREADS
    }
    for (int64_t i = 0; i < looking.count && result; i++) {
        const MappedMembers *own = looking.members[i];
        if (!own || guard->reaches(own->shard.obj, (Py_ssize_t)((int64_t *)ends.buf)[asked[i]])) continue;
        PyObject *index = PyLong_FromLongLong(asked[i]);
        if (!index || PyList_Append(result, index) < 0) Py_CLEAR(result);
        Py_XDECREF(index);
    }
    PyMem_Free(looking.members);
    PyMem_Free(asked);
    PyMem_Free(is_asked);
    PyBuffer_Release(&shards);
    PyBuffer_Release(&ends);
    return result;
}

/* Samples that are read next, one by one. */
typedef struct {
    const MappedMembers *members[TOGETHER];
    int64_t samples[TOGETHER], count;
} Ahead;

/* Prefetch the memory that reading the samples will touch, so that the processor waits for all of it together. */
static void prefetch_samples(void *argument) {
    const Ahead *ahead = argument;
    for (int64_t i = 0; i < ahead->count; i++) {
        const MemberTable *table = ahead->members[i]->table;
        __builtin_prefetch(table->marks + ahead->samples[i] / EVERY);
        prefetch_entry(table, guess_first(table, ahead->samples[i]));
    }
    for (int64_t i = 0; i < ahead->count; i++) {
        const MappedMembers *own = ahead->members[i];
        __builtin_prefetch((const char *)own->witness.at);
        __builtin_prefetch((const char *)own->table->witness.at);
        const int64_t first = first_of(own->table, ahead->samples[i]);
        const char *keys = bytes_of(own->table) + own->table->keys + own->table->marks[ahead->samples[i] / EVERY];
        for (int line = 0; line < 4; line++) __builtin_prefetch(keys + 64 * line);
        if (first >= own->table->members) continue;
        const Entry entry = likely_entry(own->table, first);
        if (!is_here(own, &entry)) continue;
        prefetch_header(at(own, entry.offset) - BLOCK);
        for (int64_t byte = 0; byte < entry.size && byte < BLOCK; byte += 64) __builtin_prefetch(at(own, entry.offset + byte));
        if (!first || is_compared(own, first)) continue;
        const Entry before = likely_entry(own->table, first - 1);
        if (is_here(own, &before)) prefetch_previous_header(at(own, before.offset) - BLOCK);
    }
}

/* Return a sample as a dict, and add its size to *taken*; None if it needs a second check. Return NULL with an
 * exception set if that fails. */
static PyObject *read_sample(MappedMembers *own, int64_t sample, int64_t *taken) {
    if (!own || !own->names || sample < 0 || sample >= own->table->samples) return Py_NewRef(Py_None);
    PyObject *result = PyDict_New();
    if (!result || PyObject_SetItem(result, key_name, own->url) < 0 || PyObject_SetItem(result, url_name, own->url) < 0) {
        Py_XDECREF(result);
        return NULL;
    }
    const int64_t undecided = fill_sample(own, result, own->names, sample, 0, taken);
    if (undecided == -1) return result;
    Py_DECREF(result);
    if (undecided == -2 && !PyErr_ExceptionMatches(PyExc_OSError) && !PyErr_ExceptionMatches(PyExc_MemoryError)) return NULL;
    PyErr_Clear(); /* the second check finds the error again, and names the shard */
    return Py_NewRef(Py_None);
}

/* Prefetch *bytes* of an object. */
static void prefetch_object(const void *object, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)object + at);
}

static PyObject *read_samples(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tables, *result = NULL;
    Py_buffer shards, samples;
    Py_ssize_t begin;
    if (!PyArg_ParseTuple(args, "O!y*y*n:read_samples", &PyList_Type, &tables, &shards, &samples, &begin)) return NULL;
    MappedMembers *own[TOGETHER];
    int64_t numbers[TOGETHER], count = 0, bytes = 0; /* an estimate of the bytes to read */
    Ahead ahead = {.count = 0};
    if (shards.len != samples.len || begin < 0) PyErr_SetString(PyExc_ValueError, "shards and samples differ in length");
    else result = PyList_New(0);
    const int64_t tables_count = PyList_Size(tables), end = shards.len / 8;
    for (int64_t i = begin; result && i < end && i < begin + 2 * TOGETHER; i++) { /* also for the next call */
        const int64_t shard = ((int64_t *)shards.buf)[i];
        PyObject *object = shard >= 0 && shard < tables_count ? PyList_GetItem(tables, (Py_ssize_t)shard) : NULL;
        if (!object || object == Py_None) continue;
        if (i >= begin + TOGETHER) {
            prefetch_object(object, sizeof(MappedMembers));
        } else if (PyObject_TypeCheck(object, members_type)) {
            const MappedMembers *later = (MappedMembers *)object;
            prefetch_object(later->table, sizeof(MemberTable));
            prefetch_object(later->url, 64);
            if (later->compared) __builtin_prefetch(later->compared + ((int64_t *)samples.buf)[i] / 8);
        }
    }
    for (; result && count < TOGETHER && bytes < LARGE && begin + count < shards.len / 8; count++) {
        own[count] = members_at(tables, ((int64_t *)shards.buf)[begin + count]);
        numbers[count] = ((int64_t *)samples.buf)[begin + count];
        if (!own[count] && PyErr_Occurred()) {
            Py_CLEAR(result);
            break;
        }
        Py_XINCREF((PyObject *)own[count]);
        if (!own[count] || numbers[count] < 0 || numbers[count] >= own[count]->table->samples) continue;
        bytes += own[count]->table->shard_size / own[count]->table->samples;
        ahead.members[ahead.count] = own[count];
        ahead.samples[ahead.count++] = numbers[count];
    }
    guard->run(prefetch_samples, &ahead); /* if a file has shrunk, reading the sample reports it */
    int64_t taken = 0;
    for (int64_t i = 0; result && i < count && taken < LARGE; i++) {
        PyObject *sample = read_sample(own[i], numbers[i], &taken);
        if (!sample || PyList_Append(result, sample) < 0) Py_CLEAR(result);
        Py_XDECREF(sample);
    }
    for (int64_t i = 0; i < count; i++) Py_XDECREF((PyObject *)own[i]);
    PyBuffer_Release(&shards);
    PyBuffer_Release(&samples);
    return result;
}

static PyObject *find_keys(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tables;
    Py_buffer shards, samples;
    if (!PyArg_ParseTuple(args, "O!y*y*:find_keys", &PyList_Type, &tables, &shards, &samples)) return NULL;
    PyObject *result = shards.len == samples.len ? PyList_New(0) : NULL;
    if (!result && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "shards and samples differ in length");
    for (int64_t i = 0; i < shards.len / 8 && result; i++) {
        MappedMembers *own = members_at(tables, ((int64_t *)shards.buf)[i]);
        PyObject *key = own ? key_object(own->table, ((int64_t *)samples.buf)[i]) : PyErr_Occurred() ? NULL : decoded("", 0);
        if (!key || PyList_Append(result, key) < 0) Py_CLEAR(result);
        Py_XDECREF(key);
    }
    PyBuffer_Release(&shards);
    PyBuffer_Release(&samples);
    return result;
}

/* Numbers that are copied from the sidecar of a table. */
typedef struct {
    const MemberTable *table;
    const int64_t *asked;
    int64_t count, *out;
} Reading;

/* Return whether an entry is not of a member of the shard. */
static int is_impossible(const MemberTable *table, const Entry *entry) {
    return entry->offset < BLOCK || entry->offset > table->shard_size || entry->size < 0 ||
           entry->size > table->shard_size - entry->offset || entry->field >= table->field_count;
}

static void read_firsts(void *argument) {
    const Reading *reading = argument;
    for (int64_t i = 0; i < reading->count; i++) reading->out[i] = first_of(reading->table, reading->asked[i]);
}

static void read_entries(void *argument) {
    const Reading *reading = argument;
    for (int64_t i = 0; i < reading->count; i++) {
        const MemberTable *table = reading->table;
        const Entry entry = entry_of(table, reading->asked[i]);
        if (table->checks.sums && is_impossible(table, &entry)) end_damaged(table);
        int64_t *out = reading->out + 4 * i;
        out[0] = owner_of(table, reading->asked[i]);
        out[1] = entry.field, out[2] = entry.offset, out[3] = entry.size;
    }
}

/* Write *width* numbers into an array for each sample or member asked for; these must be below *limit*. */
static PyObject *read_numbers(PyObject *object, PyObject *args, void (*work)(void *), int64_t limit, int width) {
    Py_buffer asked, out;
    if (!PyArg_ParseTuple(args, "y*w*", &asked, &out)) return NULL;
    const MemberTable *table = (MemberTable *)object;
    Reading reading = {table, asked.buf, asked.len / 8, out.buf};
    int is_sound = out.len == asked.len * width;
    for (int64_t i = 0; is_sound && i < reading.count; i++) is_sound = reading.asked[i] >= 0 && reading.asked[i] < limit;
    if (!is_sound) PyErr_SetString(PyExc_IndexError, "a number out of range");
    else if (guard->run(work, &reading) || !is_whole(table)) unreadable(table), is_sound = 0;
    PyBuffer_Release(&asked);
    PyBuffer_Release(&out);
    if (!is_sound) return NULL;
    Py_RETURN_NONE;
}

static PyObject *table_firsts(PyObject *object, PyObject *args) {
    return read_numbers(object, args, read_firsts, ((MemberTable *)object)->samples + 1, 1);
}

static PyObject *table_entries(PyObject *object, PyObject *args) {
    return read_numbers(object, args, read_entries, ((MemberTable *)object)->members, 4);
}

static PyObject *table_key(PyObject *object, PyObject *sample) {
    const int64_t number = PyLong_AsLongLong(sample);
    return PyErr_Occurred() ? NULL : key_object((MemberTable *)object, number);
}

static PyObject *table_span(PyObject *object, PyObject *sample) {
    const MemberTable *table = (MemberTable *)object;
    const int64_t number = PyLong_AsLongLong(sample);
    if (PyErr_Occurred()) return NULL;
    if (number < 0 || number >= table->samples) return PyErr_Format(PyExc_IndexError, "sample %lld", (long long)number);
    int64_t asked[] = {number, number + 1}, out[2];
    Reading reading = {table, asked, 2, out};
    if (guard->run(read_firsts, &reading) || !is_whole(table)) return unreadable(table);
    return Py_BuildValue("LL", (long long)out[0], (long long)out[1]);
}

static PyObject *table_entry(PyObject *object, PyObject *member) {
    const MemberTable *table = (MemberTable *)object;
    int64_t asked = PyLong_AsLongLong(member), out[4];
    if (PyErr_Occurred()) return NULL;
    if (asked < 0 || asked >= table->members) return PyErr_Format(PyExc_IndexError, "member %lld", (long long)asked);
    Reading reading = {table, &asked, 1, out};
    if (guard->run(read_entries, &reading) || !is_whole(table)) return unreadable(table);
    return Py_BuildValue("LLLL", (long long)out[0], (long long)out[1], (long long)out[2], (long long)out[3]);
}

static PyObject *table_rest_on(PyObject *object, PyObject *mapping) {
    MemberTable *table = (MemberTable *)object;
    Py_buffer buffer;
    if (PyObject_GetBuffer(mapping, &buffer, PyBUF_SIMPLE) < 0) return NULL;
    if (buffer.len != table->sidecar.len) {
        PyBuffer_Release(&buffer);
        return PyErr_Format(PyExc_ValueError, "a sidecar of another size");
    }
    PyObject *file = PyMemoryView_Check(mapping) ? PyObject_GetAttrString(mapping, "obj") : Py_NewRef(mapping);
    const Py_ssize_t size = file ? PyObject_Size(file) : -1;
    if (size < 0) {
        Py_XDECREF(file);
        PyBuffer_Release(&buffer);
        return NULL;
    }
    PyBuffer_Release(&table->sidecar);
    Py_XDECREF(table->file);
    table->sidecar = buffer, table->file = file, table->file_size = size, table->witness = guard->witness(file);
    Py_RETURN_NONE;
}

static PyObject *table_pages(PyObject *object, void *unused) {
    (void)unused;
    const MemberTable *self = (MemberTable *)object;
    const int64_t count = (self->samples + EVERY - 1) / EVERY;
    PyObject *marks = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * count));
    char *bytes = marks ? PyBytes_AsString(marks) : NULL;
    for (int64_t i = 0; marks && i < 4 * count; i++) bytes[i] = (char)(self->marks[i / 4] >> i % 4 * 8);
    return marks ? Py_BuildValue("LN", (long long)self->each, marks) : NULL;
}

static PyObject *table_members(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromLongLong(((MemberTable *)object)->members);
}

static Py_ssize_t table_length(PyObject *object) { return (Py_ssize_t)((MemberTable *)object)->samples; }

/* Count the keys, and mark where each EVERY-th begins. Return NULL, or what is wrong; "" if there is no memory. */
static const char *mark_keys(MemberTable *self, int64_t end) {
    const unsigned char *data = self->sidecar.buf;
    Item item;
    if (!read_item(data, self->keys, end, &item) || item.items < 0 || item.is_map) return "a size that is not a number, or names that are not lists";
    self->samples = item.items;
    self->keys = item.end;
    if (item.items > end - item.end) return "keys that are not there"; /* each key takes a byte or more */
    if (!(self->marks = PyMem_Malloc(sizeof *self->marks * (size_t)(item.items / EVERY + 1)))) return "";
    int64_t next = item.end;
    for (int64_t i = 0; i < self->samples; i++, next = item.end) {
        if (i % EVERY == 0) self->marks[i / EVERY] = (uint32_t)(next - self->keys);
        const int length = next < end && data[next] >= 0xa0 && data[next] < 0xc0 ? data[next] & 31 : -1;
        if (length >= 0 && end - next > length) item.end = next + 1 + length; /* a string of up to 31 bytes */
        else if (!read_item(data, next, end, &item) || !item.is_text) return "a key or a field that is not a string";
    }
    return NULL;
}

/* Return what is wrong with the arrays of an index, or NULL. */
static const char *inconsistency(MemberTable *self, int64_t archive_end) {
    if (!self->members) return self->samples ? "keys without members" : NULL;
    int64_t sample = -1, begin = BLOCK, each = self->samples ? self->members / self->samples : 0, own = each;
    for (int64_t i = 0; i < self->members; i++, own++) {
        const int64_t next = sample_of(self, i);
        if (next < sample || next > sample + 1) return "samples out of order";
        if (next > sample && own != each) each = 0;
        if (next > sample) own = 0;
        sample = next;
    }
    if (sample_of(self, 0) != 0 || sample != self->samples - 1) return "samples out of order";
    self->each = own == each ? each : 0;
    for (int64_t i = 0; i < self->members; i++) {
        const Entry entry = entry_of(self, i);
        if ((int64_t)number(bytes_of(self) + self->field + 2 * i, 2) >= self->field_count) return "a field without a name";
        if (entry.offset < 0 || entry.offset > self->shard_size || entry.size < 0 || entry.size > self->shard_size)
            return "a member beyond the shard's end";
    }
    for (int64_t i = 0; i < self->members; i++) {
        const Entry entry = entry_of(self, i);
        if (entry.offset < begin || entry.offset + entry.size > self->shard_size)
            return "members that overlap or lie beyond the shard's end";
        begin = entry.offset + entry.size;
    }
    return archive_end >= 0 && begin > archive_end ? "an end of the archive that is before the last member" : NULL;
}

/* Store the names of the fields, a tuple of bytes; return 0 with an exception set if that fails. */
static int name_fields(MemberTable *self, PyObject *names) {
    self->field_count = PyTuple_Size(names);
    self->names = Py_NewRef(names);
    if (!(self->fields = PyMem_Calloc((size_t)self->field_count + 1, sizeof(Text)))) return PyErr_NoMemory(), 0;
    for (int64_t i = 0; i < self->field_count; i++) {
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(names, (Py_ssize_t)i), (char **)&self->fields[i].text, &length) < 0) return 0;
        self->fields[i].length = length;
    }
    return 1;
}

/* Get the beginning of an array in the sidecar; return its length in bytes, or -1 with an exception set. */
static int64_t array_at(const MemberTable *self, PyObject *found, const char *name, int64_t *begin) {
    PyObject *range = PyDict_GetItemString(found, name);
    long long first, end;
    if (!range) return PyErr_Format(PyExc_ValueError, "no %s", name), -1;
    if (!PyArg_ParseTuple(range, "LL", &first, &end)) return -1;
    if (first < 0 || end < first || end > self->sidecar.len) return PyErr_SetString(PyExc_ValueError, "a range outside of the sidecar"), -1;
    *begin = first;
    return end - first;
}

/* Take the numbers of 4 bytes in *packed*; NULL with an exception set if they are not *count*. */
static uint32_t *take_numbers(const Py_buffer *packed, int64_t count) {
    uint32_t *numbers = packed->len == 4 * count ? PyMem_Malloc((size_t)packed->len + 1) : NULL;
    if (packed->len != 4 * count) PyErr_SetString(PyExc_ValueError, "checksums of other pages, or marks of other keys");
    else if (!numbers) PyErr_NoMemory();
    for (int64_t i = 0; numbers && i < count; i++) numbers[i] = (uint32_t)number((const char *)packed->buf + 4 * i, 4);
    return numbers;
}

/* Let the pages with the bytes from *begin* to *end* be compared when they are used. */
static void mark_unchecked(Checks *checks, int64_t begin, int64_t end) {
    for (int64_t page = begin / PAGE; page * PAGE < end && page * PAGE < checks->end; page++) {
        checks->left += checks->bits[page / 8] >> page % 8 & 1;
        checks->bits[page / 8] &= (unsigned char)~(1 << page % 8);
    }
}

/* Take what a sidecar says of its keys and pages, in place of looking at all; return 0 with an exception set if that fails. */
static int take_pages(MemberTable *self, PyObject *pages, int64_t keys_end) {
    long long samples, keys, each, end;
    Py_buffer marks, sums;
    if (!PyArg_ParseTuple(pages, "LLLLy*y*:MemberTable", &samples, &keys, &each, &end, &marks, &sums)) return 0;
    Checks *checks = &self->checks;
    const int is_sound = samples >= 0 && samples <= self->members && (samples > 0 || !self->members) && keys >= 0 && end > 0 &&
                         end <= self->sidecar.len && (each == 0 || (each > 0 && self->members / each == samples && self->members % each == 0));
    const int64_t count = is_sound ? (end + PAGE - 1) / PAGE : 0, members = self->members;
    checks->end = end;
    self->samples = samples, self->keys = keys, self->each = each;
    if (!is_sound) PyErr_SetString(PyExc_ValueError, "an impossible number of samples, or pages");
    else if ((self->marks = take_numbers(&marks, (samples + EVERY - 1) / EVERY)) && (checks->sums = take_numbers(&sums, count)) &&
             !(checks->bits = PyMem_Malloc((size_t)count / 8 + 1)))
        PyErr_NoMemory();
    PyBuffer_Release(&marks);
    PyBuffer_Release(&sums);
    if (PyErr_Occurred()) return 0;
    memset(checks->bits, 255, (size_t)count / 8 + 1);
    mark_unchecked(checks, keys, keys_end);
    mark_unchecked(checks, self->offset, self->offset + 8 * members);
    mark_unchecked(checks, self->size, self->size + 8 * members);
    if (!each) mark_unchecked(checks, self->sample, self->sample + 4 * members);
    if (self->field_count != 1) mark_unchecked(checks, self->field, self->field + 2 * members);
    return 1;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    static char *names[] = {"sidecar", "layout", "fields", "shard_size", "end", "pages", NULL};
    MemberTable *self = (MemberTable *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    PyObject *found, *fields, *pages = NULL;
    long long shard_size, end;
    if (!self) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, options, "y*O!O!LL|O!:MemberTable", names, &self->sidecar, &PyDict_Type, &found,
                                     &PyTuple_Type, &fields, &shard_size, &end, &PyTuple_Type, &pages))
        goto failed;
    self->shard_size = shard_size;
    self->witness = guard->witness(Py_None);
    const int64_t keys = array_at(self, found, "keys", &self->keys), sample = array_at(self, found, "sample", &self->sample),
                  field = array_at(self, found, "field", &self->field), offset = array_at(self, found, "offset", &self->offset),
                  size = array_at(self, found, "size", &self->size);
    if (PyErr_Occurred() || !name_fields(self, fields)) goto failed;
    self->members = sample / 4;
    const int are_alike = 4 * self->members == sample && 2 * self->members == field && 8 * self->members == offset && offset == size;
    if (are_alike && pages && !take_pages(self, pages, self->keys + keys)) goto failed;
    const char *problem = !are_alike ? "arrays of different lengths" : pages ? NULL : mark_keys(self, self->keys + keys);
    if (!problem && !pages) problem = inconsistency(self, end);
    if (!problem) return (PyObject *)self;
    if (*problem) PyErr_SetString(PyExc_ValueError, problem);
    else PyErr_NoMemory();
failed:
    Py_DECREF(self);
    return NULL;
}

static void table_dealloc(PyObject *object) {
    MemberTable *self = (MemberTable *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->sidecar.obj) PyBuffer_Release(&self->sidecar);
    Py_XDECREF(self->file);
    Py_XDECREF(self->names);
    PyMem_Free(self->fields);
    PyMem_Free(self->marks);
    PyMem_Free(self->checks.sums);
    PyMem_Free(self->checks.bits);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *members_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    static char *names[] = {"shard", "table", "low", "begin", "end", "url", "names", NULL};
    MappedMembers *self = (MappedMembers *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    PyObject *table, *url = NULL, *fields = NULL;
    long long low = 0, begin = 0, end = -1;
    if (!self) return NULL;
    if (PyArg_ParseTupleAndKeywords(args, options, "y*O!|LLLO!O!:MappedMembers", names, &self->shard, table_type, &table,
                                    &low, &begin, &end, &PyUnicode_Type, &url, &PyList_Type, &fields)) {
        self->table = (MemberTable *)Py_NewRef(table);
        if (end < 0) end = self->table->members;
        self->low = low, self->begin = begin, self->end = end;
        self->witness = guard->witness(self->shard.obj);
        self->is_called = guard->is_called(self->shard.obj);
        self->url = Py_XNewRef(url), self->names = Py_XNewRef(fields);
        if (low >= 0 && begin >= 0 && begin <= end && end <= self->table->members) return (PyObject *)self;
        PyErr_SetString(PyExc_ValueError, "not members of the table");
    }
    Py_DECREF(self);
    return NULL;
}

static void members_dealloc(PyObject *object) {
    MappedMembers *self = (MappedMembers *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->shard.obj) PyBuffer_Release(&self->shard);
    Py_XDECREF((PyObject *)self->table);
    Py_XDECREF(self->url);
    Py_XDECREF(self->names);
    PyMem_Free(self->compared);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef table_methods[] = {
    {"key", table_key, METH_O, "Return the key of a sample."},
    {"span", table_span, METH_O, "Return the first member of a sample, and the one after its last."},
    {"entry", table_entry, METH_O, "Return the sample, field, offset and size of a member."},
    {"read_firsts", table_firsts, METH_VARARGS, "Write the first member of each of many samples into an array."},
    {"read_entries", table_entries, METH_VARARGS, "Write the sample, field, offset and size of each of many members into an array."},
    {"rest_on", table_rest_on, METH_O, "Use a mapping of the same bytes from now on."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef table_attributes[] = {
    {"members", table_members, NULL, "The number of members.", NULL},
    {"pages", table_pages, NULL, "The number of members of every sample, 0 if it varies, and the offset of each 64th key.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods},
    {Py_tp_getset, table_attributes},
    {Py_sq_length, table_length},
    {Py_tp_doc, "The members of a shard in its sidecar; see tarshards.kernels._headers_py."},
    {0, NULL},
};

static PyType_Spec table_spec = {
    .name = "tarshards.kernels._headers.MemberTable",
    .basicsize = sizeof(MemberTable),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = table_slots,
};

static PyMethodDef members_methods[] = {
    {"fill", (PyCFunction)(void (*)(void))members_fill, METH_FASTCALL, "Put the key and the members of a sample into a dict."},
    {"settle", members_settle, METH_O, "Note that a member matches."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot members_slots[] = {
    {Py_tp_new, members_new},
    {Py_tp_dealloc, members_dealloc},
    {Py_tp_methods, members_methods},
    {Py_tp_doc, "The members of a mapped shard; see tarshards.kernels._headers_py."},
    {0, NULL},
};

static PyType_Spec members_spec = {
    .name = "tarshards.kernels._headers.MappedMembers",
    .basicsize = sizeof(MappedMembers),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = members_slots,
};

static PyMethodDef methods[] = {
    {"layout", layout, METH_O, "layout(packed) -> the range of each entry; see tarshards.kernels._headers_py"},
    {"locate", locate, METH_VARARGS,
     "locate(tables, rank, shards, samples, order, addresses, sizes, members, ends) -> whether headers remain to compare"},
    {"fetch", fetch, METH_VARARGS, "fetch(tables, shards, members, sizes, addresses, arena) -> whether some stay where they are mapped"},
    {"find_shrunk", find_shrunk, METH_VARARGS, "find_shrunk(tables, shards, ends) -> indices; see tarshards.kernels._headers_py"},
    {"read_samples", read_samples, METH_VARARGS,
     "read_samples(tables, shards, samples, begin) -> samples; see tarshards.kernels._headers_py"},
    {"find_keys", find_keys, METH_VARARGS, "find_keys(tables, shards, samples) -> keys; see tarshards.kernels._headers_py"},
    {"find_undecided", find_undecided, METH_VARARGS,
     "find_undecided(tables, shards, members) -> indices; see tarshards.kernels._headers_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_headers", "Members and their headers.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__headers(void) {
    if (!(guard = import_guard())) return NULL;
    fill_crc_table();
    PyObject *result = PyModule_Create(&module);
    key_name = PyUnicode_InternFromString("__key__");
    url_name = PyUnicode_InternFromString("__url__");
    table_type = (PyTypeObject *)PyType_FromSpec(&table_spec);
    members_type = (PyTypeObject *)PyType_FromSpec(&members_spec);
    if (!result || !key_name || !url_name || !table_type || !members_type ||
        PyModule_AddObjectRef(result, "MemberTable", (PyObject *)table_type) < 0 ||
        PyModule_AddObjectRef(result, "MappedMembers", (PyObject *)members_type) < 0)
        Py_CLEAR(result);
    return result;
}
