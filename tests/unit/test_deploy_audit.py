"""What an audit of the packages comes to."""

from __future__ import annotations

from deploy.audit import judge

SOUND = {"name": "rich", "version": "15.0.0", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "not found"}
HOLE = {"id": "PYSEC-1", "fix_versions": ["2.0"], "aliases": [], "description": ""}
HOLED = {"name": "requests", "version": "1.0", "vulns": [HOLE]}


def test_a_known_hole_fails_with_what_mends_it() -> None:
    verdict = judge({"dependencies": [SOUND, HOLED, UNKNOWN]})
    assert verdict.code == 1
    assert verdict.lines[0] == "requests 1.0: PYSEC-1, mended in: 2.0"
    assert "2 packages audited, 1 unknown there, 1 known holes" in verdict.lines


def test_none_known_passes_and_an_index_that_knows_nothing_says_so() -> None:
    assert judge({"dependencies": [SOUND]}).code == 0
    verdict = judge({"dependencies": [UNKNOWN, UNKNOWN]})
    assert verdict.code == 0
    assert verdict.lines[0].startswith("nothing audited")
