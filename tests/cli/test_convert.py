"""`vime convert`: which folders it takes and writes, and how much memory it needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vime.cli.convert import convert
from vime.cli.main import main
from vime.errors import ConfigError
from vime.loop.checkpoint import open_checkpoint


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


def test_there_and_back_by_the_command(tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, back = tmp_path / "weights", tmp_path / "back"
    assert main(["convert", str(tiny_qwen3), str(weights)]) == 0
    assert "for --load with --finetune, 25 tensors, 0.6 MB, float32, read back" in capsys.readouterr().out
    assert open_checkpoint(weights).is_weights_alone
    assert main(["convert", str(weights), str(back), "--hf-checkpoint", str(tiny_qwen3)]) == 0
    assert (back / "tokenizer.json").is_file() and [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []
    again = tmp_path / "again"
    convert(back, weights, overwrite=True)
    convert(weights / "trainer", again, hf_checkpoint=back)
    assert files(again) == files(back)


def test_a_runs_newest_checkpoint_or_a_certain_one_is_exported(tiny_qwen3: Path, tmp_path: Path) -> None:
    run = tmp_path / "checkpoints"
    for rollout_id in (3, 4):
        path = run / f"rollout_{rollout_id:06d}"
        convert(tiny_qwen3, path)
        state = {"format": 2, "rollout_id": rollout_id, "data_source": {}, "stop": {}}
        settings = json.loads((path / "weights.json").read_text())["settings"]
        (path / "weights.json").unlink()
        (path / "state.json").write_text(json.dumps({**state, "settings": settings}))
    (run / "rollout_000004" / "trainer" / ".metadata").write_text("")
    convert(run, tmp_path / "3", hf_checkpoint=tiny_qwen3, ckpt_step=3)
    convert(run / "rollout_000003", tmp_path / "3 too", hf_checkpoint=tiny_qwen3, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"rollout_000004/trainer is not a training checkpoint, or is damaged"):
        convert(run, tmp_path / "4", hf_checkpoint=tiny_qwen3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "3 too", "checkpoints"]
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((tiny_qwen3 / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2}))
    with pytest.raises(ConfigError, match=r"the model's num_attention_heads was 4 and is 2"):
        convert(run, tmp_path / "4", hf_checkpoint=other, ckpt_step=3)
    with pytest.raises(ConfigError, match=r"^--ckpt-step is 7, but /\S+/checkpoints has the checkpoints of .* 3, 4$"):
        convert(run, tmp_path / "7", hf_checkpoint=tiny_qwen3, ckpt_step=7)
    with pytest.raises(ConfigError, match=r"is 4, but .*rollout_000003 is the checkpoint of another rollout"):
        convert(run / "rollout_000003", tmp_path / "7", hf_checkpoint=tiny_qwen3, ckpt_step=4)
    (run / "rollout_000003").rename(run / "best")
    with pytest.raises(ConfigError, match="best is a checkpoint under another name"):
        convert(run / "best", tmp_path / "7", hf_checkpoint=tiny_qwen3)


def test_what_is_there_is_not_written_over(tiny_qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"exists; choose another|holds other files, .* choose another"):
            convert(tiny_qwen3, tmp_path, overwrite=overwrite)
    weights = tmp_path / "weights"
    convert(tiny_qwen3, weights)
    with pytest.raises(ConfigError, match="or add --overwrite"):
        convert(tiny_qwen3, weights)
    kinds = r"holds converted weights, and --overwrite replaces only an HF checkpoint, which is what would be written"
    with pytest.raises(ConfigError, match=kinds):
        convert(weights / "trainer", weights, hf_checkpoint=tiny_qwen3, overwrite=True)
    with pytest.raises(ConfigError, match="is what is read"):
        convert(tiny_qwen3, tiny_qwen3, overwrite=True)
    with pytest.raises(ConfigError, match="for a training checkpoint, add --hf-checkpoint"):
        convert(weights, tmp_path / "hf")
    with pytest.raises(ConfigError, match="leave --hf-checkpoint out"):
        convert(tiny_qwen3, tmp_path / "hf", hf_checkpoint=tiny_qwen3)
    with pytest.raises(ConfigError, match="is no folder"):
        convert(tmp_path / "nowhere", tmp_path / "hf")
    assert (tmp_path / "notes.txt").read_text() == "mine"


_MEASURE = """
import sys
from pathlib import Path
import vime.trainer.megatron.checkpoints.convert
from vime.cli.convert import convert
# Not getrusage, whose peak begins with that of the process that started this one.
kib = lambda name: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
source, target, *hf = map(Path, sys.argv[1:])
before = kib("VmRSS")
convert(source, target, hf_checkpoint=hf[0] if hf else None)
print(1024 * (kib("VmHWM") - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 16])
def test_the_peak_of_memory_is_a_part_of_the_models_size(tmp_path: Path, experts: int) -> None:
    """A model of about 500 MB either way; the bound of 1.2 times its size is far above what one tensor needs."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 16384, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes |= {"head_dim": 64, "intermediate_size": 3072, "tie_word_embeddings": False}
    if experts:
        more = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **more, num_hidden_layers=5))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_hidden_layers=18))
    source, weights, back = (tmp_path / name for name in ("source", "weights", "back"))
    model.bfloat16().save_pretrained(source)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert size > 400e6
    for arguments in ([source, weights], [weights, back, source]):
        command = [sys.executable, "-W", "ignore", "-c", _MEASURE, *map(str, arguments)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = int(out.split()[-1])
        print(f"{arguments[0].name} -> {arguments[1].name}: {used / size:.2f} of {size / 1e6:.0f} MB")
        assert used < 1.2 * size
    assert files(back).keys() == files(source).keys()
