"""What the ranks can't be told any more, because they have left it behind. Pure.

A command takes effect at the end of a step, so that none reaches ranks that are in their last one
or past it; and a rollback goes to a copy that their rings may have overwritten meanwhile. What was
to be undone then is undone by another attempt, which keepers and checkpoints can start.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.rank_group import RankEnd
from launch.snapshots import MissingSnapshotError
from orchestrator.actions import Action

UnderWay = tuple[int, Action]
"""A rollback that no record has followed: its command's number, and what it carries out."""


def out_of_reach(step: int, steps: int, ended: Sequence[RankEnd]) -> bool:
    """Whether the ranks, whose ``step`` of ``steps`` is recorded, take no command any more.

    They may not either where this says that they do, for they are ahead of their reports: then
    ``missed`` tells once they have ended.
    """
    return step + 1 >= steps or any(end.how == "done" for end in ended)


def missed(ended: Sequence[RankEnd], under_way: UnderWay | None) -> str:
    """Why the rollback that is under way was not carried out by ranks that are done; empty when
    there is none, or when it was."""
    if under_way is None or not ended:
        return ""
    number, action = under_way
    if all(end.result is not None and end.result.command >= number for end in ended):
        return ""
    return f"the ranks had done their last step before they could go back to step {action.to_step}"


def overwritten(cause: RankEnd, under_way: UnderWay | None) -> str:
    """Whether a rank ended because its ring has gone on past the copy that it was to go back to,
    in words; empty when it ended for another reason."""
    error = cause.cause
    if under_way is None or not isinstance(error, MissingSnapshotError) or error.tier != "ring":
        return ""
    step = under_way[1].to_step
    return f"the ranks' memory held step {step} no longer" if error.step == step else ""
