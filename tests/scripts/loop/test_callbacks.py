"""scripts/loop/callbacks.py: what is no step is not timed, and waiting is shared by the steps that it is of."""

from transformers import TrainerState

from loop.callbacks import StepCosts


def test_only_steps_are_timed_and_waiting_is_shared_by_the_steps_it_is_of(monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 5.0, 9.0, 10.0, 30.0])
    monkeypatch.setattr("loop.callbacks.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("loop.callbacks.training_bytes", lambda model, optimizer: {"weights": 1})
    costs, run = StepCosts(), TrainerState(global_step=1)
    run.stateful_callbacks = {"StepCosts": costs.state()}
    costs.on_train_begin(None, run, None)
    costs.on_step_end(None, run, None)  # a second
    costs.on_step_end(None, run, None)  # a second
    costs.on_log(None, run, None, logs={"loss": 1.0})  # three, waited for both
    costs.on_evaluate(None, run, None)  # four
    costs.on_step_end(None, run, None)  # a second
    costs.on_save(None, run, None)  # twenty
    assert costs.seconds == [2.5, 2.5, 1.0]
    assert costs.state()["attributes"] == {"seconds": [2.5, 2.5, 1.0], "first_bytes": {"weights": 1}}
