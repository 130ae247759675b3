/* Resize a batch of images without the GIL: the native twin of _pixels_py.py, which documents the function.
 *
 * Addresses are trusted: tarshards.samples.payloads.Payloads has checked that they lie within buffers that it holds.
 */
#include <Python.h>
#include <stdint.h>

#include "_guard.h"
#include "_resize.h"

#define AHEAD 4096 /* bytes of the next image that are prefetched */

/* Prefetch the next image; the processor itself prefetches the rest of a larger one. */
static void prefetch_image(uint64_t address, const Shapes *s) {
    const int64_t bytes = (int64_t)s->height * s->width * s->channels;
    for (int64_t at = 0; at < bytes && at < AHEAD; at += 64) __builtin_prefetch((const char *)(uintptr_t)address + at);
}

/* The pixels of an image that lie in memory, row after row. */
typedef struct {
    const uint8_t *pixels;
    int32_t height;
    int64_t row_bytes, past; /* bytes of a row, and those that are read past its end */
    uint8_t *ends[2];        /* memory for its last rows, with these bytes */
} Pixels;

static const uint8_t *row_in_memory(void *source, int32_t row) {
    const Pixels *this = source;
    const uint8_t *pixels = this->pixels + row * this->row_bytes;
    if ((this->height - row - 1) * this->row_bytes >= this->past) return pixels;
    return memcpy(this->ends[row % 2], pixels, (size_t)this->row_bytes);
}

/* The images that are resized at once. */
typedef struct {
    const Shapes *shapes;
    const uint64_t *address;
    const float *box;
    const char *flip;
    char *out;
    int64_t count, size; /* the number of images, and the size of an output image in bytes */
    Scratch scratch;
    uint8_t *ends; /* memory for two rows and what is read past their ends, and the size of one */
    int64_t end_size;
    int has_memory;
} Resizing;

static const Guard *guard;

static void resize_all(void *argument) {
    Resizing *this = argument;
    const Shapes *s = this->shapes;
    Pixels source = {NULL, s->height, (int64_t)s->width * s->channels, 0, {this->ends, this->ends + this->end_size}};
    for (int64_t i = 0; i < this->count && (this->has_memory = prepare(&this->scratch, s, this->box + 4 * i)); i++) {
        if (i + 1 < this->count) prefetch_image(this->address[i + 1], s);
        source.past = read_past(&this->scratch.across, s->channels);
        source.pixels = (const uint8_t *)(uintptr_t)this->address[i];
        resize_one(this->out + i * this->size, row_in_memory, &source, s, &this->scratch, this->flip[i]);
    }
}

static PyObject *resize(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer out, addresses, boxes, flips, normal = {0};
    Shapes s = {0};
    const char *problem = NULL;
    if (!PyArg_ParseTuple(args, "w*y*(iii)y*y*(ii)pz*:resize", &out, &addresses, &s.height, &s.width, &s.channels,
                          &boxes, &flips, &s.out_height, &s.out_width, &s.planar, &normal))
        return NULL;
    const int64_t count = addresses.len / 8;
    const float *box = boxes.buf;
    const int64_t size = (int64_t)s.out_height * s.out_width * s.channels * (normal.buf ? 4 : 1);
    if (!shapes_are_right(&s)) problem = "sides must be from 1 to 2**24, channels 1, 3 or 4";
    else if (normal.buf && normal.len != 8 * s.channels) problem = "there must be a divisor and an offset for each channel";
    else if (boxes.len != 16 * count || flips.len != count ||
             (count ? out.len % count || out.len / count != size : out.len))
        problem = "out, addresses, boxes and flips do not fit together";
    for (int64_t i = 0; !problem && i < count; i++)
        if (!box_is_right(box + 4 * i, &s)) problem = "a box does not lie in its image";
    if (normal.buf) {
        s.divisors = normal.buf;
        s.offsets = s.divisors + s.channels;
    }
    Resizing all = {.shapes = &s, .address = addresses.buf, .box = box, .flip = flips.buf, .out = out.buf,
                    .count = count, .size = size};
    int failure = 0;
    if (!problem) all.end_size = ((int64_t)s.width + most_taps(0, (float)s.width, s.out_width)) * s.channels + 8;
    all.has_memory = problem || (all.ends = calloc(2, (size_t)all.end_size));
    if (!problem && all.has_memory) {
        Py_BEGIN_ALLOW_THREADS
        failure = guard->run(resize_all, &all);
        Py_END_ALLOW_THREADS
    }
    free(all.scratch.memory);
    free(all.ends);
    Py_buffer *const held[] = {&out, &addresses, &boxes, &flips, &normal};
    for (int i = 0; i < 5; i++)
        if (held[i]->obj) PyBuffer_Release(held[i]);
    if (!all.has_memory) return PyErr_NoMemory();
    if (failure) return PyErr_SetString(PyExc_OSError, SHRUNK), NULL;
    if (problem) return PyErr_SetString(PyExc_ValueError, problem), NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"resize", resize, METH_VARARGS,
     "resize(out, addresses, shape, boxes, flips, size, planar, normal); see tarshards.kernels._pixels_py"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pixels", "Images of a batch.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pixels(void) {
    if (!(guard = import_guard())) return NULL;
#ifdef AVX2
    has_avx2 = find_avx2();
#endif
    return PyModule_Create(&module);
}
