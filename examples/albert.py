"""How is a foreign looped model brought to LoopScope? ALBERT from `transformers`, whose layers share their weights.

`LoopedAlbert` is the whole adapter. `main` trains a small ALBERT on parity for half a minute (its mask token is the
answer marker), checks it, records it, sweeps readouts, certifies an exit policy and runs it live.

Shapes: B rows, M tokens of the longest row, D width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AlbertConfig, AlbertForMaskedLM

import loopscope as ls
from loopscope.engine.replay_agreement import Agreement, compare_with_replay
from loopscope.engine.requests import task_requests
from loopscope.models.looped_model import SimpleLoopedModel
from loopscope.tasks import Parity
from loopscope.training.objectives import objective_loss
from loopscope.training.settings import Objective


class LoopedAlbert(SimpleLoopedModel):
    causal = False  # every token sees its whole row

    def __init__(self, albert: AlbertForMaskedLM) -> None:
        super().__init__()
        config = albert.config
        if config.num_hidden_groups != 1:
            raise ls.UserError("Only an ALBERT whose layers all share their weights (one group) is a looped model.")
        self.albert = albert
        self.num_loops, self.block_size = config.num_hidden_layers, config.max_position_embeddings
        self.vocab_size = config.vocab_size

    def embed_rows(self, tokens: Tensor, mask: Tensor) -> Tensor:
        bottom = self.albert.albert
        return bottom.encoder.embedding_hidden_mapping_in(bottom.embeddings(tokens))

    def block(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden_from = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, torch.finfo(hidden.dtype).min)
        return self.albert.albert.encoder.albert_layer_groups[0](hidden, hidden_from[:, None, None])

    def predict(self, head_input: Tensor) -> Tensor:
        return self.albert.predictions(head_input)


TASK = Parity(max_bits=8)


def small_albert(loops: int = 6) -> LoopedAlbert:
    config = AlbertConfig(
        vocab_size=TASK.vocab_size,
        max_position_embeddings=TASK.positions,
        num_hidden_layers=loops,
        hidden_size=64,
        embedding_size=32,
        intermediate_size=128,
        num_attention_heads=4,
        hidden_act="gelu",
        pad_token_id=None,
    )
    return LoopedAlbert(AlbertForMaskedLM(config)).eval()


def train(model: LoopedAlbert, steps: int) -> None:
    """On the losses of all loops, weighted by a fixed prior over depth."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        batch = TASK.batch(seed=0, step=step, size=128)
        tokens, lengths, labels = map(torch.from_numpy, (batch.tokens, batch.lengths, batch.labels))
        logits = model.loops(tokens, lengths, positions=lengths - 1).logits  # [T, B, V]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none")
        optimizer.zero_grad()
        objective_loss(Objective(name="fixed_prior"), losses.view(len(logits), -1), None).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def main(steps: int = 300, examples: int = 4000) -> Agreement:
    torch.manual_seed(0)
    model = small_albert()
    train(model, steps)
    ls.check_model(model)  # raises one sentence that says what is wrong

    splits = {name: TASK.split(name, examples) for name in ("validation", "test")}
    validation, test = (
        ls.record_model(model, rows.tokens, rows.lengths, rows.labels, difficulty=rows.difficulty, split=name)
        for name, rows in splits.items()
    )
    print("accuracy at every loop:", test.correct.mean(axis=0).round(3))
    for readout in ("fixed", "margin", "entropy", "kl", "hidden_change"):
        point = ls.sweep(readout, validation, test).select()
        print(f"{readout:13} {point.accuracy:.3f} at {point.average_loops:.2f} loops")

    policy = ls.calibrate(validation, max_drop=0.02, confidence=0.95)
    answers = ls.run(model, task_requests(splits["test"]), policy, batch_size=128)
    agreement = compare_with_replay(answers, policy, test)  # live answers beside the policy's replay
    print(f"{policy}: {agreement}")
    return agreement


if __name__ == "__main__":
    main()
