"""How long rows are and how fast a run learns, to a number of steps or to a deadline."""

import pytest

from et_jax.training.schedule import Curriculum, Schedule


def test_a_deadline_plans_a_run_that_its_number_of_steps_would_repeat():
    schedule = Schedule(warmup=10)
    steps = next(found for step in range(20, 1000) if (found := schedule.planned(step, 1.0, 1000.0 - step)))
    begin = next(step for step in range(20, steps) if schedule.planned(step, 1.0, 1000.0 - step))
    for step in range(begin):  # before the plan was made
        assert schedule.factor(step, None) == schedule.factor(step, steps)
        assert schedule.length(step, None) == schedule.length(step, steps)
    seconds = sum(schedule.long_cost if schedule.length(step, steps) == 2048 else 1.0 for step in range(steps))
    assert seconds == pytest.approx(1000.0, rel=0.01)
    assert 0 < schedule.factor(steps - 1, steps) < 0.01
    assert max(schedule.factor(step, steps) for step in range(steps)) == 1.0


def test_the_curriculum_grows_rows_and_falls_to_zero_at_its_end():
    plan = Curriculum(warmup=10, decay_steps=20, stages=((0, 128), (30, 256), (60, 2048)))
    assert [plan.length(step, 100) for step in (0, 29, 30, 59, 60, 99)] == [128, 128, 256, 256, 2048, 2048]
    assert plan.factor(0, 100) == pytest.approx(0.1)
    assert plan.factor(50, 100) == plan.factor(50, None) == 1.0
    assert plan.factor(99, 100) == pytest.approx(1 / 20)
    steps = next(found for step in range(1000) if (found := plan.planned(step, 2.0, 300.0 - 2.0 * step)))
    assert steps == 150  # 300 seconds of 2
    assert all(plan.factor(step, None) == plan.factor(step, steps) for step in range(steps - 20))
