/* Decode the JPEGs of a batch, only the rows and columns that their boxes need, and resize them into its rows, without
 * the GIL. _jpeg_py.py documents the functions.
 *
 * libjpeg-turbo decodes: the library that Pillow has loaded, or else the system's. It is opened at run time, so that
 * there is no second copy to build, ship and keep up to date, and no headers are needed to compile this. Its functions
 * are found through a handle of a module that was linked to it (dlsym looks into what that depends on). Linking it
 * statically would need its sources, an assembler and a release for each of its security updates.
 *
 * The structures below are those of its interface (jpeglib.h), which has not changed since libjpeg 6b (version 62) and
 * libjpeg 8 (version 80): the versions are equal up to the last member that is used here. jpeg_CreateDecompress compares
 * the version, and the size of the structure, with its own.
 *
 * The rows outside of a box are skipped, but their bits are read: damage anywhere in an image is noticed. An error, a
 * warning (which is damage, too) or the end of the bytes stops a decoder, and the image is left to the caller.
 *
 * Addresses are trusted: tarshards.samples.payloads.Payloads has checked those of payloads.
 */
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_guard.h"
#include "_jpeg_markers.h"
#include "_resize.h"

#define COLOURS_GREY 1
#define COLOURS_RGB 2
#define COLOURS_YCC 3
#define COLOURS_CMYK 4
#define COLOURS_YCCK 5
#define COLOURS_RGBA 12
#define EXIF_WITHIN (1 << 16) /* bytes of a file in which EXIF data begin */
#define MESSAGE 200           /* bytes of the longest message */

typedef struct Decompress Decompress;

typedef struct {
    void (*error_exit)(Decompress *);
    void (*emit_message)(Decompress *, int level);
    void (*output_message)(Decompress *);
    void (*format_message)(Decompress *, char *buffer);
    void (*reset)(Decompress *);
    int code;
    union {
        int numbers[8];
        char text[80];
    } parameters;
    int trace_level;
    long warnings;
    const void *messages;
    int last_message;
    const void *more_messages;
    int first_more, last_more;
} Errors;

typedef struct {
    const uint8_t *next;
    size_t left;
    void (*begin)(Decompress *);
    int (*fill)(Decompress *);
    void (*skip)(Decompress *, long count);
    int (*resync)(Decompress *, int desired);
    void (*end)(Decompress *);
} Source;

/* Members that both versions have, but at other offsets. */
#define OF_MARKERS \
    uint8_t arithmetic[48]; \
    unsigned restart; \
    int jfif; \
    uint8_t jfif_version[3]; \
    uint16_t density[2]; \
    int adobe; \
    uint8_t transform; \
    int ccir; \
    void *markers

struct Decompress {
    Errors *errors;
    void *memory, *progress, *client;
    int is_decompressor, state;
    Source *source;
    unsigned width, height;
    int components, colours, out_colours;
    unsigned scale_num, scale_denom;
    double gamma;
    int is_buffered, is_raw, dct_method, fancy_upsampling, block_smoothing, quantize, dither, two_pass, most_colours;
    int one_pass, external, two_passes;
    unsigned out_width, out_height;
    int out_components, out_elements, out_rows, actual_colours;
    void *map;
    unsigned out_row;
    int scan;
    unsigned input_row;
    int out_scan;
    unsigned output_row;
    void *bits, *tables[12];
    int precision;
    void *infos;
    union { /* what differs; only its size is used */
        struct {
            int flags[2];
            OF_MARKERS;
            int most_factors[2], dct_size[1];
            unsigned rows;
            void *limits;
            int scanned;
            void *current[4];
            unsigned units[2];
            int blocks, membership[10], progression[4], unread;
            void *modules[11];
        } rest62;
        struct {
            int flags[3];
            OF_MARKERS;
            int most_factors[2], dct_size[2];
            unsigned rows;
            void *limits;
            int scanned;
            void *current[4];
            unsigned units[2];
            int blocks, membership[10], progression[4], block_size;
            const void *order;
            int last, unread;
            void *modules[11];
        } rest80;
    };
};

#define UP_TO_REST offsetof(Decompress, rest62)
static const struct {
    int version;
    size_t size;
} interfaces[] = {{62, UP_TO_REST + sizeof(((Decompress *)0)->rest62)}, {80, UP_TO_REST + sizeof(((Decompress *)0)->rest80)}};

/* The functions of the library. */
static struct {
    Errors *(*std_error)(Errors *);
    void (*create)(Decompress *, int version, size_t size);
    void (*destroy)(Decompress *);
    int (*read_header)(Decompress *, int requires_image);
    int (*start)(Decompress *);
    int (*has_scans)(Decompress *);
    void (*crop)(Decompress *, unsigned *left, unsigned *width);
    unsigned (*skip)(Decompress *, unsigned count);
    unsigned (*read)(Decompress *, uint8_t **rows, unsigned count);
    int (*finish)(Decompress *);
    int (*resync)(Decompress *, int desired);
} library;
static const struct {
    const char *name;
    void *function;
} symbols[] = {
    {"jpeg_std_error", &library.std_error},
    {"jpeg_CreateDecompress", &library.create},
    {"jpeg_destroy_decompress", &library.destroy},
    {"jpeg_read_header", &library.read_header},
    {"jpeg_start_decompress", &library.start},
    {"jpeg_has_multiple_scans", &library.has_scans},
    {"jpeg_crop_scanline", &library.crop}, /* this and the next one: of libjpeg-turbo from 1.5 on alone */
    {"jpeg_skip_scanlines", &library.skip},
    {"jpeg_read_scanlines", &library.read},
    {"jpeg_finish_decompress", &library.finish},
    {"jpeg_resync_to_restart", &library.resync},
};
static int version; /* of the interface; 0 as long as no library is open */
static size_t structure_size;

/* A decoder of one image, and the memory that a thread keeps for the next ones. */
typedef struct {
    Decompress jpeg;
    Errors errors;
    Source source;
    jmp_buf failed;
    volatile int is_open; /* whether the library holds memory for it */
    int has_header;
    char message[MESSAGE];
    Scratch scratch;
    uint8_t *strip; /* KEPT rows of RGB: row i of an image is row i % KEPT of these */
    int64_t strip_size, row_bytes, left_bytes; /* of a row; of what is left of the columns that are decoded */
    int32_t read;                              /* rows of the image before this one have been read or skipped */
    int32_t decoded;                           /* rows that were read */
} Decoder;

#define KEPT 4            /* rows: the two of a pair, and the two that the library makes at once */
#define MARGIN 1          /* columns beside a box: at the edges of what it decodes, the library does not interpolate colours */
#define NARROWEST 8       /* columns: of fewer, it interpolates no colours at all */
#define LARGEST (2 << 20) /* bytes of memory that a thread keeps */

static void fail(Decompress *jpeg) {
    Decoder *this = jpeg->client;
    this->errors.format_message(jpeg, this->message);
    _longjmp(this->failed, 1);
}

static void emit(Decompress *jpeg, int level) {
    if (level < 0) fail(jpeg);
}

static void say_nothing(Decompress *jpeg) { (void)jpeg; }

static void fail_at_end(Decompress *jpeg) {
    Decoder *this = jpeg->client;
    strcpy(this->message, this->has_header ? "Premature end of JPEG file" : "JPEG datastream contains no image");
    _longjmp(this->failed, 1);
}

static int fill(Decompress *jpeg) {
    fail_at_end(jpeg);
    return 0;
}

static void skip_bytes(Decompress *jpeg, long count) {
    Source *source = jpeg->source;
    if (count <= 0) return;
    if ((size_t)count > source->left) fail_at_end(jpeg);
    source->next += count;
    source->left -= (size_t)count;
}

static void close_decoder(Decoder *this) {
    if (!this->is_open) return;
    this->is_open = 0;
    library.destroy(&this->jpeg);
}

/* Open a decoder of bytes and read their header; within a setjmp. */
static void open_decoder(Decoder *this, const uint8_t *data, size_t size) {
    Decompress *jpeg = &this->jpeg;
    jpeg->errors = library.std_error(&this->errors);
    this->errors.error_exit = fail;
    this->errors.emit_message = emit;
    this->errors.output_message = say_nothing;
    jpeg->client = this;
    library.create(jpeg, version, structure_size);
    this->is_open = 1;
    this->has_header = 0;
    this->source = (Source){data, size, say_nothing, fill, skip_bytes, library.resync, say_nothing};
    jpeg->source = &this->source;
    library.read_header(jpeg, 1);
    this->has_header = 1;
}

/* What the header of a JPEG says; the height is 0 if it is none, or one that only other libraries decode. */
typedef struct {
    int32_t height, width;
    int components, is_plain; /* whether sampling and scans are those that the library crops exactly */
} Header;

static Header read_header(const uint8_t *data, int64_t size) {
    Header header = {0};
    if (size < 4 || data[0] != 0xff || data[1] != 0xd8 || data[2] != 0xff) return header;
    Segment found = next_segment(data, size, 2);
    while (found.marker >= 0 && found.marker != START_OF_SCAN && !IS_FRAME(found.marker))
        found = next_segment(data, size, found.end);
    const uint8_t *frame = data + found.at + 4; /* bits, height, width, components; and of each number, factors, table */
    if (found.end > size || found.end - found.at < 13) return header;
    const int components = frame[5];
    const int is_decoded = found.marker >= 0xc0 && found.marker <= 0xc2; /* not lossless, nor of arithmetic codes */
    if (!is_decoded || frame[0] != 8 || (components != 1 && components != 3)) return header;
    if (found.end - found.at != 10 + 3 * components || !two_bytes(frame + 3)) return header;
    const int across = frame[7] >> 4, down = frame[7] & 15, most = components == 1 ? 1 : 2;
    header.is_plain = across >= 1 && across <= most && down >= 1 && down <= most &&
                      (components == 1 || (frame[10] == 0x11 && frame[13] == 0x11));
    header.components = components;
    header.height = two_bytes(frame + 1);
    header.width = two_bytes(frame + 3);
    return header;
}

/* Read rows until *row* is among them. */
static void read_up_to(Decoder *this, int32_t row) {
    while (this->read <= row) {
        uint8_t *rows[KEPT / 2];
        for (int i = 0; i < KEPT / 2; i++)
            rows[i] = this->strip + (this->read + i) % KEPT * this->row_bytes + this->left_bytes;
        const int32_t left = (int32_t)this->jpeg.out_height - this->read;
        const int32_t count = (int32_t)library.read(&this->jpeg, rows, (unsigned)(left < KEPT / 2 ? left : KEPT / 2));
        if (!count) fail_at_end(&this->jpeg);
        this->read += count;
        this->decoded += count;
    }
}

static const uint8_t *decoded_row(void *source, int32_t row) {
    Decoder *this = source;
    read_up_to(this, row);
    return this->strip + row % KEPT * this->row_bytes;
}

/* Read the rest of an image, so that damage in it is noticed: its last row is decoded. */
static void read_rest(Decoder *this, int may_skip) {
    const int32_t last = (int32_t)this->jpeg.out_height - 1;
    if (may_skip && this->read < last) this->read += (int32_t)library.skip(&this->jpeg, (unsigned)(last - this->read));
    read_up_to(this, last);
    library.finish(&this->jpeg);
}

/* Read a whole image into memory. */
static void read_whole(Decoder *this, uint8_t *out) {
    Decompress *jpeg = &this->jpeg;
    const int64_t row_bytes = (int64_t)jpeg->out_width * jpeg->out_elements;
    for (unsigned row = 0, count; row < jpeg->out_height; row += count) {
        uint8_t *rows[] = {out + row * row_bytes, out + (row + 1) * row_bytes};
        count = library.read(jpeg, rows, row + 1 < jpeg->out_height ? 2 : 1);
        if (!count) fail_at_end(jpeg);
    }
    library.finish(jpeg);
}

/* The images of a batch, and where they go. */
typedef struct {
    Decoder *decoder;
    int64_t count;
    int32_t *decoded; /* not 0 for an image that is asked for; becomes the number of its rows that were decoded, or 0 */
    const uint64_t *row, *address;
    const int64_t *size;
    const float *box;
    const char *flip;
    const int32_t *target; /* height and width of each */
    int planar;
    const float *normal;
    int has_memory;
} Batch;

/* Return the least n so that n eighths of an image cover the target. */
static int eighths_of(const Header *header, const float *box, const int32_t *target) {
    const double down = target[0] / ((double)box[3] - box[1]), across = target[1] / ((double)box[2] - box[0]);
    const double factor = down > across ? down : across, height = header->height * factor, width = header->width * factor;
    for (int n = 1; n <= 4; n++) /* of 5 to 7 eighths, decoding takes as long as of all */
        if ((header->height * n + 7) / 8 >= height && (header->width * n + 7) / 8 >= width) return n;
    return 8;
}

/* Decode an image; within a setjmp. Return 0 if it is to be decoded by other means, -1 if there is no memory. */
static int decode_one(const Batch *batch, int64_t i) {
    Decoder *this = batch->decoder;
    Decompress *jpeg = &this->jpeg;
    const uint8_t *data = (const uint8_t *)(uintptr_t)batch->address[i];
    const Header header = read_header(data, batch->size[i]);
    const int32_t *target = batch->target + 2 * i;
    const float *box = batch->box + 4 * i;
    Shapes s = {header.height, header.width, 3, target[0], target[1], batch->planar, NULL, NULL};
    if (!header.height || !shapes_are_right(&s) || !box_is_right(box, &s)) return 0;
    if (batch->normal) {
        s.divisors = batch->normal;
        s.offsets = s.divisors + 3;
    }
    const int eighths = eighths_of(&header, box, target);
    open_decoder(this, data, (size_t)batch->size[i]);
    const int has_colours = jpeg->colours == COLOURS_GREY || jpeg->colours == COLOURS_RGB || jpeg->colours == COLOURS_YCC;
    if (!has_colours || jpeg->precision != 8 || jpeg->components != header.components ||
        jpeg->height != (unsigned)header.height || jpeg->width != (unsigned)header.width)
        return 0;
    jpeg->out_colours = COLOURS_RGB;
    jpeg->scale_num = (unsigned)eighths;
    jpeg->scale_denom = 8;
    library.start(jpeg);
    s.height = (int32_t)jpeg->out_height;
    s.width = (int32_t)jpeg->out_width;
    if (s.height != (header.height * eighths + 7) / 8 || s.width != (header.width * eighths + 7) / 8) return 0;

    const int has_scans = library.has_scans(jpeg), is_cropped = header.is_plain && !has_scans;
    const int is_whole = box[0] == 0 && box[1] == 0 && box[2] == (float)header.width && box[3] == (float)header.height;
    uint8_t *const out = (uint8_t *)(uintptr_t)batch->row[i];
    this->read = this->decoded = 0;
    if (is_whole && !batch->planar && !batch->normal && !batch->flip[i] && s.height == target[0] && s.width == target[1]) {
        read_whole(this, out); /* straight into the batch */
        this->decoded = s.height;
        return 1;
    }

    float scaled[4];
    for (int k = 0; k < 4; k++) /* of an image whose sides do not change, the box does not either */
        scaled[k] = s.height == header.height && s.width == header.width ? box[k] : box[k] * ((float)eighths / 8);
    this->row_bytes = PADDED(3 * (int64_t)s.width);
    if (!prepare(&this->scratch, &s, scaled)) return -1;
    const int64_t strip_size = KEPT * this->row_bytes + read_past(&this->scratch.across, 3);
    if (strip_size > this->strip_size) {
        free(this->strip);
        this->strip_size = 0;
        if (!(this->strip = malloc((size_t)strip_size))) return -1;
        this->strip_size = strip_size;
    }
    this->left_bytes = 0;
    if (is_cropped) {
        const Axis *across = &this->scratch.across;
        int32_t left = across->first[0] - MARGIN;
        int32_t right = across->first[s.out_width - 1] + across->count[s.out_width - 1] + MARGIN;
        if (right < left + NARROWEST) right = left + NARROWEST;
        if (right > s.width) right = s.width;
        if (left > right - NARROWEST) left = right - NARROWEST;
        if (left < 0) left = 0;
        unsigned column = (unsigned)left, width = (unsigned)(right - left);
        library.crop(jpeg, &column, &width);
        this->left_bytes = 3 * (int64_t)column;
        const int32_t first = this->scratch.down.first[0];
        if (first) this->read = (int32_t)library.skip(jpeg, (unsigned)first);
    }
    resize_one((char *)out, decoded_row, this, &s, &this->scratch, batch->flip[i]);
    if (!has_scans) read_rest(this, is_cropped); /* of several scans, all bits have been read */
    return 1;
}

static void decode_all(void *argument) {
    Batch *batch = argument;
    Decoder *this = batch->decoder;
    for (volatile int64_t i = 0; i < batch->count && batch->has_memory; i++) {
        if (!batch->decoded[i]) continue;
        batch->decoded[i] = 0;
        if (!_setjmp(this->failed)) {
            const int done = decode_one(batch, i);
            if (done < 0) batch->has_memory = 0;
            else if (done) batch->decoded[i] = this->decoded;
        }
        close_decoder(this);
    }
}

static pthread_key_t of_thread;

static void free_decoder(void *decoder) {
    Decoder *this = decoder;
    free(this->scratch.memory);
    free(this->strip);
    free(this);
}

/* Return the decoder of this thread; NULL with an exception set if there is no memory. */
static Decoder *find_decoder(void) {
    Decoder *this = pthread_getspecific(of_thread);
    if (!this && (this = calloc(1, sizeof *this)) && pthread_setspecific(of_thread, this)) {
        free(this);
        this = NULL;
    }
    if (!this) PyErr_NoMemory();
    return this;
}

/* Release the memory that one image has taken, unless it is what most need. */
static void shrink_decoder(Decoder *this) {
    if (this->strip_size + this->scratch.size <= LARGEST) return;
    free(this->scratch.memory);
    free(this->strip);
    memset(&this->scratch, 0, sizeof this->scratch);
    this->strip = NULL;
    this->strip_size = 0;
}

static const Guard *guard;

static PyObject *decode(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer decoded, rows, addresses, sizes, boxes, flips, targets, normal = {0};
    int planar;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*y*y*pz*:decode", &decoded, &rows, &addresses, &sizes, &boxes, &flips, &targets,
                          &planar, &normal))
        return NULL;
    const int64_t count = decoded.len / 4;
    const int fit = rows.len == 8 * count && addresses.len == 8 * count && sizes.len == 8 * count &&
                    boxes.len == 16 * count && flips.len == count && targets.len == 8 * count &&
                    (!normal.buf || normal.len == 24);
    Decoder *decoder = fit ? find_decoder() : NULL;
    Batch batch = {.decoder = decoder, .count = count, .decoded = decoded.buf, .row = rows.buf, .address = addresses.buf,
                   .size = sizes.buf, .box = boxes.buf, .flip = flips.buf, .target = targets.buf, .planar = planar,
                   .normal = normal.buf, .has_memory = 1};
    int failure = 0;
    if (!version) memset(decoded.buf, 0, (size_t)decoded.len);
    else if (decoder) {
        Py_BEGIN_ALLOW_THREADS
        failure = guard->run(decode_all, &batch);
        close_decoder(decoder);
        shrink_decoder(decoder);
        Py_END_ALLOW_THREADS
    }
    Py_buffer *const held[] = {&decoded, &rows, &addresses, &sizes, &boxes, &flips, &targets, &normal};
    for (int i = 0; i < 8; i++)
        if (held[i]->obj) PyBuffer_Release(held[i]);
    if (!fit) return PyErr_SetString(PyExc_ValueError, "the arrays do not fit together"), NULL;
    if (!decoder) return NULL;
    if (!batch.has_memory) return PyErr_NoMemory();
    if (failure) return PyErr_SetString(PyExc_OSError, SHRUNK), NULL;
    Py_RETURN_NONE;
}

/* The payloads whose headers are read. */
typedef struct {
    int32_t *found;
    const uint64_t *address;
    const int64_t *size;
    int64_t count;
    int finds_exif;
} Headers;

/* Return whether EXIF data may be in a file. (memmem takes longer for so short a word.) */
static int may_have_exif(const uint8_t *data, int64_t size) {
    const uint8_t *const end = data + (size < EXIF_WITHIN ? size : EXIF_WITHIN) - 3;
    for (; data < end && (data = memchr(data, 'E', (size_t)(end - data))); data++)
        if (!memcmp(data, "Exif", 4)) return 1;
    return 0;
}

static void read_headers(void *argument) {
    const Headers *this = argument;
    for (int64_t i = 0; i < this->count; i++) {
        const uint8_t *data = (const uint8_t *)(uintptr_t)this->address[i];
        const int64_t size = this->size[i];
        const Header header = read_header(data, size);
        int32_t *found = this->found + 3 * i;
        found[0] = header.height;
        found[1] = header.width;
        found[2] = this->finds_exif && header.height && may_have_exif(data, size);
    }
}

static PyObject *headers(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer found, addresses, sizes;
    int finds_exif;
    if (!PyArg_ParseTuple(args, "w*y*y*p:headers", &found, &addresses, &sizes, &finds_exif)) return NULL;
    const int64_t count = addresses.len / 8;
    const int fit = sizes.len == 8 * count && found.len == 12 * count;
    Headers these = {found.buf, addresses.buf, sizes.buf, count, finds_exif};
    int failure = 0;
    if (!version) memset(found.buf, 0, (size_t)found.len);
    else if (fit) {
        Py_BEGIN_ALLOW_THREADS
        failure = guard->run(read_headers, &these);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&found);
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&sizes);
    if (!fit) return PyErr_SetString(PyExc_ValueError, "the arrays do not fit together"), NULL;
    if (failure) return PyErr_SetString(PyExc_OSError, SHRUNK), NULL;
    Py_RETURN_NONE;
}

static const struct {
    const char *mode; /* Pillow's name */
    int colours;
} modes[] = {{"L", COLOURS_GREY}, {"RGB", COLOURS_RGB},   {"YCbCr", COLOURS_YCC},
             {"CMYK", COLOURS_CMYK}, {"YCCK", COLOURS_YCCK}, {"RGBA", COLOURS_RGBA}};

/* One image, and where it goes; NULL if only its header is read. */
typedef struct {
    Decoder *decoder;
    const uint8_t *data;
    size_t size;
    uint8_t *out;
    Py_ssize_t out_size;
    int colours, eighths, height, width;
} Whole;

/* Decode an image, or read its header, and return 1; or 0 with the reason in the decoder's message. */
static int decode_whole(Whole *this) {
    Decoder *decoder = this->decoder;
    Decompress *jpeg = &decoder->jpeg;
    if (_setjmp(decoder->failed)) return 0;
    open_decoder(decoder, this->data, this->size);
    if (!this->out) {
        this->height = (int)jpeg->height;
        this->width = (int)jpeg->width;
        this->colours = jpeg->colours;
        return 1;
    }
    jpeg->out_colours = this->colours;
    jpeg->scale_num = (unsigned)this->eighths;
    jpeg->scale_denom = 8;
    library.start(jpeg);
    const Py_ssize_t row_bytes = (Py_ssize_t)jpeg->out_width * jpeg->out_elements;
    if (jpeg->precision != 8 || this->out_size != row_bytes * (Py_ssize_t)jpeg->out_height) {
        strcpy(decoder->message, "the pixels do not fit into the array");
        return 0;
    }
    read_whole(decoder, this->out);
    return 1;
}

/* Run decode_whole without the GIL; return 0 with an exception set if it fails. */
static int run_whole(Whole *this) {
    int is_decoded = 0;
    if (!version) return PyErr_SetString(PyExc_ValueError, "no library is open"), 0;
    if (!(this->decoder = find_decoder())) return 0;
    Py_BEGIN_ALLOW_THREADS
    is_decoded = decode_whole(this);
    close_decoder(this->decoder);
    Py_END_ALLOW_THREADS
    if (!is_decoded) PyErr_SetString(PyExc_ValueError, this->decoder->message);
    return is_decoded;
}

static PyObject *header(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "y*:header", &data)) return NULL;
    Whole this = {.data = data.buf, .size = (size_t)data.len};
    const int is_read = run_whole(&this);
    PyBuffer_Release(&data);
    if (!is_read) return NULL;
    const char *mode = "";
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (modes[i].colours == this.colours) mode = modes[i].mode;
    return Py_BuildValue("iis", this.height, this.width, mode);
}

static PyObject *whole(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer out, data;
    const char *mode;
    int eighths, colours = 0;
    if (!PyArg_ParseTuple(args, "w*y*si:whole", &out, &data, &mode, &eighths)) return NULL;
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (!strcmp(modes[i].mode, mode)) colours = modes[i].colours;
    Whole this = {.data = data.buf, .size = (size_t)data.len, .out = out.buf, .out_size = out.len, .colours = colours,
                  .eighths = eighths};
    const int is_decoded = run_whole(&this);
    PyBuffer_Release(&out);
    PyBuffer_Release(&data);
    if (!is_decoded) return NULL;
    Py_RETURN_NONE;
}

/* Find the functions of a library, and the version of its interface, which is not checked before its first use. */
static int find_functions(void *handle) {
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *function = dlsym(handle, symbols[i].name);
        if (!function) return 0;
        memcpy(symbols[i].function, &function, sizeof function);
    }
    Decoder *this = calloc(1, sizeof *this);
    for (volatile size_t i = 0; this && !version && i < sizeof interfaces / sizeof *interfaces; i++) {
        this->jpeg.errors = library.std_error(&this->errors);
        this->errors.error_exit = fail;
        this->jpeg.client = this;
        if (_setjmp(this->failed)) continue;
        library.create(&this->jpeg, interfaces[i].version, interfaces[i].size);
        library.destroy(&this->jpeg);
        structure_size = interfaces[i].size;
        version = interfaces[i].version;
    }
    free(this);
    return version;
}

static PyObject *open_library(PyObject *self, PyObject *name) {
    (void)self;
    PyObject *path = NULL;
    if (!version) {
        if (!PyUnicode_FSConverter(name, &path)) return NULL;
        void *handle = dlopen(PyBytes_AsString(path), RTLD_NOW | RTLD_LOCAL);
        Py_DECREF(path);
        if (handle && !find_functions(handle)) dlclose(handle);
    }
    Dl_info place;
    void *function;
    memcpy(&function, &library.create, sizeof function);
    if (!version || !dladdr(function, &place) || !place.dli_fname) Py_RETURN_NONE;
    return PyUnicode_DecodeFSDefault(place.dli_fname);
}

static PyMethodDef methods[] = {
    {"open_library", open_library, METH_O, "open_library(name); see tarshards.kernels._jpeg_py"},
    {"headers", headers, METH_VARARGS, "headers(found, addresses, sizes, finds_exif); see tarshards.kernels._jpeg_py"},
    {"decode", decode, METH_VARARGS,
     "decode(decoded, rows, addresses, sizes, boxes, flips, targets, planar, normal); see tarshards.kernels._jpeg_py"},
    {"header", header, METH_VARARGS, "header(data); see tarshards.kernels._jpeg_py"},
    {"whole", whole, METH_VARARGS, "whole(out, data, mode, eighths); see tarshards.kernels._jpeg_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_jpeg", "JPEGs of a batch.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jpeg(void) {
    if (!(guard = import_guard())) return NULL;
    if (pthread_key_create(&of_thread, free_decoder)) return PyErr_NoMemory();
#ifdef AVX2
    has_avx2 = find_avx2();
#endif
    return PyModule_Create(&module);
}
