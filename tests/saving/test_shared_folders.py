"""A folder that several write and read at once, whose disk is full, or whose writers are killed."""

import errno
import multiprocessing
import os
import resource
import time

import pytest
import torch
from architectures import build
from saved import filled

from tq_cache import CacheFileError, TurboQuantCache
from tq_cache.saving import folder as folder_module
from tq_cache.saving import save as save_module
from tq_cache.saving.folder import ABANDONED, HEADER, Reader, Writer, new_save, read_header, unneeded

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def caches():
    """Of 70 and of 133 tokens."""
    model = build("llama", "turboquant")
    return model, {length: filled(model, length) for length in (70, 133)}


def save(cache, path) -> None:
    cache.save_pretrained(path, max_shard_bytes=20_000)


def names(path) -> list[str]:
    return sorted(x.name for x in path.iterdir())


def save_in_turns(caches, path, ends: float) -> None:
    while time.monotonic() < ends:
        for cache in caches.values():
            save(cache, path)


def test_a_load_gets_one_save_or_the_other_while_others_save(caches, tmp_path):
    """Before, 18 of 580 loads found a file gone."""
    model, held = caches
    save(held[70], tmp_path)
    ends = time.monotonic() + 3
    writers = [FORK.Process(target=save_in_turns, args=(held, tmp_path, ends)) for _ in range(2)]
    for writer in writers:
        writer.start()
    lengths = set()
    while any(writer.is_alive() for writer in writers):
        cache = TurboQuantCache.from_pretrained(tmp_path, model.config)
        length = cache.get_seq_length()
        for layer, expected in zip(cache.layers, held[length].layers, strict=True):
            assert torch.equal(layer.keys, expected.keys)
        lengths.add(length)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert lengths == {70, 133}
    save(held[70], tmp_path)
    assert not unneeded(tmp_path, read_header(tmp_path))


def test_what_a_reader_has_begun_it_can_read_to_the_end(caches, tmp_path):
    model, held = caches
    save(held[133], tmp_path)
    with Reader(tmp_path) as reader:
        save(held[70], tmp_path)
        for name in reader.tensors:
            reader.read(name)
        assert reader.header["length"] == 133


def test_a_reader_whose_files_go_begins_again(caches, tmp_path, monkeypatch):
    _, held = caches
    save(held[133], tmp_path)
    calls = []

    def safe_open(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            save(held[70], tmp_path)
        return original(*args, **kwargs)

    original = folder_module.safe_open
    monkeypatch.setattr(folder_module, "safe_open", safe_open)
    with Reader(tmp_path) as reader:
        assert reader.header["length"] == 70
        for name in reader.tensors:
            reader.read(name)


@pytest.mark.parametrize("most", [0, 5_000])
def test_a_full_disk_is_an_os_error_and_the_older_save_stays(caches, tmp_path, most):
    """A limit on the size of files, which is met as a full disk is: by the call that writes."""
    _, held = caches
    save(held[70], tmp_path)
    before, limits = names(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            save(held[133], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert names(tmp_path) == before and read_header(tmp_path)["length"] == 70


def test_safetensors_words_for_a_full_disk_become_its_number(caches, tmp_path, monkeypatch):
    _, held = caches

    def save_file(*args, **kwargs):
        raise folder_module.SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

    monkeypatch.setattr(folder_module, "save_file", save_file)
    with pytest.raises(OSError, match="expected to write .* free some room") as caught:
        save(held[70], tmp_path)
    assert caught.value.errno == errno.ENOSPC and not names(tmp_path)


def killed(cache, path) -> None:
    """Writes files, and dies before the header."""
    save_module.write_header = lambda *_: os._exit(9)
    save(cache, path)


def test_what_killed_writers_left_goes_after_a_day(caches, tmp_path):
    _, held = caches
    save(held[70], tmp_path)
    before = set(names(tmp_path))
    process = FORK.Process(target=killed, args=(held[133], tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 9
    left = set(names(tmp_path)) - before
    assert len(left) > 2 and any(x.startswith(f".{HEADER}-") for x in left)
    assert unneeded(tmp_path, read_header(tmp_path)) == sorted(left)
    save(held[70], tmp_path)
    assert left < set(names(tmp_path))  # it might go on
    for name in left:
        long_ago = time.time() - 2 * ABANDONED
        os.utime(tmp_path / name, (long_ago, long_ago))
    save(held[70], tmp_path)
    assert not unneeded(tmp_path, read_header(tmp_path))
    assert not left & set(names(tmp_path))


def test_a_save_that_goes_on_keeps_its_files_and_one_that_has_ended_does_not(caches, tmp_path):
    _, held = caches
    with new_save(tmp_path) as name, Writer(tmp_path, 0, 10**6) as writer:
        writer.save = name
        writer.add("x", torch.zeros(100))
        writer.flush()
        mine = set(names(tmp_path))
        assert len(mine) == 2
        for length in (70, 133):
            save(held[length], tmp_path)
            assert mine < set(names(tmp_path)) and read_header(tmp_path)["length"] == length
    save(held[70], tmp_path)  # which finds the files of a save that ended without a header
    assert not unneeded(tmp_path, read_header(tmp_path)) and not mine & set(names(tmp_path))


@pytest.mark.parametrize("wrong", [
    dict(preset="tq9"), dict(residual_length=-1), dict(center=[1]), dict(layer_presets=[[0]]), dict(surprise=1),
    dict(skip_layers=["x"]), dict(backend="triton"), dict(smooth="a"), dict(key=5),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("room", [None, 256])
def test_options_that_make_no_sense_are_the_folders_fault(caches, tmp_path, wrong, room, monkeypatch):
    model, held = caches
    save(held[70], tmp_path)
    header = read_header(tmp_path)
    header["options"].update(wrong)
    monkeypatch.setattr(folder_module, "read_header", lambda _: header)
    with pytest.raises(CacheFileError, match="expected options .* save it again|save again"):
        TurboQuantCache.from_pretrained(tmp_path, model.config, max_cache_len=room)


def test_options_of_the_call_are_not(caches, tmp_path):
    model, held = caches
    save(filled(model, 70, residual_length=10), tmp_path)
    with pytest.raises(ValueError, match="a multiple of 64") as caught:
        TurboQuantCache.from_pretrained(tmp_path, model.config, max_cache_len=256)
    assert not isinstance(caught.value, CacheFileError)
