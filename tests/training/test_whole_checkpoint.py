"""hf_comera/training/whole_checkpoint.py: a checkpoint is there whole or not at all, and damage is named by file."""

import contextlib
import errno
import json

import pytest
import torch
from safetensors.torch import save_file

from hf_comera.training import whole_checkpoint
from hf_comera.training.whole_checkpoint import (
    MANIFEST,
    UNFINISHED,
    checkpoints,
    damage,
    drop_old,
    newest_whole,
    writing,
)
from tests.training.disk_faults import DAMAGES, Killed, killed_at

FILES = ("weights.bin", "state.json", "part/shard.bin")


def write(folder, step, contents=b"some"):
    final = folder / f"checkpoint-{step}"
    with writing(final, step=step) as unfinished:
        (unfinished / "part").mkdir()
        for name in FILES:
            (unfinished / name).write_bytes(contents * (step + len(name)))
    return final


def test_a_checkpoint_lists_its_files_and_is_whole(tmp_path):
    final = write(tmp_path, 3)
    manifest = json.loads((final / MANIFEST).read_text(encoding="utf-8"))
    assert set(manifest["files"]) == set(FILES)
    assert manifest["step"] == 3
    assert damage(final) is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    (final / "notes.txt").write_text("of a callback", encoding="utf-8")
    assert damage(final) is None


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("harm", DAMAGES)
def test_damage_is_named_and_the_one_before_found(name, harm, tmp_path):
    before, final = write(tmp_path, 3), write(tmp_path, 4)
    harm(final / name, before)
    found = damage(final)
    of_another_list = name == MANIFEST and harm.__name__ == "foreign"
    assert str(final if of_another_list else final / name) in found
    assert newest_whole(tmp_path) == (before, [found])
    assert newest_whole(tmp_path, below=4) == (before, [])


MANIFESTS = {
    "no dictionary": "[]",
    "no files": '{"format_version": 1}',
    "files no dictionary": '{"format_version": 1, "files": []}',
    "no size": '{"format_version": 1, "files": {"weights.bin": {"sha256": "0"}}}',
    "of a later version": '{"format_version": 2, "files": {}}',
    "no file": '{"format_version": 1, "files": {"part": {"bytes": 4096, "sha256": "0"}}}',
    "no text": "\xff",
}


@pytest.mark.parametrize("text", MANIFESTS.values(), ids=MANIFESTS)
def test_damaged_lists_are_refused(text, tmp_path):
    final = write(tmp_path, 1)
    (final / MANIFEST).write_text(text, encoding="latin-1")
    assert str(final) in damage(final)


def test_killed_at_any_step_it_is_there_whole_or_not_at_all(tmp_path):
    write(tmp_path / "counted", 1)
    with killed_at(1000) as steps:
        write(tmp_path / "counted", 2)
    assert steps[0] >= 10
    for number in range(1, steps[0] + 1):
        folder = tmp_path / str(number)
        before = write(folder, 1)
        with killed_at(number), pytest.raises(Killed):
            write(folder, 2)
        newest = newest_whole(folder)
        assert newest in [(before, []), (folder / "checkpoint-2", [])], number
        write(folder, 3)
        assert newest_whole(folder) == (folder / "checkpoint-3", [])
        assert not (folder / UNFINISHED).exists()


def test_killed_while_one_is_replaced_another_is_whole(tmp_path):
    with killed_at(1000) as steps:
        write(tmp_path / "counted", 2)
        write(tmp_path / "counted", 2)
    for number in range(steps[0] // 2, steps[0] + 2):
        folder = tmp_path / str(number)
        write(folder, 1)
        write(folder, 2, b"old!")
        with killed_at(number), contextlib.suppress(Killed):
            write(folder, 2)
        assert newest_whole(folder)[0].name in ("checkpoint-1", "checkpoint-2")
        assert not newest_whole(folder)[1]


def raising(error):
    def operation(*args, **kwargs):
        raise error

    return operation


def save_into_nothing(folder):
    torch.save({}, folder / "missing" / "state.pt")


FAULTS = {
    "full": (raising(OSError(errno.ENOSPC, "No space left on device")), errno.ENOSPC),
    "read-only": (raising(OSError(errno.EROFS, "Read-only file system")), errno.EROFS),
    "folder gone": (lambda folder: (folder / "missing" / "x").write_bytes(b""), errno.ENOENT),
    "safetensors": (lambda folder: save_file({"a": torch.ones(1)}, folder / "missing" / "x"), errno.ENOENT),
    "torch.save": (save_into_nothing, errno.EIO),
    "torch.save, full": (
        raising(RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos")),
        errno.EIO,
    ),
}


@pytest.mark.parametrize(("fault", "number"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_the_disk_refuses_is_told_and_leaves_nothing(fault, number, is_first, tmp_path):
    if not is_first:
        write(tmp_path, 1)

    def write_and_fail():
        with writing(tmp_path / "checkpoint-2") as folder:
            (folder / "weights.bin").write_bytes(b"some")
            fault(folder)

    with pytest.raises(OSError, match="could not be written") as caught:
        write_and_fail()
    assert caught.value.errno == number
    assert str(tmp_path) in str(caught.value)
    assert ("start again" if is_first else "resume from checkpoint-1") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ([] if is_first else ["checkpoint-1"])


def test_a_disk_that_is_full_while_files_are_put_on_it(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_checkpoint, "sync", raising(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_other_errors_stay_as_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="of the model"), writing(tmp_path / "checkpoint-1"):
        raise RuntimeError("of the model")
    assert not list(tmp_path.iterdir())


DROPS = [  # steps that are there, written now, limit, kept too, what stays
    ([1, 2], 3, 2, None, [2, 3]),
    ([1, 2], 3, None, None, [1, 2, 3]),
    ([1, 2], 3, 1, 1, [1, 3]),
    ([1, 2], 3, 2, 1, [1, 3]),
    ([4, 6], 5, 1, None, [5]),  # 6 was damaged, so the training went on from 4
    ([4, 6], 5, 2, None, [4, 5]),
    ([500, 1000], 10, 2, None, [10, 1000]),  # a new training in an old folder
]


@pytest.mark.parametrize(("there", "written", "limit", "kept", "stays"), DROPS)
def test_old_ones_are_dropped_and_never_the_new_one(there, written, limit, kept, stays, tmp_path):
    for step in (*there, written):
        write(tmp_path, step)
    drop_old(tmp_path / f"checkpoint-{written}", limit, kept and tmp_path / f"checkpoint-{kept}")
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in stays]
