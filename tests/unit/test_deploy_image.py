"""What the GPU image gets beside its own packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.image_packages import main, name_of, pinned, wanted, wrong_torch

NEEDS = ["torch>=2.13,<2.14", "ray[default]>=2.60,<2.61", "numpy>=1.26", "pyyaml>=6"]


def test_what_the_image_has_is_not_pinned_and_torch_is_not_asked_for() -> None:
    lines = ["# made by", "torch==2.13.0", "ray==2.60.0", "PyYAML==6.0.4", "numpy==2.4.6"]
    assert pinned(lines, {"torch", "numpy", "pyyaml"}) == ["ray==2.60.0"]
    assert [name_of(line) for line in wanted(NEEDS)] == ["ray", "numpy", "pyyaml"]


@pytest.mark.parametrize("found", ["2.13.0", "2.13.0a0+git1234.nv26.10", "2.13.1+cu128"])
def test_nvidias_torch_is_the_release_it_is_made_of(found: str) -> None:
    assert wrong_torch(NEEDS, found) == ""


@pytest.mark.parametrize("found", ["2.12.1", "2.14.0a0+nv26.12", "3.0.0"])
def test_another_torch_is_refused(found: str) -> None:
    assert f"the image has torch {found}" in wrong_torch(NEEDS, found)


def test_it_reads_the_checkout_it_is_run_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["image_packages", str(tmp_path)])
    main()
    asked = (tmp_path / "wanted.txt").read_text()
    assert "deepspeed" in asked
    assert "torch>=" not in asked
