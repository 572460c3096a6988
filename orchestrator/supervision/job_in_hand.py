"""What a supervisor has of its job over all attempts: the present one, detectors, ways to start.

Promises: it decides nothing; an action is durable when ``decided`` returns.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from launch.commands import Order
from launch.rank_group import RankGroup
from monitoring.records import Incident
from orchestrator.actions import Action
from orchestrator.lifecycle import Cause, JobState
from orchestrator.planning.memory import job_memory
from orchestrator.protocol import ResumeState
from orchestrator.recovery.detector_bank import bank_of
from orchestrator.recovery.way_back import left_open
from orchestrator.saved.checkpoint_facts import facts_of
from orchestrator.saved.checkpoint_shelf import CheckpointShelf
from orchestrator.saved.restore import on_living_branch
from orchestrator.spec.completion import complete
from orchestrator.supervision import notices
from orchestrator.supervision.attempt import world_size
from orchestrator.supervision.attempt_state import AttemptState
from orchestrator.supervision.copy_troubles import CopyTrouble, CopyTroubles
from orchestrator.supervision.journal import Journal
from orchestrator.supervision.phases import Launching, Phase, Standing
from orchestrator.supervision.starting_points import StartingPoints
from orchestrator.supervision.stop_time import Saves


class JobInHand:
    """One job from one ``ResumeState`` to its end."""

    def __init__(
        self, resume: ResumeState, group: RankGroup, journal: Journal, clock: Callable[[], float]
    ) -> None:
        """``clock``: seconds since the epoch."""
        self.clock = clock
        self.group = group
        self.journal = journal
        self.spec = resume.spec
        """Of the present attempt: its degrees may be others than those of the one before."""
        self.world = world_size(resume)
        """Ranks of the present attempt."""
        num_to_keep = resume.spec.checkpoint.num_to_keep
        facts = facts_of(resume.spec)
        self.shelf = CheckpointShelf(resume.job_dir, num_to_keep, self.world, facts, clock)
        self.bank = bank_of(resume)
        """The detectors."""
        self.starts = StartingPoints(group, self.shelf, resume.spec, self.world)
        self.saves = Saves()
        self.copy_troubles = CopyTroubles()
        self.way_back = left_open(resume)
        """What no step has followed yet; None: training went on."""
        self.attempt = AttemptState(resume, self.world, clock())
        self.standing: Standing = Launching()

    @property
    def phase(self) -> Phase:
        """Where the attempt stands."""
        return self.standing.phase

    def takes_commands(self) -> bool:
        """Whether the ranks train and go on."""
        trains = self.phase is Phase.TRAINING and self.attempt.trains
        done = self.attempt.facts.step + 1 >= self.spec.training.steps
        return trains and not done and not self.group.ended()

    def on_disk(self) -> set[int]:
        """Steps of the checkpoints that the job can be taken up from. What was committed is one of
        them though the storage can't be looked at now."""
        actions = self.attempt.facts.actions
        found = self.starts.steps_on_disk(actions)
        newest = self.shelf.committed_unseen()
        return found | ({newest.step} if newest and on_living_branch(newest, actions) else set())

    def all_on_disk(self) -> bool:
        """Whether what was trained, if anything, can be taken up from a checkpoint."""
        return max(self.on_disk(), default=0) >= self.attempt.facts.step + 1

    def is_kept(self) -> bool:
        """Whether an end now loses nothing that was trained: what memory holds and no checkpoint
        does is written once the job has ended (``orchestrator.nodes.rescue``), by a storage that
        does as it should."""
        return self.all_on_disk() or (self.shelf.works and self._has_room())

    def _has_room(self) -> bool:
        """Whether the storage has room for a checkpoint, as far as it tells: this supervisor may
        not have seen it fail. What a factory's model weighs only its ranks know."""
        need = 1 if self.spec.model.factory else job_memory(complete(self.spec)).checkpoint
        try:
            return shutil.disk_usage(self.attempt.resume.job_dir).free >= need
        except OSError:
            return False

    def decided(
        self,
        action: Action,
        incidents: Sequence[Incident] = (),
        transition: tuple[JobState, Cause] | None = None,
    ) -> None:
        """Store an action, with what it answers and what the detectors know. Raises FencedError."""
        self.journal.decided(action, incidents, transition, self.bank.state_dict())

    def tell(self, troubles: Sequence[CopyTrouble]) -> None:
        """Events of what became of copies, each of when it was first heard of."""
        for trouble in troubles:
            self.journal.happened(notices.copy_trouble(trouble), trouble.since)

    def post(self, order: Order) -> int:
        """Send a command to the ranks; its number."""
        command = self.attempt.command(order)
        self.group.post(command)
        return command.number

    def go_back(self, action: Action) -> int:
        """Every rank to its own snapshot of ``action.to_step``, as a new timeline; returns the
        command's number."""
        order = self.attempt.go_back(action, self.clock())
        self.shelf.go_back(self.attempt.facts.actions)
        self.tell_rolled_back(self.clock())
        self.bank.rewind(order.to_step, timeline=order.timeline)
        number = self.post(order)
        self.attempt.under_way = (number, action)
        return number

    def tell_rolled_back(self, now: float) -> None:
        """Checkpoints that were being written of a branch that is given up."""
        for step in self.shelf.rolled_back():
            lost = "the job went back to before it while it was being written"
            self.journal.happened(notices.checkpoint(step, lost), now)
