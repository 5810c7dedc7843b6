"""scripts/codebert/settings.py: every setting has help, and what cannot work is refused before anything is loaded."""

import pytest

from codebert.settings import DEMO_CORE_RATIO, DEMO_STEPS, parse_settings
from loop.setup import count_steps, count_warmup


def test_defaults_are_the_demo():
    settings = parse_settings([])
    assert settings.data.train_file is None
    assert settings.data.dataset_name is None
    assert settings.model.model_name_or_path is None
    assert not settings.model.dense
    assert settings.training.target_core_ratio == DEMO_CORE_RATIO < 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [([], DEMO_STEPS), (["--num_train_epochs", "1.5"], 60), (["--max_train_steps", "7"], 7)],
)
def test_number_of_steps(options, expected):
    settings = parse_settings([*options, "--gradient_accumulation_steps", "2"])
    assert count_steps(settings.training, batches_per_epoch=80, default=DEMO_STEPS) == expected


@pytest.mark.parametrize(("options", "expected"), [([], 400), (["--num_warmup_steps", "0"], 0)])
def test_warmup(options, expected):
    assert count_warmup(parse_settings(options).training, DEMO_STEPS) == expected


def test_options_are_read():
    settings = parse_settings(
        ["--dense", "--max_train_steps", "7", "--learning_rate", "3e-4", "--mixed_precision", "bf16"]
    )
    assert settings.model.dense
    assert (settings.training.max_train_steps, settings.training.learning_rate) == (7, 3e-4)
    assert settings.training.mixed_precision == "bf16"


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        parse_settings(["--help"])
    text = capsys.readouterr().out
    for name in parse_settings([]).as_dict():
        assert f"--{name}" in text


REFUSED = [
    (["--learning_rate", "0"], "--learning_rate 0.0 must be greater than 0"),
    (["--rank", "-1"], "--rank -1 must be greater than 0"),
    (["--num_warmup_steps", "-1"], "must be 0 or greater"),
    (["--mlm_probability", "1.5"], "between 0 and 1, for example 0.15"),
    (["--validation_split_percentage", "100"], "between 0 and 100"),
    (["--model_name_or_path", "a", "--config_name", "b"], "Give one of them"),
    (["--model_name_or_path", "a", "--config_overrides", "x=1"], "random weights"),
    (["--model_name_or_path", "a", "--vocab_size", "4096"], "new tokenizer"),
    (["--tokenizer_name", "a", "--vocab_size", "4096"], "Give one of them"),
    (["--dataset_name", "a", "--train_file", "b.json"], "give one of them"),
    (["--validation_file", "b.json"], "needs --train_file"),
    (["--cuda_graphs", "--gradient_accumulation_steps", "2"], "Use a larger --per_device_train_batch_size"),
    (["--cuda_graphs", "--mixed_precision", "fp16"], "Use --mixed_precision bf16"),
    (["--max_train_step", "5"], "--max_train_step is not an option here. Did you mean --max_train_steps?"),
    (["--train_file", "nowhere.json"], "nowhere.json is not a file here"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_settings(arguments)
