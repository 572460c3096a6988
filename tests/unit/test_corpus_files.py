"""Files of a corpus: those that pathlib's glob would find, found by one look into each folder."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.corpus_files import matching_files

PARTS = ("**", "*", "*.txt", "a*", "[ab]", "?", "a", "b.txt", ".hidden")
PATTERNS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).filter(
    lambda parts: parts.count("**") <= 2
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders three deep, files of every name in each, links to a file, a folder, and nowhere."""
    root = tmp_path_factory.mktemp("corpus")
    for depth in range(4):
        for folders in itertools.product(("a", "b", "ab"), repeat=depth):
            folder = root.joinpath(*folders)
            folder.mkdir(exist_ok=True)
            for name in ("b.txt", "a.bin", ".hidden"):
                (folder / name).touch()
    (root / "linked.txt").symlink_to(root / "a" / "b.txt")
    (root / "a" / "a_link").symlink_to(root / "b", target_is_directory=True)
    (root / "b" / "loop").symlink_to(root, target_is_directory=True)
    (root / "gone.txt").symlink_to(root / "nowhere")
    (root / "a" / "ab.txt").symlink_to(root / "a" / "ab.txt")
    return root


@given(PATTERNS)
def test_they_are_what_pathlib_finds(corpus: Path, parts: list[str]) -> None:
    pattern = "/".join(parts)
    expected = {p.relative_to(corpus).as_posix() for p in corpus.glob(pattern) if p.is_file()}
    assert matching_files(str(corpus), pattern) == sorted(expected)


def test_a_name_that_is_skipped_is_skipped_at_any_depth(corpus: Path) -> None:
    found = matching_files(str(corpus), "**/*", {"a", ".hidden"})
    assert "b/ab/b.txt" in found
    assert not any({"a", ".hidden"} & set(name.split("/")) for name in found)
    assert matching_files(str(corpus), "a/b.txt", {"a"}) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "text").touch()
    assert matching_files(str(tmp_path), "**/*") == ["text"]


@pytest.mark.parametrize("pattern", ["*/x.txt", "sub/x.txt", "**/x.txt", "sub/deep/x.txt"])
def test_a_file_in_a_folder_that_may_only_be_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    closed = tmp_path / "sub"
    (closed / "deep").mkdir(parents=True)
    for folder in (closed, closed / "deep"):
        (folder / "x.txt").touch()
    look = Path.stat

    def without_right_to_search(self: Path, **how: bool) -> os.stat_result:
        if closed in self.parents:
            raise PermissionError(13, "Permission denied", str(self))
        return look(self, **how)

    monkeypatch.setattr(Path, "stat", without_right_to_search)
    assert matching_files(str(tmp_path), pattern) == []
