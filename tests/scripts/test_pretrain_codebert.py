"""scripts/pretrain_codebert.py: a run is complete, resumes number for number, and refuses what cannot be resumed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import pretrain_codebert
from codebert.settings import DEMO_CORE_RATIO
from hf_comera import is_comera_model
from hf_comera.ops import use_kernels
from hf_comera.ops.cuda.switch import kernels_are_wanted
from loop import launch as loop_launch
from tests.scripts.device_reads import forbid_waiting, forbid_waiting_in

TINY = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,hidden_dropout_prob=0.1"
SCRIPT = Path(pretrain_codebert.__file__)


@pytest.fixture(scope="module")
def train_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [
        {
            "code": f"def f{n}(value, other):\n    result = value + {n}\n    return result * other",
            "docstring": f"Add {n}.",
        }
        for n in range(120)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def arguments(train_file, tmp_path):
    return [
        "--train_file", str(train_file), "--output_dir", str(tmp_path / "out"), "--config_overrides", TINY,
        "--vocab_size", "300", "--max_seq_length", "48", "--per_device_train_batch_size", "4",
        "--gradient_accumulation_steps", "2", "--max_train_steps", "8", "--num_warmup_steps", "2", "--eval_steps", "3",
        "--rank", "4", "--num_threads", "1", "--use_cpu", "--speed_comparison_steps", "0", "--learning_rate", "1e-2",
    ]  # fmt: skip


def metrics(arguments):
    folder = Path(arguments[arguments.index("--output_dir") + 1])
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def elsewhere(arguments, tmp_path):
    changed = list(arguments)
    changed[arguments.index("--output_dir") + 1] = str(tmp_path / "other")
    return changed


def interrupt_after(monkeypatch, step, number=signal.SIGINT):
    """Send this process a signal in the middle of a step."""
    take_step = pretrain_codebert.optimizer_step

    def step_and_signal(run, batches):
        if run.step == step - 1:
            os.kill(os.getpid(), number)
        take_step(run, batches)

    monkeypatch.setattr(pretrain_codebert, "optimizer_step", step_and_signal)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_resumes_number_for_number(arguments, tmp_path, monkeypatch, capsys, number):
    assert pretrain_codebert.main(arguments) == 0
    expected = metrics(arguments)
    interrupted = elsewhere(arguments, tmp_path)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4, number)
        assert pretrain_codebert.main(interrupted) == 130
    assert "--resume_from_checkpoint latest" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "other").glob("checkpoint-*")] == ["checkpoint-4"]
    torch.manual_seed(12345)  # a new process would have another state as well
    assert pretrain_codebert.main([*interrupted, "--resume_from_checkpoint", "latest"]) == 0
    resumed = metrics(interrupted)
    assert len(resumed["losses"]) == 8
    assert resumed["losses"] == expected["losses"]
    assert resumed["held_out_losses"] == expected["held_out_losses"]
    assert not list((tmp_path / "other").glob("checkpoint-*"))


def test_finished_folder_holds_everything(arguments, tmp_path):
    arguments[arguments.index("--speed_comparison_steps") + 1] = "2"
    assert pretrain_codebert.main(arguments) == 0
    folder = tmp_path / "out"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"model.safetensors", "config.json", "tokenizer.json", "README.md", "metrics.json"}
    assert names >= {"loss.png", "ranks.png"}
    model = AutoModelForMaskedLM.from_pretrained(folder)
    assert is_comera_model(model)
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    figures = metrics(arguments)
    assert figures["reload_is_bit_equal"]
    assert figures["speed"]["num_steps"] == 2
    assert [step for step, _ in figures["held_out_losses"]] == [0, 3, 6, 8]
    assert figures["held_out_loss"] < figures["held_out_losses"][0][1]
    assert len(figures["filled_masks"]) == 3
    uncut = elsewhere(arguments, tmp_path)
    assert pretrain_codebert.main([*uncut, "--target_core_ratio", "1"]) == 0
    cores = metrics(uncut)["sizes"]["compressed_parameters"]
    assert figures["sizes"]["compressed_parameters"] <= DEMO_CORE_RATIO * cores


def test_dense_twin_trains_in_the_same_loop(arguments, tmp_path):
    assert pretrain_codebert.main([*arguments, "--dense"]) == 0
    figures = metrics(arguments)
    assert figures["reload_is_bit_equal"]
    assert figures["sizes"]["ratio"] == 1
    assert not is_comera_model(AutoModelForMaskedLM.from_pretrained(tmp_path / "out"))


def test_a_policy_changes_memory_and_not_the_losses(arguments, tmp_path):
    assert pretrain_codebert.main(arguments) == 0
    rebuilt = elsewhere(arguments, tmp_path)
    assert pretrain_codebert.main([*rebuilt, "--activation_policy", "rank"]) == 0
    assert metrics(rebuilt)["losses"] == metrics(arguments)["losses"]


def test_graphs_kernels_and_fp8_are_passed_on(arguments, tmp_path, caplog):
    """On a CPU: steps run as usual for want of CUDA graphs, and no layer is large enough for FP8."""
    arguments[arguments.index("--gradient_accumulation_steps") + 1] = "1"
    assert pretrain_codebert.main(arguments) == 0
    fast = elsewhere(arguments, tmp_path)
    try:
        assert pretrain_codebert.main([*fast, "--cuda_graphs", "--kernels", "--fp8"]) == 0
        assert kernels_are_wanted()
    finally:
        use_kernels(False)
    for told in ("without a CUDA graph", "CUDA kernels were asked for", "set_fp8_linears(min_features=2048) changes"):
        assert told in caplog.text
    assert metrics(fast)["losses"] == metrics(arguments)["losses"]
    assert metrics(fast)["training_tokens"] == metrics(arguments)["training_tokens"]


def test_moments_in_fp8_train_and_resume(arguments, tmp_path, monkeypatch):
    settings = ["--optimizer", "coat_adamw", "--activation_policy", "rank+fp8"]
    assert pretrain_codebert.main([*arguments, *settings]) == 0
    interrupted = [*elsewhere(arguments, tmp_path), *settings]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        assert pretrain_codebert.main(interrupted) == 130
    assert pretrain_codebert.main([*interrupted, "--resume_from_checkpoint", "latest"]) == 0
    assert metrics(interrupted)["losses"] == metrics(arguments)["losses"]


def test_checkpoints_of_other_settings_are_refused(arguments, tmp_path):
    kept = [*arguments, "--checkpointing_steps", "3"]
    assert pretrain_codebert.main(kept) == 0
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    with pytest.raises(ValueError, match=r"checkpoint-6.*--overwrite_output_dir"):
        pretrain_codebert.main(kept)
    resumed = [*kept, "--resume_from_checkpoint", "latest"]
    with pytest.raises(ValueError, match=r"learning_rate was 0.01, is 0.5"):
        pretrain_codebert.main([*resumed, "--learning_rate", "0.5"])
    with pytest.raises(ValueError, match="total_steps was 8, is 9"):
        pretrain_codebert.main([*resumed, "--max_train_steps", "9"])
    before, newest = (tmp_path / "out" / f"checkpoint-{step}" for step in (3, 6))
    (newest / "optimizer.bin").unlink()
    with pytest.raises(ValueError, match=r"optimizer.bin is missing. The newest whole one before it:") as caught:
        pretrain_codebert.main([*kept, "--resume_from_checkpoint", str(newest)])
    assert f"accelerate launch {pretrain_codebert.SCRIPT} --train_file" in str(caught.value)
    assert str(caught.value).endswith(f"--checkpointing_steps 3 --resume_from_checkpoint {before}")


def test_sequences_longer_than_the_model_are_refused(arguments, tmp_path):
    assert pretrain_codebert.main([*arguments, "--max_train_steps", "1"]) == 0
    again = [*elsewhere(arguments, tmp_path), "--config_name", str(tmp_path / "out"), "--max_seq_length", "64"]
    with pytest.raises(ValueError, match=r"--max_seq_length 64 is more than the model takes: its positions hold 48"):
        pretrain_codebert.main(again)


COMMANDS = [
    (["--seed", "1"], ["--seed", "1"]),
    (["--resume_from_checkpoint", "latest", "--seed", "1"], ["--seed", "1"]),
    (["--resume-from-checkpoint=a/b", "--overwrite_output_dir", "--seed", "1"], ["--seed", "1"]),
]


@pytest.mark.parametrize(("given", "kept"), COMMANDS)
def test_command_to_resume_drops_how_the_run_began(given, kept):
    assert loop_launch.without_resume(given) == kept


@pytest.mark.slow
def test_two_processes_train_together_and_resume(arguments, tmp_path):
    def launch(*more):
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
        sources = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
        command = [*program, *arguments, "--checkpointing_steps", "3", *more]
        finished = subprocess.run(command, cwd=tmp_path, env=sources, capture_output=True, text=True, timeout=120)
        assert finished.returncode == 0, finished.stderr[-3000:]
        return finished

    finished = launch()
    figures = metrics(arguments)
    assert len(figures["losses"]) == 8
    assert figures["reload_is_bit_equal"]
    assert finished.stdout.count("Held-out function 1") == 1
    (tmp_path / "out" / "checkpoint-6" / "random_states_1.json").write_text("{}", encoding="utf-8")
    resumed = launch("--resume_from_checkpoint", "latest")
    assert resumed.stderr.count("random_states_1.json has 2 bytes") == 1  # one process tells
    assert "checkpoint-3, after step 3" in resumed.stdout
    assert metrics(arguments)["losses"] == figures["losses"]


def test_no_step_waits_for_the_device(arguments, monkeypatch):
    forbid_waiting(monkeypatch)
    steps = forbid_waiting_in(pretrain_codebert, monkeypatch)
    assert pretrain_codebert.main([*arguments, "--logging_steps", "3", "--max_grad_norm", "0.5"]) == 0
    assert steps == list(range(1, 9))
