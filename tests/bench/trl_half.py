"""TRL's half of `grpo_vs_trl.py`: run `GRPOTrainer` and write the CPU seconds of every step.

Runs inside TRL's own virtual environment and imports nothing of miles or of this folder but the
reward. It does not compare and does not make the model.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent))
from endless import evenness


class Clock(TrainerCallback):
    """Note the process's CPU seconds (user and system, all threads) when each step has ended."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, args, state, control, **rest) -> None:
        self.marks.append(time.process_time())


def main(spec: dict) -> None:
    """Train as `spec` says and write `{"marks": [...], "lengths": [...]}` to its `out`."""
    torch.set_num_threads(1)
    lengths: list[int] = []

    def reward(completions, completion_ids, **columns) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [evenness(text) for text in completions]

    clock = Clock()
    config = GRPOConfig(
        output_dir=spec["scratch"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        seed=spec["seed"],
        max_steps=spec["steps"],
        per_device_train_batch_size=spec["prompts"] * spec["samples"],
        gradient_accumulation_steps=1,
        num_iterations=1,
        num_generations=spec["samples"],
        max_completion_length=spec["new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in spec["texts"]]),
        callbacks=[clock],
    )
    trainer.train()
    Path(spec["out"]).write_text(json.dumps({"marks": clock.marks, "lengths": lengths}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
