"""Names that programs import from webdataset's modules: they are there, or the error says what to use."""

from __future__ import annotations

import io
import re
import sys
import tarfile
import weakref
from contextlib import suppress
from importlib import import_module

import numpy as np
import pytest
import torch
from PIL import Image

import tarshards.webdataset as wds
from tarshards import EncodeError, TarWriter
from tarshards.stream.other_names import ABSENT
from tarshards.webdataset import autodecode

#: The names that public programs import, by module.
IMPORTED = {
    "autodecode": "Continue Decoder DecodingError ImageHandler decoders npy_loads torch_audio torch_loads",
    "cache": "FileCache LRUCleanup StreamingOpen cached_tarfile_to_samples cached_url_opener pipe_cleaner",
    "compat": "FluidInterface WebDataset WebLoader check_empty",
    "extradatasets": "MockDataset with_epoch with_length",
    "filters": "RestCurried _shuffle default_collation_fn getfirst identity pipelinefilter reraise_exception unlisted",
    "gopen": "Pipe gopen gopen_pipe gopen_schemes rewrite_url",
    "handlers": "ignore_and_continue ignore_and_stop reraise_exception warn_and_continue warn_and_stop",
    "mix": "RandomMix RoundRobin random_samples round_robin_longest round_robin_shortest",
    "pipeline": "DataPipeline",
    "pytorch": "DataLoader IterableDataset",
    "shardlists": "ResampledShards SimpleShardList expand_source expand_urls split_by_node split_by_worker",
    "tariterators": (
        "base_plus_ext group_by_keys meta_prefix meta_suffix tar_file_expander tar_file_iterator tarfile_samples "
        "url_opener valid_sample"
    ),
    "tenbin": "decode_buffer encode_buffer",
    "utils": "PipelineStage identity make_seed pytorch_worker_info pytorch_worker_seed repeatedly",
    "writer": (
        "ShardWriter TarWriter add_handlers default_handlers gopen imageencoder make_encoder numpy_dumps "
        "numpy_npz_dumps"
    ),
}


@pytest.mark.parametrize("module", IMPORTED)
def test_programs_import(module):
    exec(f"from tarshards.webdataset.{module} import {', '.join(IMPORTED[module].split())}", {})


@pytest.mark.parametrize("name", ABSENT)
def test_other_names_say_what_to_use(name):
    with pytest.raises(ImportError, match=f"^tarshards.webdataset has no {name}: ") as caught:
        exec(f"from tarshards.webdataset.handlers import {name}", {})
    assert str(caught.value).endswith(ABSENT[name])
    assert name in ("info", "pipeline") or name not in dir(wds)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from tarshards.webdataset import multi", "multi"),
        ("import tarshards.webdataset.multi", "multi"),
        ("from tarshards.webdataset.iterators import getfirst", "iterators"),
        ("from tarshards.webdataset import ShardList", "ShardList"),
        ("import tarshards.webdataset as wds; wds.ShardList", "ShardList"),
        ("from tarshards.webdataset.gopen import gopen_curl", "gopen_curl"),
    ],
)
def test_other_modules_say_it_too(code, name):
    with pytest.raises(ImportError, match=f"^tarshards.webdataset has no {name}: {re.escape(ABSENT[name])}$"):
        exec(code, {})


def test_the_function_gopen_also_serves_as_the_module_that_it_was():
    assert wds.gopen.gopen is wds.gopen
    assert wds.gopen.gopen_schemes is wds.gopen_schemes


def test_names_of_no_version_are_plain_errors():
    assert not hasattr(wds, "nonsense")
    assert not hasattr(wds.writer, "nonsense")
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec("from tarshards.webdataset.cache import nonsense", {})


@pytest.mark.interop
def test_all_functions_and_classes_of_webdataset_are_known():
    theirs = pytest.importorskip("webdataset")
    assert wds.__version__ == theirs.__version__
    for path, module in [*sys.modules.items()]:
        package, _, last = path.partition(".")
        if package != "webdataset" or not last:
            continue
        ours = sys.modules.get(f"tarshards.{path}", wds)
        assert ours is not wds or last in ABSENT, f"the module {last}"
        for name, value in vars(module).items():
            if name[:1] != "_" and getattr(value, "__module__", None) == path:
                assert name in ABSENT or hasattr(ours, name) or hasattr(wds, name), f"{last}.{name}"


def archive(*names: str) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    return io.BytesIO(stream.getvalue())


def module_of(package, name):
    return import_module(f"{package.__name__}.{name}")


MEMBERS = ("__meta__", "__meta__/a.json", "a.jpg", "a.cls", "README", "d/__x__/b.cls", "__y.cls", "d/b.cls", "c.cls")


def members(m, **options):
    files = module_of(m, "tariterators").tar_file_iterator(archive(*MEMBERS), **options)
    return [(file["fname"], file["data"]) for file in files]


def expanded(m, **options):
    files = m.tariterators.tar_file_expander([{"url": "x.tar", "stream": archive(*MEMBERS)}], **options)
    return [(file["fname"], file["data"]) for file in files if file]


def piped(m, *command, **options):
    with module_of(m, "gopen").Pipe(*command, mode="r", **options) as pipe:
        return [pipe.read(3), pipe.read()]


def saved_arrays(m):
    data = m.writer.numpy_npz_dumps({"a": np.arange(3), "b": np.ones(2)})
    return [(name, values.tolist()) for name, values in np.load(io.BytesIO(data)).items()]


def encoded(m, value, **options):
    image = Image.open(io.BytesIO(m.writer.imageencoder(value, **options)))
    return [image.format, image.mode, image.size]


def with_handlers(m, keys):
    handlers = {"a": 1}
    m.writer.add_handlers(handlers, keys, 2)
    return handlers


def decoded_by_own(m):
    decoders = m.autodecode.decoders
    before = decoders["cls"]
    decoders["cls"] = lambda data: data[::-1]
    try:
        samples = [{"cls": b"12", "a.cls": b"34", "txt": b"t"}]
        return [dict(sample) for sample in m.decode()(iter(samples))] + [m.autodecode.basichandlers("cls", b"56")]
    finally:
        decoders["cls"] = before


def opened_by_own(m):
    schemes = module_of(m, "gopen").gopen_schemes
    before = schemes["__default__"]
    schemes["__default__"] = lambda url, mode, bufsize, **options: (url, mode, options)
    try:
        return [m.gopen("odd://x.tar", "rb", timeout=3), schemes.get("odd", before) is before]
    finally:
        schemes["__default__"] = before


def named(kind, *args, **options):
    """Return a function of webdataset's module that is called with arguments."""
    module, _, name = kind.partition(".")
    return lambda m: [getattr(module_of(m, module), name)(*args, **options)]


PIXELS = np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8)


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "function",
    [
        members,
        expanded,
        *[
            (lambda m, options=options: members(m, **options))
            for options in ({"skip_meta": None}, {"select_files": lambda name: "cls" in name})
        ],
        lambda m: members(m, rename_files=str.upper, select_files=str.isupper),
        lambda m: members(m, select_files=lambda name: 1 / 0, handler=m.ignore_and_stop),
        *[
            (lambda m, name=name, sizes=sizes: module_of(m, "mix").__dict__[name](*map(iter, map(range, sizes))))
            for name in ("round_robin_shortest", "round_robin_longest")
            for sizes in ((2, 5, 3), (4, 4), (0, 2), (3,))
        ],
        lambda m: sorted(m.mix.random_samples([iter(range(3)), iter(range(5))], [1, 9], longest=True)),
        lambda m: m.mix.random_samples([iter(range(3)), iter("ab")], [1, 0]),
        lambda m: m.RandomMix([range(3)]),
        lambda m: m.RoundRobin([range(3), "ab"], longest=True),
        *[(lambda m, f=f: encoded(m, PIXELS, format=f)) for f in ("PNG", "JPG", "jpeg", "ppm", "IMG", "tiff")],
        lambda m: encoded(m, PIXELS),
        lambda m: encoded(m, PIXELS[:, :, 0] / 300),
        lambda m: encoded(m, Image.fromarray(PIXELS)),
        lambda m: encoded(m, PIXELS / 100),
        lambda m: encoded(m, "text"),
        saved_arrays,
        *[(lambda m, keys=keys: with_handlers(m, keys)) for keys in ("b c", ["a", "b c"], "")],
        decoded_by_own,
        opened_by_own,
        *[named("utils.make_seed", *args) for args in ((), (1,), (1, 2, 3), (2**70, -5), (1.5, True))],
        named("utils.identity", 5),
        named("autodecode.npy_loads", b"junk"),
        lambda m: [getattr(module_of(m, "tariterators"), name) for name in ("meta_prefix", "meta_suffix")],
        lambda m: piped(m, "echo hello", shell=True),
        lambda m: piped(m, ["printf", "a b\\n%s", "$x"]),
        lambda m: piped(m, "echo hello; exit 7", shell=True),
        lambda m: piped(m, "echo hello; exit 7", shell=True, ignore_status=[141, 7]),
        lambda m: piped(m, "echo hello; exit 7", shell=True, ignore_status=[141, 8]),
        lambda m: piped(m, "echo hello; exit 7", shell=True, ignore_errors=True),
        lambda m: [module_of(m, "gopen").gopen_pipe("pipe: echo hello").read()],
        lambda m: module_of(m, "compat").check_empty([1, 2]),
        lambda m: module_of(m, "compat").check_empty([]),
        lambda m: m.filters.RestCurried(lambda samples, n: (each * n for each in samples))(3)([1, 2]),
    ],
)
def test_functions_return_the_same(function):
    theirs = pytest.importorskip("webdataset")
    results = []
    for module in (theirs, wds):
        try:
            results.append(list(function(module)))
        except Exception:
            results.append("an error")
    assert results[0] == results[1]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_archives_end_with_the_value_that_was_asked_for(count):
    shards = [{"url": f"{i}.tar", "stream": archive("a.cls")} for i in range(count)]
    found = [*wds.tariterators.tar_file_expander(shards, eof_value={})]
    assert [bool(file) for file in found] == [True, False] * count


def test_a_damaged_archive_goes_to_the_handler():
    half = archive("a.cls", "b.cls", "c.cls").getvalue()[:2100]
    with pytest.raises(tarfile.ReadError, match="stream: offset 2048"):
        list(wds.tariterators.tar_file_iterator(io.BytesIO(half)))
    found = wds.tariterators.tar_file_iterator(io.BytesIO(half), handler=wds.ignore_and_continue)
    assert [file["fname"] for file in found] == ["a.cls"]


def test_loads_are_those_of_our_codecs():
    data = wds.numpy_dumps(np.arange(3))
    assert autodecode.npy_loads(data).tolist() == [0, 1, 2]
    assert autodecode.msgpack_loads(b"\x01") == 1
    assert autodecode.tenbin_loads(wds.tenbin.encode_buffer([np.ones(2)]))[0].tolist() == [1, 1]


def test_seeds_of_texts_are_the_same_in_every_process():
    assert wds.make_seed("train", 7) == 699874376


class TestCached:
    @pytest.fixture
    def url(self, tmp_path):
        with TarWriter(tmp_path / "a.tar", sync=False) as writer:
            for number in range(3):
                writer.write({"__key__": str(number), "cls": number})
        return f"file:{tmp_path}/a.tar"

    @pytest.mark.parametrize("options", [{}, {"cache_size": 1 << 30, "verbose": True, "always": True}])
    def test_stages_read_as_without(self, url, tmp_path, options):
        folder = {"cache_dir": tmp_path / "cache"} if options else {}
        stages = [wds.cached_tarfile_to_samples(**options, **folder), wds.tarfile_to_samples()]
        samples = [list(wds.DataPipeline(wds.SimpleShardList([url]), stage, wds.decode())) for stage in stages]
        assert [sample["cls"] for sample in samples[0]] == [0, 1, 2]
        assert samples[0] == samples[1]
        files = wds.tar_file_expander(wds.cached_url_opener([{"url": url}], **options, **folder))
        assert [sample["cls"] for sample in wds.group_by_keys(files)] == [b"0", b"1", b"2"]
        assert list(wds.cached_tarfile_samples([{"url": url}])) == list(wds.tarfile_samples([{"url": url}]))

    def test_unknown_options_are_errors(self, url):
        with pytest.raises(TypeError, match="chache_dir"):
            wds.cached_url_opener([{"url": url}], chache_dir="x")
        with pytest.raises(TypeError, match="chache_dir"):
            wds.cached_tarfile_to_samples(chache_dir="x")


def test_imageencoder_of_a_tensor_is_an_error():
    with pytest.raises(TypeError, match="PIL image or a numpy array"):
        wds.imageencoder(torch.zeros(2, 2))


def test_an_error_of_an_encoder_keeps_no_writer_alive(tmp_path):
    writers = []

    def write():
        writer = wds.TarWriter(str(tmp_path / "a.tar"))
        writers.append(weakref.ref(writer))
        writer.write({"__key__": "k", "xyz": 5})

    with pytest.warns(RuntimeWarning, match="not closed"), suppress(EncodeError):
        write()
    assert writers[0]() is None
