"""Fine-tune a looped model with transformers and PEFT, then record, diagnose and certify what came out.

    python recipes/fine_tuning/fine_tune.py base --texts sums --out tuned

`--texts` holds `train.txt`, `validation.txt` and `test.txt` (documents between `<|endoftext|>`). The run goes on where
it was interrupted, with the same command. `--out` gets the merged model (a checkpoint in the layout of the Hub), the
recordings of the model before, after, and after with the gate that it had, and the exit policy.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import loopscope as ls
from loopscope.integrations.transformers import LoopTrainer, lora_config
from loopscope.models.checkpoint_folder import BESIDE_WEIGHTS
from loopscope.recording.text_recording import record_text
from loopscope.training.language_run import cut_windows, token_stream
from loopscope.training.settings import Objective


def windows(text: Path, checkpoint: Path, context: int) -> list[dict[str, Any]]:
    """Rows of so many tokens and the one that is to be said after them."""
    found = cut_windows(token_stream([text], checkpoint), context).tokens
    return [{"input_ids": row, "labels": row} for row in found]


def tune(start: Path, texts: Path, out: Path, options: argparse.Namespace) -> Path:
    """The merged model, trained from `start`."""
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(start)
    if options.train == "gate":
        model.requires_grad_(False)
        model.looped.gate.requires_grad_(True)
    elif options.train == "adapters":
        model = get_peft_model(model, lora_config(model, rank=options.rank, alpha=2 * options.rank))
    arguments = TrainingArguments(
        str(out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=16,
        learning_rate=options.learning_rate,
        warmup_steps=options.steps // 20,
        lr_scheduler_type="cosine",
        logging_steps=50,
        eval_strategy="steps",
        eval_steps=options.steps // 4,
        save_steps=options.steps // 4,
        save_total_limit=2,
        seed=options.seed,
        report_to=options.report_to,
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = LoopTrainer(
        model,
        arguments,
        objective=Objective(name="decoupled_gate", prior="uniform", beta=options.beta),
        train_dataset=windows(texts / "train.txt", start, 64),
        eval_dataset=windows(texts / "validation.txt", start, 64),
    )
    done = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
    if done is None:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=done)
    if options.train == "adapters":
        model = model.merge_and_unload()
    model.save_pretrained(out / "model")
    copy_tokenizer(start, out / "model")
    return out / "model"


def with_old_gate(tuned: Path, start: Path, out: Path) -> Path:
    """The tuned model with the gate that it had: the same trajectory and accuracy, so that gates alone are compared."""
    model, old = (AutoModelForCausalLM.from_pretrained(each) for each in (tuned, start))
    model.looped.gate.load_state_dict(old.looped.gate.state_dict())
    model.save_pretrained(out)
    copy_tokenizer(start, out)
    return out


def copy_tokenizer(start: Path, out: Path) -> None:
    for name in BESIDE_WEIGHTS:
        if (start / name).is_file() and name != "generation_config.json":
            shutil.copy(start / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path, help="the checkpoint to begin with")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", choices=["adapters", "gate", "all"], default="adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--beta", type=float, default=0.05)
    parser.add_argument("--max-drop", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report-to", default="none", help="tensorboard, wandb, trackio: whatever transformers knows")
    options = parser.parse_args()
    tuned = tune(options.start, options.texts, options.out, options)

    out = options.out
    models = {
        "before": options.start,
        "old gate": with_old_gate(tuned, options.start, out / "old-gate"),
        "after": tuned,
    }
    recordings = {
        (name, split): record_text(
            folder,
            [options.texts / f"{split}.txt"],
            split,
            out / "recordings" / name.replace(" ", "-") / split,
            context=64,
        )
        for name, folder in models.items()
        for split in ("validation", "test")
    }
    for name in models:
        validation, test = (recordings[name, split] for split in ("validation", "test"))
        accuracy = ", ".join(f"{100 * each:.1f} %" for each in test.correct.mean(0))
        print(f"{name}: next tokens of the test text right after every loop: {accuracy}")
        print(ls.diagnose(validation, test))
    policy = ls.calibrate(recordings["after", "validation"], options.max_drop)
    policy.save(out / "policy.json")
    test = recordings["after", "test"]
    exits = policy.exit_loops(test)
    right = test.correct[range(len(exits)), exits - 1].mean()
    print(policy.guarantee.sentence if policy.guarantee else "Nothing could be guaranteed.")
    print(
        f"{policy}: {exits.mean():.2f} of {test.num_loops} loops on the test text, {100 * right:.1f} % right "
        f"({100 * test.correct[:, -1].mean():.1f} % at full depth)"
    )


if __name__ == "__main__":
    try:
        main()
    except ls.UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
