"""Every stage and handler of ``tarshards.webdataset``, as webdataset's documentation describes them."""

from __future__ import annotations

import importlib
import io
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import tarshards.webdataset as wds
from tarshards.errors import OpError
from tarshards.samples.codecs import encode_field

SAMPLES = [{"__key__": f"{number}", "cls": number, "txt": f"text {number}"} for number in range(5)]


def run(stage, samples):
    return list(wds.DataPipeline(lambda: iter(samples), stage))


def png(height=4, width=6) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)).save(stream, "png")
    return stream.getvalue()


def double(value):
    return 2 * value


def odd(sample):
    return sample["cls"] % 2


def fail_at_two(sample):
    if sample["cls"] == 2:
        raise KeyError("two")
    return sample


A, B = {"a": 1, "b": 2}, {"a": 3, "b": 4}
K3 = {"__key__": "k", "c": 3}


def shout(stream):
    return stream.read().upper()


@pytest.mark.parametrize(
    ("stage", "samples", "expected"),
    [
        (wds.map(double), [1, 2], [2, 4]),
        (wds.map({1: None}.get), [1], []),
        (wds.map(lambda sample: {"x": sample["a"]}), [{"__key__": "k", "a": 1}], [{"x": 1, "__key__": "k"}]),
        (wds.map_dict(a=double), [A, B], [{"a": 2, "b": 2}, {"a": 6, "b": 4}]),
        (wds.map_tuple(double, None), [(1, 2), (3, 4)], [(2, 2), (6, 4)]),
        (wds.select(lambda sample: sample["a"] > 1), [A, B], [B]),
        (wds.to_tuple("b", "a"), [A, B], [(2, 1), (4, 3)]),
        (wds.to_tuple("x;b a"), [A], [(2, 1)]),
        (wds.to_tuple("x", "a", missing_is_error=False), [A], [(None, 1)]),
        (wds.rename(c="x;a"), [{"__key__": "k", **A}], [{"__key__": "k", "b": 2, "c": 1}]),
        (wds.rename(c="a", keep=False), [{"__key__": "k", **A}], [{"c": 1}]),
        (wds.rename_keys(c="*a"), [{"__key__": "k", **A}], [{"__key__": "k", "c": 1}]),
        (wds.rename_keys(("c", "a"), keep_unselected=True), [A], [{"c": 1, "b": 2}]),
        (wds.rename_keys(c="*.a", must_match=False, keep_unselected=True), [A], [A]),
        (wds.rename_keys(("c", "*"), d="b"), [A], [{"c": 1, "d": 2}]),
        (wds.rename_keys(c="*", duplicate_is_error=False), [A], [{"c": 1}]),
        (wds.rename_keys(c="*.jpg"), [{"x/Y.JPG": 1}], [{"c": 1}]),
        (wds.extract_keys("*.b", "x;a"), [A], [(2, 1)]),
        (wds.extract_keys("a", "x", ignore_missing=True), [A], [(1,)]),
        (wds.associate({"k": {"c": 3}}), [{"__key__": "k"}, {"__key__": "l"}], [K3, {"__key__": "l"}]),
        (wds.associate(lambda key: {"c": key}), [{"__key__": "k"}], [{"__key__": "k", "c": "k"}]),
        (wds.xdecode(("*.up", shout)), [{"x.up": b"a", "txt": b"b"}], [{"x.up": b"A", "txt": "b"}]),
        (wds.xdecode(must_decode=False), [{"xyz": b"a"}], [{"xyz": b"a"}]),
        (wds.xdecode(("*.up", shout), ("x.*", None), up=io.BytesIO.getvalue), [{"x.up": b"a"}], [{"x.up": b"a"}]),
        (wds.xdecode(("*.txt", False)), [{"txt": b"a", "bin": b"b"}], [{"txt": b"a", "bin": b"b"}]),
        (wds.xdecode(n=double), [{"__n": 1, "n": 2}], [{"__n": 1, "n": 4}]),
        (wds.slice(2), [1, 2, 3], [1, 2]),
        (wds.slice(1, None, 2), [1, 2, 3, 4], [2, 4]),
        (wds.rsample(0.0), [1, 2], []),
        (wds.rsample(1.0), [1, 2], [1, 2]),
        (wds.listed(2), [1, 2, 3], [[1, 2], [3]]),
        (wds.listed(2, partial=False), [1, 2, 3], [[1, 2]]),
        (wds.unlisted(), [[1, 2], [3]], [1, 2, 3]),
        (wds.batched(2, collation_fn=None), [1, 2, 3], [[1, 2], [3]]),
        (wds.batched(2, collation_fn=sum, partial=False), [1, 2, 3], [3]),
        (wds.unbatched(), [{"x": [1, 2], "y": ["a", "b"]}], [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]),
        (wds.unbatched(), [([1, 2], ["a", "b"])], [(1, "a"), (2, "b")]),
        (wds.unbatched(), [[[1, 2], ["a", "b"]]], [(1, "a"), (2, "b")]),  # which torch's DataLoader makes of a tuple
        (wds.unbatched(), [((1, 2), ("a", "b"))], [(1, "a"), (2, "b")]),
        (wds.unbatched(), [{"x": (1, 2), "y": [3, 4]}], [{"x": 1, "y": 3}, {"x": 2, "y": 4}]),
        (wds.shuffle(0), [1, 2, 3], [1, 2, 3]),
        (wds.decode(post=[]), [{"txt.gz": encode_field("txt.gz", "a")}], [{"txt.gz": b"a"}]),
        (wds.resampled(0), [1, 2], []),
        (wds.non_empty, [1], [1]),
    ],
)  # fmt: skip
def test_stages(stage, samples, expected):
    assert run(stage, samples) == expected


@pytest.mark.parametrize(
    ("stage", "sample", "error"),
    [
        (wds.map_dict(x=double), A, KeyError),
        (wds.to_tuple("x"), A, ValueError),
        (wds.to_tuple("a", none_is_error=True), {"a": None}, ValueError),
        (wds.rename(c="x"), A, ValueError),
        (wds.rename_keys(c="x"), A, ValueError),
        (wds.rename_keys(c="*"), A, ValueError),
        (wds.extract_keys("x"), A, ValueError),
        (wds.extract_keys("*"), A, ValueError),
        (wds.xdecode(), {"xyz": b"a"}, ValueError),
        (wds.unbatched(), [1, 2], ValueError),
        (wds.unbatched(), [{"x": 1}], ValueError),
        (wds.decode(), {"cls": b"seven"}, wds.DecodingError),
        (wds.decode("rgb"), {"png": b"no image"}, wds.DecodingError),
        (wds.map(fail_at_two), {"cls": 2}, KeyError),
    ],
)
def test_errors_are_raised_as_they_are_and_can_be_handled(stage, sample, error):
    with pytest.raises(error):
        run(stage, [sample])
    told = []
    stage.kw["handler"] = lambda exn: told.append(exn) or True
    assert run(stage, [sample, sample]) == []
    assert [type(exn) for exn in told] == [type(told[0])] * 2
    assert isinstance(told[0], error)
    assert not isinstance(told[0], OpError)


@pytest.mark.parametrize(
    ("handler", "expected", "warned"),
    [
        (wds.ignore_and_continue, [0, 1, 3, 4], 0),
        (wds.warn_and_continue, [0, 1, 3, 4], 1),
        (wds.ignore_and_stop, [0, 1], 0),
        (wds.warn_and_stop, [0, 1], 1),
    ],
)
def test_handlers(handler, expected, warned):
    """True continues without the sample, False ends the stream; earlier samples are delivered in both cases."""
    for stages in (
        [wds.map(fail_at_two, handler=handler)],
        [wds.select(lambda sample: fail_at_two(sample) or True, handler=handler)],
        [wds.map(fail_at_two, handler=handler), wds.listed(3), wds.unlisted()],
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [sample["cls"] for sample in wds.DataPipeline(lambda: iter(SAMPLES), *stages)] == expected
        assert len(caught) == warned
    for raising in (wds.reraise_exception, None):
        with pytest.raises(KeyError, match="two"):
            run(wds.map(fail_at_two, handler=raising), SAMPLES)


def test_decode_by_extension_and_imagespec():
    sample = {"__key__": "k", "cls": b"7", "txt.gz": b"", "json": b"[1]", "seg.png": png(), "xyz": b"raw", "n": 3}
    sample["txt.gz"] = encode_field("txt.gz", "zipped")
    (plain,) = run(wds.decode(), [sample])
    assert plain == {**sample, "cls": 7, "txt.gz": "zipped", "json": [1]}
    for spec, kind, dtype, shape in [
        ("rgb8", np.ndarray, np.uint8, (4, 6, 3)),
        ("l", np.ndarray, np.float32, (4, 6)),
        ("torchrgb", torch.Tensor, torch.float32, (3, 4, 6)),
        ("torchl8", torch.Tensor, torch.uint8, (4, 6)),
    ]:
        (decoded,) = run(wds.decode(spec), [sample])
        image = decoded["seg.png"]
        assert (type(image), image.dtype, tuple(image.shape)) == (kind, dtype, shape)
    for spec, mode in [("pil", "RGB"), ("pill", "L"), ("PILRGBA", "RGBA")]:
        assert run(wds.decode(spec), [sample])[0]["seg.png"].mode == mode
    with pytest.raises(ValueError, match="unknown imagespec 'rbg'"):
        run(wds.decode("rbg"), [sample])


def test_decode_by_functions():
    sample = {"__key__": "k", "a.jpg": b"1", "b.jpg": b"2", "cls": b"3"}
    by_extension = wds.decode(wds.handle_extension("a.jpg png", len))
    assert run(by_extension, [sample]) == [{**sample, "a.jpg": 1, "cls": 3}]
    assert run(wds.decode(lambda key, data: key), [sample]) == [
        {"__key__": "k", "a.jpg": ".a.jpg", "b.jpg": ".b.jpg", "cls": ".cls"}
    ]
    assert run(wds.decode(only="cls"), [sample]) == [{**sample, "cls": 3}]
    assert run(wds.decode(len_of, only=["a.jpg"]), [sample]) == [{**sample, "a.jpg": 1}]
    beside = {"__key__": "k", "jpg": png(), "seg.jpg": png()}
    assert run(wds.decode("pil", only="jpg"), [beside])[0]["seg.jpg"] == png()
    assert run(wds.decode(pre=[lambda key, data: wds.Continue(".txt", data)]), [sample])[0]["cls"] == "3"
    assert run(wds.decode(post=[]), [sample]) == [sample]


def len_of(key, data):
    return len(data)


def test_decode_runs_no_code_from_the_data_unless_the_script_says_so(monkeypatch):
    sample = {"__key__": "k", "pyd": pickle.dumps({1: 2})}
    with pytest.raises(wds.DecodingError, match=r"k\.pyd: pyd can run code .* allow_unsafe=True"):
        run(wds.decode(), [sample])
    assert run(wds.decode(allow_unsafe=True), [sample])[0]["pyd"] == {1: 2}
    monkeypatch.setattr(wds.utils, "enforce_security", True)
    with pytest.raises(wds.DecodingError, match="can run code"):
        run(wds.decode(allow_unsafe=True), [sample])
    assert run(wds.decode(wds.handle_extension("pyd", pickle.loads)), [sample])[0]["pyd"] == {1: 2}


def test_shuffling_differs_between_epochs_and_not_between_runs():
    pipelines = [wds.DataPipeline(range(200), wds.shuffle(50, initial=20)) for _ in range(2)]
    epochs = [[list(pipeline) for _ in range(2)] for pipeline in pipelines]
    assert epochs[0] == epochs[1]
    assert epochs[0][0] != epochs[0][1]
    assert sorted(epochs[0][0]) == list(range(200))
    assert list(wds.DataPipeline(range(200), wds.shuffle(50, seed=1))) != epochs[0][0]
    with_rng = wds.DataPipeline(range(200), wds.shuffle(50, rng=random.Random(3)))
    assert list(with_rng) == list(wds.filters._shuffle(range(200), 50, 100, random.Random(3)))


def test_detshuffle_depends_on_seed_and_epoch():
    orders = [list(wds.detshuffle(50, seed=2, epoch=epoch).run(range(99))) for epoch in (-1, -1, 0)]
    assert orders[0] == orders[1] != orders[2]
    stage = wds.detshuffle(50, seed=2)
    assert list(stage.run(range(99))) == orders[0]
    assert list(stage.run(range(99))) == orders[2]
    assert stage.epoch == 1


def test_batches_are_what_webdataset_makes_of_samples():
    fields = [{"x": n, "y": 0.5, "z": np.full(3, n), "t": torch.ones(2), "j": [n]} for n in range(3)]
    samples = [{"__key__": f"{n}", **each} for n, each in enumerate(fields)]
    (batch,) = run(wds.batched(3), samples)
    assert (batch["__key__"], batch["j"]) == (["0", "1", "2"], [[0], [1], [2]])
    assert (batch["x"].dtype.kind, batch["y"].dtype.kind, batch["z"].shape) == ("i", "f", (3, 3))
    assert batch["t"].shape == (3, 2)
    assert isinstance(batch["t"], torch.Tensor)
    assert [sample["x"] for sample in run(wds.unbatched(), [batch])] == [0, 1, 2]
    apart = wds.filters.default_collation_fn([(1, np.ones(2))], combine_scalars=False, combine_tensors=True)
    assert apart[0] == [1]
    assert apart[1].shape == (1, 2)
    (lists,) = run(wds.batched(2), [[1, "a"], [2, "b"]])
    assert (type(lists), lists[0].tolist(), lists[1]) == (tuple, [1, 2], ["a", "b"])
    (scalars,) = run(wds.batched(2), [{"x": np.int64(1), "y": np.float64(1)}, {"x": np.int64(2), "y": np.float64(2)}])
    assert (scalars["x"], scalars["y"].tolist()) == ([1, 2], [1.0, 2.0])  # only Python's numbers become an array
    with pytest.raises(ValueError, match="made of dicts or tuples"):
        run(wds.batched(2), [1, 2])


@pytest.mark.parametrize("batch", [(1, 2), {"x": [1]}, "ab"])
def test_only_lists_are_unlisted(batch):
    with pytest.raises(ValueError, match="unlisted takes lists"):
        run(wds.unlisted(), [batch])


def test_a_stage_of_a_users_own():
    @wds.pipelinefilter
    def every(data, step, offset=0):
        return (value for number, value in enumerate(data) if number % step == offset)

    class Pairs(wds.PipelineStage):
        def run(self, src):
            return zip(src, src)

    assert run(every(2, offset=1), range(5)) == [1, 3]
    pipeline = wds.DataPipeline(lambda: iter(range(6)), [every(1), None], Pairs())
    assert list(pipeline) == list(pipeline) == [(0, 1), (2, 3), (4, 5)]
    with pytest.raises(ValueError, match="a stage is a function"):
        run("shuffle", [1])


def test_pipelines_are_lists_of_stages():
    first = wds.DataPipeline((3, 4))
    second = first.compose(wds.map(double), wds.map(double))
    assert (list(first), list(second)) == ([3, 4], [12, 16])
    assert str(second.stage(1)).startswith("<map ")
    del second.pipeline[2]
    second.append(wds.map(str))
    assert list(second) == ["6", "8"]


def test_lengths_and_epochs():
    dataset = wds.FluidWrapper([1, 2, 3])
    with pytest.raises(TypeError, match="with_length"):
        len(dataset)
    assert bool(dataset)
    assert len(dataset.with_length(7)) == 7
    assert list(dataset.with_epoch(5)) == [1, 2, 3, 1, 2]
    assert list(dataset) == [1, 2, 3, 1, 2]  # the pipeline itself, as in webdataset
    assert len(dataset) == 7
    assert list(dataset.repeat(2)) == [1, 2, 3, 1, 2, 3]
    assert list(dataset.repeat(nbatches=4)) == [1, 2, 3, 1]
    assert list(dataset.slice(2).repeat(2).map(double)) == [2, 4, 2, 4]
    assert list(dataset) == [1, 2, 3, 1]


def test_closing_a_pipeline_closes_its_stages():
    class Stage(wds.PipelineStage):
        closed = False

        def run(self, src):
            return src

        def close(self):
            self.closed = True

    stage = Stage()
    with wds.WebDataset([]).compose(stage):
        assert not stage.closed
    assert stage.closed


def test_datasets_of_one_length():
    dataset = wds.FluidWrapper([1, 2, 3])
    assert list(wds.with_epoch(dataset, 4)) == [1, 2, 3, 1]
    assert len(wds.with_length(dataset, 4)) == 4
    assert list(wds.MockDataset("x", 3)) == ["x"] * 3
    assert list(wds.repeatedly([[[1, 1]]], nsamples=5)) == [[[1, 1]]] * 3


def test_mixing():
    parts = [[1, 2], [3], [4, 5, 6]]
    assert list(wds.RoundRobin(parts)) == [1, 3, 4, 2]
    assert list(wds.RoundRobin(parts, longest=True)) == [1, 3, 4, 2, 5, 6]
    assert sorted(wds.RandomMix(parts, longest=True)) == [1, 2, 3, 4, 5, 6]
    assert set(wds.RandomMix([[1] * 50, [2] * 50], probs=[1, 0])) == {1}
    assert sorted(wds.RandomMix([[1, 1], [2, 2]], probs=[1, 0], longest=True)) == [1, 1, 2, 2]
    with pytest.raises(ValueError, match="2 weights for 3 datasets"):
        wds.RandomMix(parts, probs=[1, 1])


def test_samples_cached_in_memory_are_made_once():
    made = []
    pipeline = wds.FluidWrapper([1, 2, 3]).map(lambda value: made.append(value) or value).mcached()
    assert list(pipeline) == list(pipeline) == [1, 2, 3]
    assert made == [1, 2, 3]


def test_keys_are_logged(tmp_path, capsys):
    run(wds.log_keys(tmp_path / "keys"), [*SAMPLES[:1], {"__key__": "1", "__worker__": 3, "__rank__": 2}])
    assert (tmp_path / "keys").read_text() == "0\tNone\tNone\t0\n1\t3\t2\t1\n"
    assert run(wds.log_keys(), SAMPLES) == SAMPLES
    assert capsys.readouterr() == ("", "")


def test_samples_are_shown(capsys):
    assert run(wds.info(n=1, every=3, name="here"), SAMPLES) == SAMPLES
    assert capsys.readouterr().err == (
        "--- here\n__key__ '0'\ncls 0\ntxt 'text 0'\n--- here\n__key__ '2'\ncls 2\ntxt 'text 2'\n"
    )
    run(wds.info("{cls}!", n=2), SAMPLES)
    assert capsys.readouterr().err == "0!\n1!\n"


@pytest.mark.parametrize(
    "name", ["LMDBCached", "MultiShardSample", "FileCache", "LRUCleanup", "StreamingOpen", "torch_video", "torch_audio"]
)
def test_what_is_not_offered_says_what_to_use(name):
    with pytest.raises(NotImplementedError, match=f"no {name}: "):
        getattr(wds, name)("x")


def test_stages_can_be_pickled():
    pipeline = wds.FluidWrapper(SAMPLES).shuffle(10).map(fail_at_two, handler=wds.ignore_and_continue).batched(2)
    copy = pickle.loads(pickle.dumps(pipeline))
    assert [list(batch["cls"]) for batch in copy] == [list(batch["cls"]) for batch in pipeline]


def test_modules_have_the_names_that_projects_import_from():
    for name, member in [
        ("filters", "_shuffle"), ("tariterators", "tar_file_expander"), ("shardlists", "expand_urls"),
        ("utils", "pytorch_worker_seed"), ("handlers", "warn_and_stop"), ("autodecode", "ImageHandler"),
        ("gopen", "gopen"), ("cache", "url_to_cache_name"), ("writer", "TarWriter"), ("tenbin", "decode_buffer"),
        ("compat", "WebLoader"), ("pipeline", "DataPipeline"), ("extradatasets", "MockDataset"), ("mix", "RoundRobin"),
    ]:  # fmt: skip
        assert hasattr(importlib.import_module(f"tarshards.webdataset.{name}"), member)
        assert callable(wds.gopen) if name == "gopen" else hasattr(getattr(wds, name), member)


@pytest.mark.interop
def test_all_names_of_webdataset_are_there():
    theirs = pytest.importorskip("webdataset")
    assert {name for name in dir(theirs) if name[:1] != "_"} - {*dir(wds)} <= {"pytorch"}
