"""Speed and memory against transformers + torch and google-tunix, on a CPU, in one run, on the real workload.

    python -m experiments.bench_peers --transformers_python=PATH --tunix_python=PATH [--shapes=tiny,0.5b-4layers]

The work is one rollout step and one update of the embedded default: ragged prompts of generated ALFWorld games, played by the
packaged policy, which share long prefixes; rows that end early; replies of uneven length. `dense` has equal lengths and no
early end. Everybody has the same weights in float32, the same rows, and all cores; each task runs in a process of its own, in
turns, and the best of the timed rounds counts (compiling does not). sample: generated tokens up to and with the end token,
each second; train: prompt and reply tokens, each second, of old log-probabilities + gradient in micro-batches of 4 rows +
AdamW. peak: memory above that of the imports. An interpreter without the peer is skipped with a message.

tiny: the packaged policy. 0.5b-4layers: width of Qwen2.5-0.5B, 4 layers, vocabulary 32,768, random weights, where every 20th
token ends a reply.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import jax
import numpy as np

from covsero_jax import model, pretrained
from experiments import compare, plan_costs, train, wiring
from experiments.peers import common

PEERS = {'covsero_jax': 'ours.py', 'transformers': 'transformers_peer.py', 'tunix': 'tunix_peer.py'}
NEEDS = {'transformers': 'torch, transformers', 'tunix': 'tunix'}
WIDE = model.QwenConfig(32_768, 896, 4864, 4, 14, 2, 64, rope_theta=1e6)
ROWS = {'tiny': 64, '0.5b-4layers': 16}


def collect_rows(num_rows: int) -> tuple[list[np.ndarray], list[np.ndarray], tuple[int, ...], tuple[int, ...]]:
    """(prompts, replies, end tokens, buckets): rows of the default's first rollouts, evenly over groups and steps."""
    config = compare.build(['--config=configs/alfworld_gigpo.py'])
    policy = wiring.load_policy(config)
    prompts = wiring.make_prompts(config, policy.tokenizer)
    num_envs = config.rollout.num_groups * config.rollout.group_size
    with wiring.make_pool(config, config.env.train_split, num_envs) as pool:
        groups, _ = train.collect(config, pool, policy, prompts, policy.params, 1, train.Stop())
    steps = [step for group in groups for trajectory in group.trajectories for step in trajectory.steps]
    chosen = [steps[i] for i in np.linspace(0, len(steps) - 1, num_rows).astype(int)]
    return ([s.prompt_tokens for s in chosen], [s.action_tokens for s in chosen], policy.eos_ids, tuple(config.prompt.buckets))


def make_work(shape: str, kind: str, folder: pathlib.Path) -> common.Work:
    prompts, replies, eos_ids, buckets = collect_rows(ROWS[shape])
    weights = wiring.environments.TINY_POLICIES['alfworld']
    if shape != 'tiny':
        weights = folder / 'wide'
        if not weights.exists():
            params = model.init_params(WIDE, jax.random.key(0))
            pretrained.save_folder(weights, WIDE, params)
        eos_ids = tuple(range(7, WIDE.vocab_size, 20))
    if kind == 'dense':
        rng, vocabulary = np.random.default_rng(0), pretrained.load_config(weights).vocab_size
        prompts = [rng.integers(100, vocabulary, 256).astype(np.int32) for _ in prompts]
        replies = [rng.integers(100, vocabulary, 32).astype(np.int32) for _ in prompts]
        eos_ids, buckets = (1,), (256,)  # hardly ever drawn
    max_new = 16 if (shape, kind) == ('tiny', 'ragged') else 32
    return common.Work(str(weights), prompts, replies, eos_ids, max_new, 32 if shape == 'tiny' else 16, buckets)


def measure(peer: str, python: str, task: str, work: pathlib.Path, rounds: int, out: pathlib.Path) -> dict | None:
    """One process of one contender; None when it fails, with the end of its output."""
    script = pathlib.Path(__file__).parent / 'peers' / PEERS[peer]
    start = ['-m', 'experiments.peers.ours'] if peer == 'covsero_jax' else [str(script)]
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'TOKENIZERS_PARALLELISM': 'false'}
    done = subprocess.run([python, *start, task, str(work), str(out), str(rounds)], env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f'{peer} {task} failed:\n{done.stderr[-1500:]}', flush=True)
        return None
    return json.loads(out.read_text())


def has(python: str, modules: str) -> bool:
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, '-c', f'import {modules}'], capture_output=True).returncode == 0


def useful_flops(config: model.QwenConfig, work: common.Work) -> float:
    """Of one round of `train` without padding: forward for the old log-probabilities, forward and backward for the gradient."""
    return 4 * sum(plan_costs.logprobs(config, 1, len(prompt) + len(reply), len(prompt) - 1, len(reply)).flops
                   for prompt, reply in zip(work.prompts, work.replies, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--transformers_python', default=sys.executable, help='an interpreter that has torch and transformers')
    parser.add_argument('--tunix_python', default=sys.executable, help='an interpreter that has google-tunix')
    parser.add_argument('--shapes', default='tiny,0.5b-4layers')
    parser.add_argument('--kinds', default='ragged,dense')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--out', default='results/bench_peers.json')
    parser.add_argument('--only_show', action='store_true', help='the table of what was measured before')
    options = parser.parse_args(arguments)
    if options.only_show:
        print(table(json.loads(pathlib.Path(options.out).read_text())['rows']))
        return
    pythons = {'covsero_jax': sys.executable, 'transformers': options.transformers_python, 'tunix': options.tunix_python}
    for peer, modules in NEEDS.items():
        if not has(pythons[peer], modules):
            print(f'{peer} is skipped: {pythons.pop(peer)} cannot import {modules}; give --{peer}_python=PATH')
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for shape in options.shapes.split(','):
            for kind in options.kinds.split(','):
                work = make_work(shape, kind, folder)
                work.write(folder / 'work.json')
                for task in ('sample', 'train'):
                    for peer, python in pythons.items():
                        got = measure(peer, python, task, folder / 'work.json', options.rounds, folder / 'out.json')
                        if got is None:
                            continue
                        row = {'shape': shape, 'kind': kind, 'task': task, 'peer': peer, **got}
                        if task == 'train' and peer == 'covsero_jax':
                            config = pretrained.load_config(work.folder)
                            seconds = work.num_tokens / got['tokens_per_s']
                            row['ceiling_share'] = useful_flops(config, work) / seconds / got['ceiling_gflops'] / 1e9
                        found.append(row)
                        print(line(row, found), flush=True)
    out = pathlib.Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({'date': datetime.date.today().isoformat(), 'cores': os.cpu_count(), 'rows': found}, indent=1) + '\n')
    print(f'{table(found)}\nresults: {out}')


def line(row: dict, rows: Sequence[dict]) -> str:
    ours = next(r for r in rows if (r['shape'], r['kind'], r['task'], r['peer']) == (row['shape'], row['kind'], row['task'], 'covsero_jax'))
    text = (f'{row["shape"]:13}{row["kind"]:8}{row["task"]:8}{row["peer"]:14}{row["tokens_per_s"]:10,.0f} tokens/s '
            f'{row["peak_mib"]:7,.0f} MiB')
    if row is not ours:
        text += f'   ours: {ours["tokens_per_s"] / row["tokens_per_s"]:.2f} x the speed, {ours["peak_mib"] / row["peak_mib"]:.2f} x the memory'
    if 'ceiling_share' in row:
        text += f'   {row["ceiling_share"]:.0%} of the ceiling of {row["ceiling_gflops"]:.0f} GFLOP/s'
    return text


def table(rows: Sequence[dict]) -> str:
    """Markdown: a line for each shape, kind and task; tokens/s and peak of memory, and by how much ours is faster."""
    lines = [f'| shape, rows, task | {" | ".join(PEERS)} | of the ceiling |', '|---' * (len(PEERS) + 2) + '|']
    for key in dict.fromkeys((row['shape'], row['kind'], row['task']) for row in rows):
        by_peer = {row['peer']: row for row in rows if (row['shape'], row['kind'], row['task']) == key}
        ours, cells = by_peer['covsero_jax'], []
        for peer in PEERS:
            row = by_peer.get(peer)
            ratio = f', {ours["tokens_per_s"] / row["tokens_per_s"]:.2f}x' if row and row is not ours else ''
            cells.append(f'{row["tokens_per_s"]:,.0f}{ratio} ({row["peak_mib"]:,.0f} MiB)' if row else 'not run')
        share = f'{ours["ceiling_share"]:.0%}' if 'ceiling_share' in ours else ''
        lines.append(f'| {", ".join(key)} | {" | ".join(cells)} | {share} |')
    return '\n'.join(lines)


if __name__ == '__main__':
    with wiring.one_line_errors():
        main()
