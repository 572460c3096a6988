"""The loop's collaborators: learning rate, reports."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.commands import DrillReport, Report, RestorePoint
from launch.config import TrainingConfig
from launch.mailbox import Mailbox
from launch.reporter import Reporter, ReportFailedError
from launch.schedule import lr_at
from launch.training import TrainingLoop


def report(step: int) -> DrillReport:
    return DrillReport(1, 0, 0, step, 0.0, 0)


class TestLearningRate:
    def training(self, **more: Any) -> TrainingConfig:
        values = {"steps": 101, "lr": 1.0, "min_lr_ratio": 0.1, "warmup_steps": 10, **more}
        return TrainingConfig.model_validate(values)

    def test_it_rises_to_the_peak_and_falls_to_the_floor(self) -> None:
        training = self.training()
        assert lr_at(0, training) == pytest.approx(0.1)
        assert lr_at(9, training) == lr_at(10, training) == pytest.approx(1.0)
        assert lr_at(55, training) == pytest.approx(0.55)
        assert lr_at(100, training) == pytest.approx(0.1)

    def test_linear_and_constant_do_what_they_say(self) -> None:
        linear = self.training(schedule="linear", min_lr_ratio=0.0)
        assert lr_at(37, linear) == pytest.approx(0.7)
        constant = self.training(schedule="constant")
        assert {lr_at(step, constant) for step in range(10, 101)} == {1.0}

    @given(
        st.sampled_from(["cosine", "linear", "constant"]),
        st.integers(1, 50),
        st.integers(0, 60),
        st.floats(0, 1),
    )
    def test_it_stays_positive_below_the_peak_and_scales(
        self, schedule: str, steps: int, warmup: int, floor: float
    ) -> None:
        training = self.training(
            schedule=schedule, steps=steps, warmup_steps=warmup, min_lr_ratio=floor
        )
        rates = [lr_at(step, training) for step in range(steps)]
        assert all(0 <= rate <= 1.0 + 1e-12 for rate in rates)
        after = rates[warmup:]
        assert after == sorted(after, reverse=True)
        assert [lr_at(n, training, 0.5) for n in range(steps)] == [rate / 2 for rate in rates]


class TestReporter:
    def test_reports_arrive_in_order_and_in_batches(self) -> None:
        batches: list[list[Report]] = []
        reporter = Reporter(lambda batch: batches.append(list(batch)), interval_s=0.05)
        for step in range(50):
            reporter.send(report(step) if step % 2 else lambda step=step: report(step))
        assert reporter.flush()
        assert [r.step for batch in batches for r in batch] == list(range(50))
        assert len(batches) < 10
        reporter.close()

    def test_sending_never_waits_for_the_outbox(self) -> None:
        release = threading.Event()
        arrived: list[int] = []

        def outbox(batch: Sequence[Report]) -> None:
            release.wait(60)
            arrived.extend(r.step for r in batch)

        reporter = Reporter(outbox, interval_s=0.0, capacity=100)
        for step in range(1000):
            reporter.send(report(step))
        assert not arrived, "the outbox still holds its first batch"
        assert not reporter.flush(timeout_s=0.05)
        release.set()
        assert reporter.flush()
        assert arrived[-100:] == list(range(900, 1000))
        reporter.close()

    def test_a_call_that_failed_is_made_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("launch.reporter._RETRY_S", 0.01)
        calls: list[list[int]] = []

        def outbox(batch: Sequence[Report]) -> None:
            calls.append([r.step for r in batch])
            if len(calls) < 3:
                raise ConnectionError

        reporter = Reporter(outbox, interval_s=0.0)
        reporter.send(report(4))
        assert reporter.flush()
        assert calls == [[4], [4], [4]]
        reporter.close()

    def test_a_rank_whose_step_cannot_be_reported_does_not_train_on_unseen(self) -> None:
        def broken() -> Report:
            raise TypeError("unsupported ScalarType BFloat16")

        arrived: list[int] = []
        reporter = Reporter(lambda batch: arrived.extend(r.step for r in batch))
        reporter.send(broken)
        reporter.send(report(1))
        assert reporter.flush()
        assert arrived == [1], "the others are told all the same"
        with pytest.raises(ReportFailedError, match="TypeError: unsupported ScalarType BFloat16"):
            reporter.send(report(2))
        with pytest.raises(ReportFailedError):
            reporter.raise_failure()
        reporter.close()
        reporter.close()


class TestStepOfTheLog:
    def test_a_later_attempt_has_none_before_its_first_step_and_then_the_one_it_goes_on_with(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = SimpleNamespace(training=SimpleNamespace(steps=71))
        start = RestorePoint(70, "memory", 1, 0)
        fields = {"timeline": 0, "ledger": (), "lr_scale": 1.0, "run": run, "restore": start}
        loop = TrainingLoop(cast("Any", SimpleNamespace(**fields)), Mailbox(2), lambda _: None)
        seen: list[tuple[int, int | None]] = []

        def look(step: int = 0) -> None:
            seen.append((loop.step, loop.step_of_log))
            loop._step += step

        monkeypatch.setattr(loop, "_prepare", look)
        monkeypatch.setattr(loop, "_train_step", lambda: look(1))
        monkeypatch.setattr(loop, "_finish", look)
        loop.run()
        assert seen == [(70, None), (70, 70), (71, 71)]
