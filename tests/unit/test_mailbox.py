"""Commands come out once, in order, and only those of the attempt."""

from __future__ import annotations

import threading

import pytest

from launch.commands import Command, Stop
from launch.mailbox import CommandRefusedError, Mailbox, MissingCommandError


def command(number: int, attempt: int = 3) -> Command:
    return Command(attempt, number, Stop(f"order {number}"))


def test_commands_come_out_in_order_whatever_order_they_came_in() -> None:
    mailbox = Mailbox(3)
    mailbox.post(command(2))
    assert mailbox.newest() == 0
    mailbox.post(command(1))
    mailbox.post(command(3))
    assert mailbox.newest() == 3
    assert [c.number for c in mailbox.take(2)] == [1, 2]
    assert [c.number for c in mailbox.take(3)] == [3]


def test_a_command_is_taken_once_even_when_posted_again() -> None:
    mailbox = Mailbox(3)
    mailbox.post(command(1))
    assert len(mailbox.take(1)) == 1
    mailbox.post(command(1))
    assert mailbox.take(1) == []
    assert mailbox.newest() == 1


def test_a_command_of_another_attempt_is_refused() -> None:
    mailbox = Mailbox(3)
    with pytest.raises(CommandRefusedError, match="attempt 2"):
        mailbox.post(command(1, attempt=2))
    assert mailbox.newest() == 0


def test_taking_waits_for_a_post_on_its_way() -> None:
    mailbox = Mailbox(3)
    timer = threading.Timer(0.05, mailbox.post, [command(1)])
    timer.start()
    assert [c.number for c in mailbox.take(1, timeout_s=10)] == [1]
    timer.join()


def test_a_command_that_never_arrives_is_an_error_with_both_numbers() -> None:
    mailbox = Mailbox(3)
    mailbox.post(command(1))
    with pytest.raises(MissingCommandError, match=r"command 2 .* only 1"):
        mailbox.take(2, timeout_s=0.01)
