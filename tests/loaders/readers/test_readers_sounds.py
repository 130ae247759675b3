"""Sounds, read into batches of one rate, length and number of channels."""

import numpy as np
import pytest
from readers_data import whole

from tarshards import ArrayLoader, ShardWriter, Stream, readers
from tarshards.index.build import build_index
from tarshards.loaders.arrays.readers.draws import draws_of
from tarshards.samples.codecs import encode_field
from tarshards.samples.payloads import Payloads


def failures(reader, datas):
    """What fails of *datas*, by row."""
    payloads = Payloads.of(datas)
    return reader.read(reader.make(len(datas)), payloads, draws_of(0, 0, np.arange(len(datas))))


def wav(frames, rate=8000, channels=1, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (frames, channels)).astype(np.float32), rate


def encoded(*sounds):
    return [encode_field("wav", sound) for sound in sounds]


@pytest.mark.parametrize("parts", [1, 3])
def test_sounds_are_padded_to_the_longest(parts):
    sounds = [wav(frames, seed=frames) for frames in (5, 0, 12)]
    samples, lengths = whole(readers.audio(8000), encoded(*sounds), parts=parts)
    assert (samples.shape, samples.dtype, lengths.tolist()) == ((3, 12, 1), np.float32, [5, 0, 12])
    for row, (wanted, _) in zip(samples, sounds):
        np.testing.assert_array_equal(row[: len(wanted)], wanted)
        assert not row[len(wanted) :].any()


def test_without_padding_sounds_lie_end_to_end():
    sounds = [wav(frames, channels=2, seed=frames) for frames in (5, 0, 12)]
    values, offsets = whole(readers.audio(8000, channels=2, pad=False), encoded(*sounds))
    assert offsets.tolist() == [0, 5, 5, 17]
    np.testing.assert_array_equal(values, np.concatenate([samples for samples, _ in sounds]))


def test_crops_are_parts_of_the_sound():
    sound = wav(100)
    for crop, begin in ("start", 0), ("center", 40):
        samples, lengths = whole(readers.audio(8000, 20 / 8000, crop=crop), encoded(sound))
        assert lengths.tolist() == [20]
        np.testing.assert_array_equal(samples[0], sound[0][begin : begin + 20])
    many = encoded(*[sound] * 50)
    samples, _ = whole(readers.audio(8000, 20 / 8000, crop="random"), many)
    begins = [int(np.flatnonzero(sound[0][:, 0] == row[0, 0])[0]) for row in samples]
    assert len({*begins}) > 20
    for row, begin in zip(samples, begins):
        np.testing.assert_array_equal(row, sound[0][begin : begin + 20])
    again, _ = whole(readers.audio(8000, 20 / 8000, crop="random"), many, parts=7)
    np.testing.assert_array_equal(again, samples)


def test_channels_are_mixed_by_their_mean_or_repeated():
    stereo, mono = wav(9, channels=2), wav(9)
    mixed, _ = whole(readers.audio(8000), encoded(stereo))
    np.testing.assert_allclose(mixed[0, :, 0], stereo[0].mean(1), rtol=1e-6)
    repeated, _ = whole(readers.audio(8000, channels=3), encoded(mono))
    np.testing.assert_array_equal(repeated[0], np.repeat(mono[0], 3, 1))
    failed = failures(readers.audio(8000, channels=3), encoded(stereo, mono))
    assert {row: str(error) for row, error in failed.items()} == {
        0: "a sound of 2 channels, which cannot be mixed to 3"
    }


@pytest.mark.parametrize("rate", [16000, 11025, 6000])
def test_resampling_keeps_a_tone(rate):
    pytest.importorskip("soxr", reason="needs soxr")
    tone = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000).astype(np.float32)
    samples, lengths = whole(readers.audio(rate), encoded((tone, 8000)))
    wanted = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    assert lengths.tolist() == [rate]
    assert np.abs(samples[0, :, 0] - wanted)[rate // 20 : -rate // 20].max() < 1e-3
    samples, lengths = whole(readers.audio(rate, 0.25), encoded((tone, 8000)))
    assert (samples.shape, lengths.tolist()) == ((1, rate // 4, 1), [rate // 4])


def test_short_and_damaged_sounds_fail_alone():
    good, short, cut = *encoded(wav(100), wav(10)), encoded(wav(100))[0][:-1]
    failed = failures(readers.audio(8000, 0.01, pad=False), [good, short, cut, b"no sound"])
    assert sorted(failed) == [1, 2, 3]
    assert "a sound of 0.001 s, shorter than 0.01 s" in str(failed[1])
    assert "truncated" in str(failed[2])


@pytest.mark.parametrize("arguments", [{"rate": 0}, {"rate": 8000, "crop": "left"}, {"rate": 8000, "seconds": 0}])
def test_arguments_that_say_nothing(arguments):
    with pytest.raises(ValueError, match=r"rate|crop|seconds"):
        readers.audio(**arguments)


def test_a_loader_leaves_out_what_fails_and_hands_over_arrays(tmp_path):
    sounds = [wav(50 + i, seed=i) for i in range(20)]
    with ShardWriter(str(tmp_path / "a-%d.tar")) as writer:
        for i, sound in enumerate(sounds):
            writer.write({"__key__": f"{i:02d}", "wav": b"no sound" if i == 7 else sound, "cls": i})
    build_index(tmp_path / "a-0.tar")
    stream = Stream.from_shards(str(tmp_path / "a-0.tar"), on_error="skip")
    loader = ArrayLoader(stream, 5, fields={"wav": readers.audio(8000), "cls": readers.integer()})
    seen = {}
    for batch in loader:
        samples, lengths = batch["wav"]
        for row, length, label in zip(samples, lengths.tolist(), batch["cls"].tolist()):
            seen[label] = row[:length].copy()
    assert sorted(seen) == [i for i in range(20) if i != 7]
    for label, samples in seen.items():
        np.testing.assert_array_equal(samples, sounds[label][0])
