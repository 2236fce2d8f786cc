"""The comparison with others: the same rows for everybody, who is not there is named, and the table is of what was measured."""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np

from experiments import bench_peers, plan_costs
from experiments.peers import common

RESULTS = pathlib.Path(__file__).parent.parent / 'results' / 'bench_peers.json'


def test_work_survives_its_file_and_is_padded_as_it_is(tmp_path):
    work = common.Work('folder', [np.arange(1, 4, dtype=np.int32), np.arange(1, 6, dtype=np.int32)],
                       [np.array([7], np.int32), np.array([8, 9], np.int32)], (7,), 4, 2, (4, 8))
    work.write(tmp_path / 'work.json')
    same = common.read(str(tmp_path / 'work.json'))
    assert same.num_tokens == work.num_tokens == 11 and same.eos_ids == (7,) and common.bucket(same, 5) == 8
    tokens, mask = same.padded([0, 1], 5)
    assert tokens.tolist() == [[0, 0, 1, 2, 3], [1, 2, 3, 4, 5]] and mask.sum() == 8
    replies, mask = same.padded_replies([0, 1], 3)
    assert replies.tolist() == [[7, 0, 0], [8, 9, 0]] and mask.sum() == 3
    assert [rows.tolist() for rows in same.batches()] == [[1, 0]]  # the longest prompts together


def test_useful_flops_are_of_real_tokens_alone():
    work = common.Work('', [np.zeros(20, np.int32)], [np.zeros(4, np.int32)], (0,), 8, 1, (64,))
    one = 4 * plan_costs.logprobs(bench_peers.WIDE, 1, 24, 19, 4).flops
    assert bench_peers.useful_flops(bench_peers.WIDE, work) == one
    matrices = 8 * 24 * bench_peers.WIDE.num_layers * 3 * bench_peers.WIDE.embed_dim * bench_peers.WIDE.mlp_dim
    assert 0.5 * matrices < one < 2 * matrices


def test_who_is_not_installed_is_skipped_with_a_message(tmp_path, capsys):
    bench_peers.main(['--shapes=tiny', '--kinds=dense', '--rounds=1', f'--out={tmp_path / "out.json"}',
                      f'--transformers_python={sys.executable}', '--tunix_python=/nowhere/python'])
    out = capsys.readouterr().out
    assert 'tunix is skipped: /nowhere/python cannot import tunix; give --tunix_python=PATH' in out
    rows = json.loads((tmp_path / 'out.json').read_text())['rows']
    assert {row['peer'] for row in rows} >= {'covsero_jax'} and {row['task'] for row in rows} == {'sample', 'train'}
    assert all(row['tokens_per_s'] > 0 and row['peak_mib'] > 0 for row in rows)


def test_the_table_shows_the_committed_results(capsys):
    bench_peers.main(['--only_show', f'--out={RESULTS}'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 8 and all(line.count('|') == 6 for line in lines)
    assert lines[2].startswith('| tiny, ragged, sample |')
