"""transformers and torch in the comparison of `experiments.bench_peers`, used as their documentation shows.

Batches are sorted by length and padded on the left, attention is torch's own (sdpa), log-probabilities are computed for the
reply's positions only, weights are updated by torch's AdamW.
"""

from __future__ import annotations

import pathlib
import sys

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # this interpreter need not know the project
import common

MICRO_ROWS = 4


def load(work: common.Work):
    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32)


def sample(work: common.Work) -> common.Round:
    model = load(work).eval()

    def once(round_: int) -> int:
        torch.manual_seed(round_)
        useful = 0
        for rows in work.batches():
            longest = max(len(work.prompts[row]) for row in rows)
            tokens, mask = work.padded(rows, longest)
            out = model.generate(
                torch.tensor(tokens, dtype=torch.long), attention_mask=torch.tensor(mask.astype(int)), do_sample=True, top_k=0,
                top_p=1.0, temperature=1.0, max_new_tokens=work.max_new, eos_token_id=list(work.eos_ids), pad_token_id=0)
            for reply in out[:, longest:].tolist():
                ends = [i for i, token in enumerate(reply) if token in work.eos_ids]
                useful += ends[0] + 1 if ends else len(reply)
        return useful

    return once


def train(work: common.Work) -> common.Round:
    model = load(work).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)
    order = [row for rows in work.batches() for row in rows]
    micros = [order[i : i + MICRO_ROWS] for i in range(0, len(order), MICRO_ROWS)]
    total = sum(map(len, work.replies))

    def logprobs(rows):
        prompt, prompt_mask = work.padded(rows, max(len(work.prompts[row]) for row in rows))
        reply, reply_mask = work.padded_replies(rows, max(len(work.replies[row]) for row in rows))
        tokens = torch.cat([torch.tensor(prompt), torch.tensor(reply)], 1).long()
        mask = torch.cat([torch.tensor(prompt_mask), torch.tensor(reply_mask)], 1)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        logits = model(tokens, attention_mask=mask.long(), position_ids=positions, use_cache=False,
                       logits_to_keep=reply.shape[1] + 1).logits[:, :-1]
        chosen = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, prompt.shape[1] :, None])[..., 0]
        return chosen, torch.tensor(reply_mask)

    def once(round_: int) -> int:
        with torch.no_grad():
            old = [logprobs(rows)[0] for rows in micros]
        optimizer.zero_grad(set_to_none=True)
        for rows, old_BA in zip(micros, old, strict=True):
            new_BA, mask_BA = logprobs(rows)
            ratio_BA = torch.exp(new_BA - old_BA)
            advantage_B1 = torch.tensor(work.advantages[rows])[:, None]
            loss_BA = -torch.minimum(ratio_BA * advantage_B1, ratio_BA.clamp(0.8, 1.2) * advantage_B1)
            (loss_BA[mask_BA].sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return work.num_tokens

    return once


if __name__ == '__main__':
    common.run(sys.argv, {'sample': sample, 'train': train})
