"""The native engine against recorded episodes of the official one, and every official walkthrough.

Needs the real games (ALFWORLD_DATA, official layout) and for the episodes ALFWORLD_GOLDEN, a folder with
episodes.jsonl.xz: one JSON per line with id, intro, admissible, won and steps of (command, feedback, admissible, won,
score, done). Skipped with a reason without them. Run with -s to see the counts.
"""

from __future__ import annotations

import json
import lzma
import os
import pathlib

import pytest

from covsero_jax.envs import alfworld_data, alfworld_engine, alfworld_oracle

VALID_SPLITS = ('valid_seen', 'valid_unseen')


def folder_from(variable: str) -> pathlib.Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f'{variable} is not set')
    return pathlib.Path(value)


def test_alfworld_golden_episodes_are_reproduced():
    golden, data = folder_from('ALFWORLD_GOLDEN'), folder_from('ALFWORLD_DATA')
    num_episodes, num_steps, mismatches = 0, 0, []
    with lzma.open(golden / 'episodes.jsonl.xz', 'rt', encoding='utf-8') as lines:
        for line in lines:
            episode = json.loads(line)
            state = alfworld_engine.read_game(data / episode['id'] / alfworld_data.GAME_FILE).initial_state()
            seen = [(state.intro(), list(state.admissible()), state.won())]
            wanted = [(episode['intro'], episode['admissible'], episode['won'])]
            for step in episode['steps']:
                text, won = state.step(step['command']), state.won()
                seen.append((text, list(state.admissible()), won, int(won), won))
                wanted.append(tuple(step[key] for key in ('feedback', 'admissible', 'won', 'score', 'done')))
            mismatches += [(episode['id'], i, ours, theirs)
                           for i, (ours, theirs) in enumerate(zip(seen, wanted, strict=True)) if ours != theirs]
            num_episodes, num_steps = num_episodes + 1, num_steps + len(episode['steps'])
    print(f'\ngolden: {num_episodes} episodes, {num_steps} steps, {len(mismatches)} mismatches')
    assert num_steps > 0
    assert not mismatches, mismatches[0]


def check_walkthroughs(splits: tuple[str, ...]) -> None:
    """Every recorded walkthrough wins, no command of it is refused, and the oracle is at most two commands longer."""
    data = folder_from('ALFWORLD_DATA')
    for split in splits:
        games, longer = alfworld_data.find_games(data, split), 0
        for i, name in enumerate(games.names):
            walkthrough = json.loads(games.path(i).read_text(encoding='utf-8'))['walkthrough']
            state = games.game(i).initial_state()
            plan = alfworld_oracle.plan(state)
            for command in walkthrough:
                assert not state.won(), (name, command)
                assert state.step(command) != alfworld_engine.NOTHING_HAPPENS, (name, command)
            assert state.won(), name
            assert plan is not None and len(walkthrough) <= len(plan) <= len(walkthrough) + 2, (name, plan)
            longer += len(plan) > len(walkthrough)
        print(f'\n{split}: {len(games)} walkthroughs win; the oracle is longer in {longer}')


def test_walkthroughs_of_the_valid_splits_win():
    check_walkthroughs(VALID_SPLITS)


@pytest.mark.slow
def test_walkthroughs_of_all_splits_win():
    root = folder_from('ALFWORLD_DATA') / alfworld_data.LAYOUT
    check_walkthroughs(tuple(sorted(path.name for path in root.iterdir() if path.is_dir())))
