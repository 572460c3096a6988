"""The job's states: what follows what, and that every job can end."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.lifecycle import (
    TRANSITIONS,
    Cause,
    JobState,
    TransitionRefused,
    next_state,
    nothing_to_do,
    possible_from,
    state_named,
)

STATES = st.sampled_from(list(JobState))
CAUSES = st.sampled_from(list(Cause))


@given(STATES, st.lists(CAUSES, max_size=30))
def test_only_a_person_leaves_a_terminal_state_and_no_history_skips_the_start(
    state: JobState, causes: list[Cause]
) -> None:
    for cause in causes:
        try:
            after = next_state(state, cause)
        except TransitionRefused:
            assert (state, cause) not in TRANSITIONS
            continue
        assert not state.terminal or cause is Cause.RESUME_ASKED
        # Nodes are only ever taken on the way from queued to starting.
        if after.holds_nodes and not state.holds_nodes:
            assert (state, after) == (JobState.QUEUED, JobState.STARTING)
        state = after


@given(STATES)
def test_every_state_reaches_an_end(state: JobState) -> None:
    seen, frontier = {state}, [state]
    while frontier:
        for after in possible_from(frontier.pop()).values():
            if after not in seen:
                seen.add(after)
                frontier.append(after)
    assert any(s.terminal for s in seen)


@pytest.mark.parametrize("state", [s for s in JobState if not s.terminal])
def test_a_job_that_goes_on_can_be_cancelled(state: JobState) -> None:
    if state is JobState.CANCELLING:
        assert next_state(state, Cause.ENDED) is JobState.CANCELLED
    else:
        after = next_state(state, Cause.CANCEL_ASKED)
        assert after is (JobState.CANCELLING if state.holds_nodes else JobState.CANCELLED)


def test_every_cause_occurs_in_the_table() -> None:
    assert {cause for _, cause in TRANSITIONS} == set(Cause)


def test_a_supervisors_late_word_does_not_undo_a_cancellation() -> None:
    for cause in (Cause.FIRST_STEP, Cause.INCIDENT, Cause.RECOVERED, Cause.RANK_LOST):
        assert next_state(JobState.CANCELLING, cause) is JobState.CANCELLING


def test_a_refusal_names_what_was_possible_and_survives_pickling() -> None:
    with pytest.raises(TransitionRefused) as refused:
        next_state(JobState.PAUSED, Cause.FIRST_STEP)
    again = pickle.loads(pickle.dumps(refused.value))
    assert str(again) == str(refused.value)
    assert "resume asked → queued" in str(again)
    assert "cancel asked → cancelled" in str(again)


def test_states_are_found_by_their_stored_word() -> None:
    assert [state_named(s.word) for s in JobState] == list(JobState)
    with pytest.raises(ValueError, match="'dead'"):
        state_named("dead")


@pytest.mark.parametrize(
    ("state", "cause", "told"),
    [
        (
            JobState.SUCCEEDED,
            Cause.CANCEL_ASKED,
            "has succeeded already; there is nothing to cancel",
        ),
        (JobState.FAILED, Cause.CANCEL_ASKED, "has failed already; there is nothing to cancel"),
        (
            JobState.CANCELLED,
            Cause.CANCEL_ASKED,
            "was cancelled already; there is nothing to cancel",
        ),
        (
            JobState.SUCCEEDED,
            Cause.RESUME_ASKED,
            "has succeeded already; there is nothing to resume",
        ),
        (
            JobState.CANCELLING,
            Cause.RESUME_ASKED,
            "is being cancelled; resume it once it has ended",
        ),
        (
            JobState.RUNNING,
            Cause.RESUME_ASKED,
            "is running already; only a paused, cancelled or failed job is resumed",
        ),
        (
            JobState.QUEUED,
            Cause.RESUME_ASKED,
            "waits for its nodes already; only a paused, cancelled or failed job is resumed",
        ),
    ],
)
def test_what_a_person_asks_in_vain_is_refused_in_a_sentence(
    state: JobState, cause: Cause, told: str
) -> None:
    with pytest.raises(TransitionRefused) as refused:
        next_state(state, cause)
    assert nothing_to_do("toy-1", refused.value) == f"toy-1 {told}"
